"""How a command scales with the number of ranks: one row a count, and what grows with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScalingUnit = Literal["samples/s", "steps/s x ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRank:
    """Means over the steady steps of one rank. `own_ms` is the step without the exposed communication: loader wait
    included, it is what this rank needs before the others need not wait for it. None: unknown."""

    rank: int
    rate: float | None  # of this rank alone, in the table's unit without "x ranks"
    step_ms: float
    loader_wait_ms: float
    communication_ms: float | None = None
    own_ms: float | None = None
    h2d_gb_s: float | None = None  # copies to the GPU that the step waited for, as they went beside the other ranks'


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One count of ranks on this machine. `rate` is the slowest rank's rate times the ranks; `efficiency` compares it
    with the smallest count that worked. `exposed_ms` is what even the last rank to arrive waits: data on their way."""

    ranks: int
    rate: float | None = None
    efficiency: float | None = None
    steps: int = 0
    exposed_ms: float | None = None
    slowest_rank: int | None = None  # named only where one rank needs clearly more time than the others
    slowest_because: str | None = None
    per_rank: tuple[ScalingRank, ...] = ()
    samples_per_step: float | None = None  # of one rank
    error: str | None = None  # why this count gave no rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    unit: ScalingUnit
    rows: tuple[ScalingRow, ...]
    cause: str | None = None  # one sentence: what grows with the count, or that nothing does
    notes: tuple[str, ...] = ()
