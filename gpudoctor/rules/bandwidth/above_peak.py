"""A rate exceeds what link or memory can carry: a measurement error, not a result.

What it means
    Something else than the copy was timed: a cache that held the buffer, a copy that was not waited for, an interface
    that skips work, or a unit that was read wrongly.
Why it costs
    Decisions made on such a figure are wrong.
How we know
    The rate is above the theory of the link as it was read under load, or a copy inside the GPU above half of what its
    memory gives for reads and writes together.
Fix
    Buffers of several times the L2 cache, wait for the end, and measure again.
When to ignore
    GPUs on NVLink-C2C copy faster than any PCIe link; they are judged by that link.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Measurement, Remedy, Rule, Severity, Unchecked
from gpudoctor.rules import rates

RULE = Rule(code="BND005", name="measurement-above-peak", severity="warning", needs=("measurements",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if not any(item.unit == "GB/s" for item in case.measurements):
        yield Unchecked(reason="no rates were measured")
        return
    lost = {f"gpu:{gpu.index}" for gpu in case.gpus if gpu.lost}
    for item in case.measurements:
        if item.verdict != "rejected" or item.subject in lost:
            continue
        why = next((note for note in item.notes if note.startswith("more than")), "more than physics allows")
        severity: Severity = RULE.severity
        size = item.settings.get("bytes")
        message = f"{item.metric} {item.value:.4g} GB/s is {why}"
        if item.metric == "d2d" and isinstance(size, int) and size <= case.threshold(RULE.code, "cache_bytes"):
            severity = "info"
            message = (
                f"{item.metric} {item.value:.4g} GB/s is the rate of the cache, not of the memory; the buffer of "
                f"{size / 1e6:.0f} MB fits it"
            )
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=severity,
            subject=item.subject,
            message=message,
            evidence=(rates.shown(case, item, why),),
            remedies=(Remedy(kind="measure", text="measure again with buffers of 512 MiB: gpudoctor bench-pcie"),),
            confidence="certain",
        )


def _case(metric: str, value: float, verdict: str, size: int = 1 << 29) -> Case:
    item = Measurement(
        metric=metric,
        subject="gpu:0",
        value=value,
        unit="GB/s",
        settings={"bytes": size},
        verdict=verdict,  # type: ignore[arg-type]
        notes=("more than the link can carry (63.0 GB/s): a measurement error, not a result",),
    )
    return Case(measurements=(item,))


EXAMPLES = (
    Example(name="faster than the link", kind="fires", case=_case("h2d", 90.0, "rejected"), subjects=("gpu:0",)),
    Example(
        name="a buffer in the cache",
        kind="fires",
        case=_case("d2d", 2187.0, "rejected", 32_000_000),
        subjects=("gpu:0",),
        severity="info",
    ),
    Example(name="possible", kind="quiet", case=_case("h2d", 55.0, "ok")),
    Example(name="nothing measured", kind="lacks", case=Case()),
)
