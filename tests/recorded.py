"""Recorded machines of tests/machines: unpacks their /proc and /sys trees and serves their NVML answers."""

from __future__ import annotations

import os
from pathlib import Path

from gpudoctor.collect import collect_case
from gpudoctor.model import Case

HERE = Path(__file__).parent
MACHINES = HERE / "machines"
FAKE_NVML = HERE / "fake_nvml"
NAMES = tuple(sorted(path.parent.name for path in MACHINES.glob("*/nvml.json")))


def unpack(text: str, root: Path) -> Path:
    r"""Make the tree of a tree.txt: ``path = content`` (``\n`` is a line end) or ``path -> target`` a line."""
    root.mkdir(parents=True, exist_ok=True)
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        path, mark, rest = line.partition(" -> ")
        if mark:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(rest)
            continue
        path, _, rest = line.partition(" = ")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(rest.replace("\\n", "\n") + "\n", encoding="utf-8")
    return root


def nvml_environment(nvml: Path) -> dict[str, str]:
    """Variables that put the fake pynvml before the real one in child processes."""
    path = os.pathsep.join(filter(None, (str(FAKE_NVML), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "FAKE_NVML": str(nvml)}


def collect(name: str, work: Path) -> Case:
    """Collect a recorded machine; `work` is an empty directory for its tree. The fake's variables must be set."""
    tree = (MACHINES / name / "tree.txt").read_text(encoding="utf-8")
    return collect_case(root=unpack(tree, work / name), timeout_s=60)
