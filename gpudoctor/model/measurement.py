"""A number with its conditions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Setting = str | int | float | bool | None
Verdict = Literal["ok", "low", "bad", "rejected", "no verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a healthy machine gives, and where that figure comes from."""

    low: float
    high: float | None = None
    basis: Literal["measured", "published", "theory"]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """`value` is the median of `samples` repeats in `unit`; `spread` is (low, high): 10th and 90th percentile,
    or the confidence interval for tune.speedup. Metric names are stable, see docs/design.md section 7."""

    metric: str
    subject: str
    value: float
    unit: str
    spread: tuple[float, float] | None = None
    samples: int = 1
    settings: dict[str, Setting] = field(default_factory=dict)
    expected: Expected | None = None
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()
