"""Probes that load the machine. Every one runs in a child process; they run only our own code.

Importing this package costs nothing: a measuring child loads it on its way, and starts CUDA all the sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpudoctor.measure.bench import METRICS, BenchResult, Level, bench_copies

__all__ = ["METRICS", "BenchResult", "Level", "bench_copies"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpudoctor.measure import bench

    return getattr(bench, name)
