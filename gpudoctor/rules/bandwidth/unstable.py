"""Repeated copies differ so much that they decide nothing.

What it means
    Samples of one copy lie more than 5 % apart where healthy ones repeat within 1 %. Something else used the link, the
    memory or the processor while they were taken.
Why it costs
    A verdict on such a figure is a guess, and so is a comparison of two settings.
How we know
    The span between the 10th and the 90th percentile of the samples, or a host that was busy or swapped meanwhile.
Fix
    Stop other load and measure again, with more samples.
When to ignore
    Pageable copies, which scatter by nature.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates

RULE = Rule(code="BND011", name="unstable-measurement", severity="unknown", needs=("measurements",), since="0.1")

_METRICS = (*rates.PINNED, "h2d_while_d2h", "d2h_while_h2d", "d2d", *rates.PEER)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    items = [item for item in rates.of(case, *_METRICS) if item.spread is not None and item.samples > 2]
    if not items:
        yield Unchecked(reason="no repeated samples of copies")
        return
    share = case.threshold(RULE.code, "share")
    shaky = [item for item in items if item.verdict == "no verdict" or _width(item) > share * item.value]
    if shaky:
        worst = max(shaky, key=lambda item: _width(item) / item.value)
        names = [f"{item.metric} of {item.subject}" for item in shaky]
        width = _width(worst) / worst.value
        why = f"repeated copies differ by up to {width:.0%}" if width > share else "the host was busy meanwhile"
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=worst.subject if len({item.subject for item in shaky}) == 1 else "host",
            message=f"no verdict on {rates.listed(names, 4)}: {why}",
            evidence=tuple(rates.shown(case, item, "repeats within 5 %") for item in shaky[:6]),
            remedies=(Remedy(kind="measure", text="stop other load, then gpudoctor bench-pcie --seconds 20"),),
            confidence="certain",
        )


def _width(item: Measurement) -> float:
    return item.spread[1] - item.spread[0] if item.spread else 0.0


def _case(low: float, high: float, verdict: str | None = None, metric: str = "h2d") -> Case:
    item = Measurement(
        metric=metric,
        subject="gpu:0",
        value=(low + high) / 2,
        unit="GB/s",
        spread=(low, high),
        samples=8,
        verdict=verdict,  # type: ignore[arg-type]
    )
    return Case(measurements=(item,))


EXAMPLES = (
    Example(name="10 % apart", kind="fires", case=_case(50.0, 55.4), subjects=("gpu:0",)),
    Example(name="busy host", kind="fires", case=_case(40.0, 40.1, "no verdict"), subjects=("gpu:0",)),
    Example(name="steady", kind="quiet", case=_case(55.3, 55.5, "ok")),
    Example(name="pageable", kind="lacks", case=_case(10.0, 15.0, metric="h2d_pageable")),
)
