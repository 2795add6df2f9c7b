"""Everything that a machine with several GPUs shows, in one call, as one JSON.

    python tests/bench/bench_several_gpus.py --out DIR [--limit-s 520] [--slow-scripts DIR] [--nccl-tests DIR]
                                             [--nvbandwidth PROGRAM] [--budget 150] [--only STEP[,STEP...]]

Each step runs in a box of time, in its own session, and is written to DIR/several.json as soon as it is there, with
its conditions, its expectation (profiles/, by judge.py) and the verdict; the raw texts are packed into DIR/raw.tar.gz.
What does not fit into --limit-s is skipped and says so; so is what needs more GPUs than there are. NVLink multicast is
kept off in every child, and no setting of the cards is changed. --nccl-tests: its sources, built there with nvcc.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from several import boxed, machine_steps, nccl_tests, script_steps
from several.bench import HERE, Bench, Failed, Skip, cpu_threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=520.0)
    parser.add_argument("--slow-scripts", type=Path, help="profile DIR/images/slow.py, which knows no ranks, as well")
    parser.add_argument("--nccl-tests", type=Path, help="sources of nccl-tests, to build and to compare with")
    parser.add_argument("--nvbandwidth", type=Path, help="the program, to compare with")
    parser.add_argument("--budget", type=float, default=150.0, help="of tune")
    parser.add_argument("--resume", type=Path, help="case.json of an earlier call's tune, to go on with its table")
    parser.add_argument("--tune", default="", help="more options of tune")
    parser.add_argument("--data", default="/tmp/several_images")
    parser.add_argument("--ranks", type=int, help="as if there were this many GPUs: a rehearsal on CPUs")
    parser.add_argument("--script", default="", help="more arguments of the training script, for a rehearsal")
    parser.add_argument("--only", help="only these steps, and what they need")
    options = parser.parse_args()
    sys.path.append(str(boxed.ROOT))
    options.out.mkdir(parents=True, exist_ok=True)
    raw = options.out.resolve() / "raw"
    raw.mkdir(exist_ok=True)
    gpus = count_gpus() if options.ranks is None else options.ranks
    bench = Bench(options, gpus, time.monotonic() + options.limit_s, raw)
    wanted = options.only.split(",") if options.only else list(STEPS)
    unknown = [name for name in wanted if name not in STEPS]
    if unknown:
        parser.error(f"no step {unknown[0]!r}; there are {', '.join(STEPS)}")
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # so that the steps' children are ended
    start_background(bench, wanted)
    print(f"{bench.gpus} GPUs, {os.cpu_count()} CPUs, {options.limit_s:.0f} s", flush=True)
    try:
        for name in STEPS:
            if name in wanted:
                step(bench, name)
    finally:
        if bench.preparing is not None:
            bench.preparing.kill()
            bench.preparing.wait()
        if bench.building is not None:
            bench.building.stop()
        write(bench)


def count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    return sum(line.startswith("GPU ") for line in said.stdout.splitlines()) if said.returncode == 0 else 0


def start_background(bench: Bench, wanted: Sequence[str]) -> None:
    """What only the CPUs do, while the first steps ask the machine: building nccl-tests and making the images."""
    if bench.gpus > 1 and bench.options.nccl_tests and "nccl_tests" in wanted:
        bench.building = nccl_tests.Build(bench.options.nccl_tests, bench.raw / "nccl_tests_build.txt")
    if bench.gpus and {"tune", "race", "profile"} & set(wanted):
        with (bench.raw / "images.txt").open("wb") as said:
            words = [sys.executable, str(HERE / "images.py"), "--prepare", *bench.script()]
            bench.preparing = subprocess.Popen(words, stdout=said, stderr=said, env=boxed.environment())


def step(bench: Bench, name: str) -> None:
    """Run one step and keep what came of it at once."""
    begun = time.monotonic()
    result: dict[str, Any] = {"status": "done", "at_s": round(bench.options.limit_s - bench.left_s(), 1)}
    load = os.getloadavg()[0]
    try:
        if bench.left_s() < LEAST_S.get(name, 10.0):
            raise Skip(f"{bench.left_s():.0f} s were left, it needs {LEAST_S.get(name, 10.0):.0f}")
        result |= STEPS[name](bench)
    except Skip as reason:
        result |= {"status": "skipped", "reason": str(reason)}
    except Failed as reason:
        result |= {"status": "failed", "reason": str(reason)}
    except Exception as error:  # one broken step must not cost the others
        result |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    result["seconds"] = round(time.monotonic() - begun, 1)
    result["conditions"] = {"load_at_start": load, "OMP_NUM_THREADS": cpu_threads()["OMP_NUM_THREADS"]} | result.get(
        "conditions", {}
    )
    bench.steps[name] = result
    tell(name, result)
    write(bench)


def tell(name: str, result: dict[str, Any]) -> None:
    print(f"== {name}: {result['status']} in {result['seconds']:.0f} s {result.get('reason', '')}", flush=True)
    for figure in result.get("figures", ()):
        expected = figure.get("expected")
        low_high = (
            f"  expected {expected['low']:g}-{expected.get('high') or 0:g} ({expected['basis']})" if expected else ""
        )
        size = figure.get("settings", {}).get("bytes")
        of = f" {size} bytes" if size else ""
        verdict = f"  {figure['verdict']}" if figure.get("verdict") else ""
        print(
            f"   {figure['metric']} {figure['subject']}{of}: {figure['value']:.5g} {figure['unit']}{low_high}{verdict}"
        )
    for found in result.get("findings", ()):
        print(f"   {found['rule']} {found['severity']} {found['subject']}: {found['message']}")
    for line in str(result.get("text", "")).splitlines():
        print(f"   {line}")
    sys.stdout.flush()


def write(bench: Bench) -> None:
    """several.json and raw.tar.gz as they are now; a later kill costs only what comes after."""
    known = {
        "gpus": bench.gpus,
        "cpus": os.cpu_count(),
        "limit_s": bench.options.limit_s,
        "python": sys.version.split()[0],
        "environment": {
            name: value for name, value in sorted(boxed.environment().items())
            if name.startswith(("NCCL_", "CUDA_", "TORCH_", "NVSHMEM_"))
        },
        "steps": bench.steps,
    }  # fmt: skip
    for name, save in (("several.json", lambda file: file.write_text(json.dumps(known, indent=1) + "\n")),
                       ("raw.tar.gz", lambda file: pack(bench.raw, file))):  # fmt: skip
        part = bench.options.out / f"{name}.part"
        save(part)
        part.replace(bench.options.out / name)


def pack(folder: Path, file: Path) -> None:
    with tarfile.open(file, "w:gz") as archive:
        archive.add(folder, arcname="raw")


STEPS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "texts": machine_steps.texts,
    "record": machine_steps.record,
    "capture": machine_steps.capture,
    "topo": machine_steps.topo,
    "checkup": machine_steps.checkup,
    "all_reduce": machine_steps.all_reduce,
    "bench_pcie": machine_steps.bench_pcie,
    "nccl_tests": machine_steps.other_tool,
    "nvbandwidth": machine_steps.nvbandwidth,
    "tune": script_steps.tune,
    "race": script_steps.race,
    "profile": script_steps.profile,
    "profile_alone": script_steps.profile_alone,
}
LEAST_S = {
    "all_reduce": 30.0,
    "bench_pcie": 30.0,
    "nccl_tests": 20.0,
    "tune": 100.0,
    "race": 60.0,
    "profile": script_steps.PROFILE_LEAST_S,
    "profile_alone": script_steps.PROFILE_LEAST_S,
}


if __name__ == "__main__":
    main()
