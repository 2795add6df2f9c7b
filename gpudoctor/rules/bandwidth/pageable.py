"""A copy rate falls as the size grows: the mark of memory that is not pinned.

What it means
    A copy from ordinary memory goes through a small pinned buffer of the driver, and the processor's caches carry it
    while it is small. Above their size the rate falls to that of a second copy in main memory.
Why it costs
    Typically 9.8 instead of 25 GB/s on Gen4, and the copy does not overlap with work on the GPU
    (https://github.com/openucx/ucx/issues/6327).
How we know
    The rate at the largest size is below 0.6 of the best rate at a smaller one, in a tool's table over sizes that does
    not say that its memory is pinned.
Fix
    Pin the buffer: pin_memory=True, cudaHostAlloc or cudaHostRegister.
When to ignore
    Pinned memory in both runs: then look for another reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates

RULE = Rule(code="BND008", name="pageable-copy-signature", severity="warning", needs=("measurements",), since="0.1")

_LARGE_BYTES = 1 << 20
_FEWEST = 5


def check(case: Case) -> Iterator[Finding | Unchecked]:
    tables: dict[tuple[str, str], list[Measurement]] = {}
    for item in case.measurements:
        host_copy = item.metric.startswith(("h2d_", "d2h_")) and item.metric.endswith("_curve")
        if host_copy and item.settings.get("pinned") is not True and isinstance(item.settings.get("bytes"), int):
            tables.setdefault((item.metric, item.subject), []).append(item)
    if not tables:
        yield Unchecked(reason="no copy rates by size of memory that may be pageable")
        return
    for (metric, subject), items in tables.items():
        items.sort(key=_size)
        if len(items) < _FEWEST or _size(items[-1]) < _LARGE_BYTES:
            continue
        best, last = max(items, key=lambda item: item.value), items[-1]
        if last.value < case.threshold(RULE.code, "share") * best.value:
            yield Finding(
                rule=RULE.code,
                name=RULE.name,
                severity=RULE.severity,
                subject=subject,
                message=f"{metric.split('_')[0]} falls from {best.value:.1f} GB/s at {_size(best) / 1024:.0f} KiB to "
                f"{last.value:.1f} at {_size(last) / 1024:.0f} KiB: memory that is not pinned copies so",
                evidence=(rates.shown(case, best), rates.shown(case, last, f"{best.value:.3g} GB/s or more")),
                remedies=(
                    Remedy(kind="code", text="pin the buffer (pin_memory=True, cudaHostAlloc, cudaHostRegister)"),
                    Remedy(kind="measure", text="gpudoctor bench-pcie compares pinned with pageable copies"),
                ),
                gain=Gain(
                    low=1.0,
                    high=best.value / last.value,
                    unit="x",
                    basis="measured",
                    source="best against largest size",
                ),
                confidence="likely",
            )


def _size(item: Measurement) -> int:
    size = item.settings.get("bytes")
    return size if isinstance(size, int) else 0


def _case(*rates_of: float, pinned: bool | None = None) -> Case:
    return Case(
        measurements=tuple(
            Measurement(
                metric="h2d_mpi_curve",
                subject="host",
                value=value,
                unit="GB/s",
                settings={"bytes": 65536 * 4**place, "pinned": pinned},
            )
            for place, value in enumerate(rates_of)
        )
    )


EXAMPLES = (
    Example(name="collapse", kind="fires", case=_case(7.4, 9.5, 5.2, 4.0, 4.0), subjects=("host",)),
    Example(name="growing", kind="quiet", case=_case(7.4, 9.5, 11.2, 12.0, 12.3)),
    Example(name="pinned", kind="lacks", case=_case(7.4, 9.5, 5.2, 4.0, 4.0, pinned=True)),
    Example(name="nothing", kind="lacks", case=Case()),
)
