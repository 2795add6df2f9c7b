"""A rate that another tool printed is what this kind of link gives.

What it means
    The figure looks low beside a datasheet, and is not: packet headers, flow control and the accounting of the tool
    explain the difference. A link gives 78-91 % of its theory, NVLink by the copy engine 82-94 %.
Why it costs
    Nothing. Time spent looking for a fault that is not there.
How we know
    The rate is at least 95 % of the usual figure for this GPU, or for the slowest hop of its link class, which has a
    source.
Fix
    Nothing is to be done.
When to ignore
    Always. Averages over a sweep of sizes are not results; a two-way rate below twice the one-way rate is normal.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Expected, Finding, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates

RULE = Rule(code="BND001", name="bandwidth-as-expected", severity="info", needs=("measurements",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    """One finding for each metric; our own figures carry their verdict in the table and need no finding."""
    foreign = [item for item in case.measurements if rates.tool_of(item) is not None]
    judged = [item for item in foreign if item.expected is not None and item.verdict is not None]
    if foreign and not judged:
        yield Unchecked(reason="no usual figure is known for what was measured")
        return
    metrics = dict.fromkeys(item.metric for item in judged)
    for metric in metrics:
        items = [item for item in judged if item.metric == metric]
        if any(item.verdict != "ok" for item in items):
            continue
        span = rates.spread_text([item.value for item in items])
        expected = items[0].expected
        assert expected is not None
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=items[0].subject if len(items) == 1 else "host",
            message=f"{metric} {span} GB/s is what this link gives: {expected.low:.4g} GB/s is usual",
            evidence=tuple(
                rates.shown(case, item, f"{expected.low:.4g} GB/s: {expected.source}") for item in items[:8]
            ),
            remedies=(Remedy(kind="config", text="nothing is to be done"),),
            confidence="likely",
        )


def _case(verdict: str | None, *, tool: str | None = "nvbandwidth", expected: bool = True) -> Case:
    figure = Expected(low=55.4, basis="measured", source="example") if expected else None
    item = Measurement(
        metric="h2d",
        subject="gpu:0",
        value=55.5,
        unit="GB/s",
        settings={"tool": tool},
        expected=figure,
        verdict=verdict,  # type: ignore[arg-type]
    )
    return Case(measurements=(item,))


EXAMPLES = (
    Example(name="nvbandwidth on a healthy link", kind="fires", case=_case("ok"), subjects=("gpu:0",)),
    Example(name="low", kind="quiet", case=_case("low")),
    Example(name="our own figure", kind="quiet", case=_case("ok", tool=None)),
    Example(name="no figure to judge by", kind="lacks", case=_case(None, expected=False)),
    Example(name="nothing measured", kind="lacks", case=Case()),
)
