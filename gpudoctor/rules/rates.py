"""Measured rates as the rules ask for them: by metric, by pair, by GPU; and how rate and evidence are worded."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from gpudoctor.model import Case, Evidence, Gpu, Measurement, Pair
from gpudoctor.rules.evidence import answering, evidence

PINNED = ("h2d", "d2h")
PEER = ("p2p_write", "p2p_read")


def of(case: Case, *metrics: str) -> tuple[Measurement, ...]:
    """The measurements of these metrics that physics allows, of GPUs that answer."""
    lost = {f"gpu:{gpu.index}" for gpu in case.gpus if gpu.lost}
    return tuple(
        m
        for m in case.measurements
        if m.metric in metrics and m.verdict != "rejected" and not lost.intersection(m.subject.split("-"))
    )


def value(case: Case, metric: str, subject: str) -> float | None:
    """The best figure of a metric for a subject, or None."""
    return max((m.value for m in of(case, metric) if m.subject == subject), default=None)


def fact(item: Measurement) -> str:
    """The path of a measurement in the Case."""
    return f"measurements.{item.metric}[{item.subject}]"


def shown(case: Case, item: Measurement, expected: object = None) -> Evidence:
    return evidence(case, fact(item), f"{item.value:.4g} {item.unit}", expected)


def pair_of(subject: str) -> tuple[str, str] | None:
    """The two GPUs of a subject such as gpu:1-gpu:0, the lower number first."""
    names = re.fullmatch(r"gpu:(\d+)-gpu:(\d+)", subject)
    if names is None:
        return None
    a, b = sorted((int(names[1]), int(names[2])))
    return f"gpu:{a}", f"gpu:{b}"


def by_pair(case: Case, *metrics: str) -> dict[tuple[str, str], float]:
    """The mean over both directions of each pair; one cold cell in a matrix moves it by half only."""
    found: dict[tuple[str, str], list[float]] = {}
    for item in of(case, *metrics):
        pair = pair_of(item.subject)
        if pair is not None:
            found.setdefault(pair, []).append(item.value)
    return {pair: statistics.fmean(values) for pair, values in found.items()}


def name(pair: Sequence[str]) -> str:
    return "-".join(pair)


def gpu_pairs(case: Case) -> list[Pair]:
    """The pairs of two GPUs that answer."""
    alive = {f"gpu:{gpu.index}" for gpu in answering(case)}
    return [pair for pair in case.pairs if pair.a in alive and pair.b in alive]


def pair_between(case: Case, names: tuple[str, str]) -> Pair | None:
    return next((pair for pair in case.pairs if {pair.a, pair.b} == set(names)), None)


def gpu_named(case: Case, subject: str) -> Gpu | None:
    return next((gpu for gpu in case.gpus if subject == f"gpu:{gpu.index}"), None)


def tool_of(item: Measurement) -> str | None:
    """The other tool that printed this figure; None for our own."""
    tool = item.settings.get("tool")
    return tool if isinstance(tool, str) else None


def spread_text(values: Sequence[float]) -> str:
    """The span of several rates in words: 26.1-26.4, or one number."""
    low, high = min(values), max(values)
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g}-{high:.3g}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names with commas, cut after some: gpu:0, gpu:1 and 6 more."""
    shown_names = ", ".join(names[:most])
    return shown_names + (f" and {len(names) - most} more" if len(names) > most else "")
