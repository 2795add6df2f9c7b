"""Live `topo` beside Python with NVML's start: the wall time of the one over that of the other.

usage: python tests/bench/bench_topo.py [repeats]     (needs an NVIDIA driver; else the recorded machine's stand-in)

`topo` begins NVML in a child before it imports anything heavy, so that it should take at most half as long again.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1.5
BASE = [sys.executable, "-c", "import pynvml; pynvml.nvmlInit(); pynvml.nvmlDeviceGetCount()"]
TOPO = [sys.executable, "-m", "gpudoctor", "topo"]


def seconds(command: list[str], environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, env=environment, check=False, capture_output=True)
    return time.perf_counter() - begin


def environment(work: Path) -> tuple[dict[str, str], str]:
    """The machine as it is, or the recorded one where there is no driver."""
    live = {**os.environ, "PYTHONPATH": str(ROOT)}
    if subprocess.run(BASE, env=live, check=False, capture_output=True).returncode == 0:
        return live, "this machine"
    sys.path.insert(0, str(ROOT / "tests"))
    import recorded

    name = "h200-1gpu-vm"
    tree = (recorded.MACHINES / name / "tree.txt").read_text(encoding="utf-8")
    root = recorded.unpack(tree, work / name)
    fake = recorded.nvml_environment(recorded.MACHINES / name / "nvml.json")
    fake["PYTHONPATH"] += os.pathsep + str(ROOT)
    return {**os.environ, **fake, "GPUDOCTOR_SYSROOT": str(root)}, f"{name}, whose stand-in for NVML starts at once"


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as work:
        variables, machine = environment(Path(work))
        pairs = [(seconds(BASE, variables), seconds(TOPO, variables)) for _ in range(repeats)]
    base, topo = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{machine}: Python and NVML {base:.3f} s, topo {topo:.3f} s, ratio {topo / base:.2f} (limit {LIMIT})")
    return 0 if topo <= LIMIT * base or machine != "this machine" else 1


if __name__ == "__main__":
    sys.exit(main())
