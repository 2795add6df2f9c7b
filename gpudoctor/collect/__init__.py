"""Live facts of this machine (or of a recorded tree), each with its source; what cannot be had is a Gap.

Importing this package costs nothing: the child that asks NVML loads it on its way, and starts all the sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from gpudoctor.model import Case

__all__ = ["collect_case"]


def collect_case(*, root: Path | None = None, nvml: bool = True, timeout_s: float = 10.0) -> Case:
    """Everything that can be had without loading the machine.

    `root` is where /proc and /sys are found; by default the directory in GPUDOCTOR_SYSROOT, else "/". With `nvml`
    False NVML is not asked. `timeout_s` bounds each NVML attempt (three at most, the second one per silent GPU).
    Nothing is raised for a fact that cannot be had.
    """
    from gpudoctor.collect.machine import collect

    return collect(root=root, nvml=nvml, timeout_s=timeout_s)
