"""Shares of a step, from the records of a watched command; shared by the loader, sync and copy rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gpudoctor.model import Case, CopySite, Gain, Measurement, Severity, Step, SyncSite, WatchedLoader, WatchRecord


class _AtSite(Protocol):
    @property
    def site(self) -> str: ...


Site = TypeVar("Site", bound=_AtSite)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one site cost: milliseconds a step, its share of the step (0 to 1), and the record it was seen in."""

    step_ms: float
    waited_ms: float
    share: float
    record: WatchRecord


def records(case: Case) -> tuple[WatchRecord, ...]:
    """The records in which steps were seen."""
    return tuple(record for record in case.watched.records if record.steps) if case.watched else ()


def cost(record: WatchRecord, waited_ms: float) -> Cost:
    """The cost of a wait that sums to `waited_ms` over all steps of the record, which must hold steps."""
    return _among(record, record.steps, waited_ms)


def spent(record: WatchRecord, site: SyncSite | CopySite) -> Cost:
    """The cost of the waiting at one line in the steady steps; in all steps where they were not told apart."""
    steps = record.steady
    if isinstance(site, SyncSite) and site.detected_by == "sync-debug-mode" and site.window_waited_ms is not None:
        return _among(record, steps, site.window_waited_ms * len(steps))
    if site.steady_waited_ms is None:
        return cost(record, site.waited_ms)
    return _among(record, steps, site.steady_waited_ms)


def fed(record: WatchRecord, loader: WatchedLoader, otherwise_ms: float) -> Cost:
    """The cost of waiting for a loader in the steady steps; `otherwise_ms` where they were not told apart."""
    if loader.steady_wait_ms is None:
        return cost(record, otherwise_ms)
    return _among(record, record.steady, loader.steady_wait_ms)


def _among(record: WatchRecord, steps: Sequence[Step], waited_ms: float) -> Cost:
    total = sum(step.wall_ms for step in steps)
    share = min(1.0, max(0.0, waited_ms / total)) if total > 0 else 0.0
    return Cost(step_ms=total / len(steps), waited_ms=waited_ms / len(steps), share=share, record=record)


def per_step(record: WatchRecord, calls: int) -> float:
    """Calls a step; a watched window of N steps holds N-1 whole intervals, so one step counts as one."""
    return calls / max(1, len(record.steps) - 1)


def worst(found: Sequence[tuple[Site, Cost]]) -> Iterator[tuple[Site, Cost]]:
    """Ranks run the same lines: of each site only the rank where it costs the largest share, in order of sites."""
    best: dict[str, tuple[Site, Cost]] = {}
    for item, price in found:
        if item.site not in best or price.share > best[item.site][1].share:
            best[item.site] = (item, price)
    yield from (best[site] for site in sorted(best))


def bound(share: float, what: str, *, most: float | None = None) -> Gain:
    """The rate can rise at most by the waiting share: 1 / (1 - share), or by the factor `most` when that is less.

    The low end is 1: that hiding the wait gains anything is not known before it is tried.
    """
    high = 1.0 / max(0.01, 1.0 - share)
    return Gain(
        low=1.0,
        high=round(high if most is None else min(high, most), 3),
        unit="x",
        basis="measured",
        source=f"upper bound: {what} takes {share:.0%} of the watched step",
    )


def bound_of_waits(case: Case, price: Cost) -> Gain:
    """What removing all waits for the device can win: stated for all lines together, because the first wait of a step
    covers for the later ones. Bounded by the device's idle time where the profiler measured it, else by the waits."""
    record = price.record
    steps = record.steady
    total = sum(step.wall_ms for step in steps)
    share = sum(step.copy_wait_ms + step.sync_wait_ms for step in steps) / total if total > 0 else 0.0
    share = min(1.0, max(share, price.share))
    known = _measured(case, record, "step.gain_bound", "waits") if busy(case, record) is not None else None
    if known is None:
        return bound(share, "all waits for the GPU together", most=2.0)
    return Gain(
        low=1.0,
        high=round(known.value, 3),
        unit="x",
        basis="measured",
        source=f"upper bound for all waits together: {share:.0%} of the step, and what the GPU idles meanwhile",
    )


def busy(case: Case, record: WatchRecord) -> float | None:
    """The share of the watched step in which the device works; None where no profiler window tells."""
    known = _measured(case, record, "step.device_busy")
    return known.value if known is not None else None


def worth(case: Case, price: Cost, severity: Severity, least: float) -> tuple[Severity, str]:
    """The severity of a wait, lowered to info with the reason in words where the device works meanwhile, so that less
    than the share `least` of the step can be won."""
    if busy(case, price.record) is None or bound_of_waits(case, price).high >= 1 / (1 - least):
        return severity, ""
    return "info", "; the GPU works through nearly all that is waited, so that next to nothing can be won"


def _measured(case: Case, record: WatchRecord, metric: str, cause: str | None = None) -> Measurement | None:
    place = record.rank if record.rank is not None else records(case).index(record)
    for item in case.measurements:
        if (item.metric, item.subject) == (metric, f"rank:{place}") and item.settings.get("cause") == cause:
            return item
    return None


def a_step(price: Cost) -> str:
    """Such as "12.1 of 30.4 ms a step (40 %)"."""
    return f"{price.waited_ms:.1f} of {price.step_ms:.1f} ms a step ({price.share * 100:.0f} %)"


def copy_symptom(record: WatchRecord, copy: CopySite) -> str:
    """The wait for one copy, in the same words in each rule that it explains, so that it is counted once."""
    return f"{copy.site}: copying waits {a_step(spent(record, copy))}"


def function_of(sync: SyncSite) -> str:
    """The bare name of a synchronising call: item for Tensor.item, float for __float__."""
    return sync.function.rsplit(".", 1)[-1].strip("_")


def synced(case: Case, functions: Sequence[str], often: float) -> list[tuple[SyncSite, Cost]]:
    """The sites of these calls that touch a GPU at least `often` times a step, with what they cost."""
    return [
        (sync, spent(record, sync))
        for record in records(case)
        for sync in record.syncs
        if function_of(sync) in functions and per_step(record, min(sync.calls_in_steps, sync.on_device)) >= often
    ]
