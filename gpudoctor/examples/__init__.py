"""The bundled slow script that `gpudoctor tune` without a command works on."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def copy_example(out: Path) -> tuple[Path, list[str]]:
    """Copy the example below `out`/example; returns that directory and the command that starts it there."""
    target = out / "example"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "slow_images" / "train.py", target / "train.py")
    return target, [sys.executable, "train.py"]
