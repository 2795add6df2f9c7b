"""A pinned copy is slow, and its rate is that of a link with fewer lanes or of an older generation.

What it means
    The rate is far below what the link should give and close to what the next lower classes give. Somewhere on the way
    a link runs narrower or slower than it is thought to be: the slot, a riser, an uplink above the card.
Why it costs
    Gen4 gives 6.6 GB/s at x4, 13 at x8 and 26 at x16; every copy runs at that rate
    (https://github.com/tinygrad/open-gpu-kernel-modules/issues/44).
How we know
    The rate is below 0.8 of the usual figure and lies where lower link classes do. Pageable and kernel copies, copies
    from far memory and both directions at once do not count.
Fix
    Read LnkSta of the GPU and of every bridge above it during a copy (`gpudoctor bench-pcie` does).
When to ignore
    The slot has fewer lanes by design.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.judge import like_link, like_lower_link
from gpudoctor.model import Case, Example, Expected, Finding, Gain, Gpu, Measurement, PcieLink, Remedy, Rule, Unchecked
from gpudoctor.profiles import card_link
from gpudoctor.rules import rates
from gpudoctor.rules.p2p.slower_than_staged import slower_pairs

RULE = Rule(
    code="BND002", name="bandwidth-fits-narrower-link", severity="warning", needs=("measurements",), since="0.1"
)

_METRICS = (*rates.PINNED, *rates.PEER)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    items = [item for item in rates.of(case, *_METRICS) if item.verdict != "no verdict"]
    known = [item for item in items if item.expected is not None]
    if items and not known:
        yield Unchecked(reason="no usual figure is known for what was measured")
        return
    if not items:
        yield Unchecked(reason="no pinned copies were measured")
        return
    detours = slower_pairs(case)[0]  # there something else is the matter
    found: dict[str, list[tuple[Measurement, str]]] = {}
    for item in known:
        pair = rates.pair_of(item.subject)
        if pair in detours or item.value >= case.threshold(RULE.code, "share") * _usual(item):
            continue
        like = _like(case, item)
        if like is not None:
            found.setdefault(rates.name(pair) if pair else item.subject, []).append((item, like))
    for subject, seen in found.items():
        if not _explained(case, subject):
            yield _finding(case, subject, seen)


def _usual(item: Measurement) -> float:
    return item.expected.low if item.expected else 0.0


def _like(case: Case, item: Measurement) -> str | None:
    pair = rates.pair_of(item.subject)
    gpus = [gpu for name in (pair or (item.subject,)) if (gpu := rates.gpu_named(case, name)) is not None]
    for gpu in gpus:
        like = like_link(gpu, item.value)
        if like is None and gpu.pcie is None and (link := card_link(gpu)) is not None:
            like = like_lower_link(link, item.value)
        if like is not None:
            return like
    return None


def _explained(case: Case, subject: str) -> bool:
    """Whether a reading under load says already which link is narrow: PCI001, PCI002 or PCI004 then name it."""
    for name in rates.pair_of(subject) or (subject,):
        gpu = rates.gpu_named(case, name)
        link = gpu.pcie if gpu else None
        if link is None or link.state != "load":
            continue
        lanes = min((w for w in (link.max_width, link.port_max_width) if w), default=0)
        speed = min((g for g in (link.max_generation, link.port_max_generation) if g), default=0)
        if (link.width or 0) < lanes or (link.generation or 0) < speed:
            return True
    return False


def _finding(case: Case, subject: str, seen: list[tuple[Measurement, str]]) -> Finding:
    worst, like = min(seen, key=lambda entry: entry[0].value / _usual(entry[0]))
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject,
        message=f"{worst.metric} reaches {worst.value:.1f} GB/s where {_usual(worst):.1f} is usual: about what {like} "
        "gives",
        evidence=tuple(rates.shown(case, item, f"{_usual(item):.4g} GB/s") for item, _ in seen),
        remedies=(
            Remedy(kind="measure", text="gpudoctor bench-pcie reads the link of the GPU and of every port above it"),
            Remedy(kind="hardware", text="a slot of the processor with all lanes; another riser"),
        ),
        gain=Gain(
            low=1.0, high=_usual(worst) / worst.value, unit="x", basis="profile", source="usual against measured rate"
        ),
        confidence="likely" if len(seen) > 1 else "possible",
    )


def _case(value: float, *, metric: str = "h2d", low: float | None = 24.8, link: PcieLink | None = None) -> Case:
    link = link or PcieLink(generation=4, width=16, max_generation=4, max_width=16, state="load")
    expected = Expected(low=low, basis="theory", source="example") if low else None
    item = Measurement(metric=metric, subject="gpu:0", value=value, unit="GB/s", expected=expected)
    return Case(gpus=(Gpu(index=0, pcie=link),), measurements=(item,))


EXAMPLES = (
    Example(name="x4 in a x16 slot", kind="fires", case=_case(6.6), subjects=("gpu:0",)),
    Example(name="x8", kind="fires", case=_case(13.1), subjects=("gpu:0",)),
    Example(name="usual", kind="quiet", case=_case(25.0)),
    Example(name="slow like no link", kind="quiet", case=_case(17.5)),
    Example(
        name="the link itself says x8: PCI001",
        kind="quiet",
        case=_case(13.1, link=PcieLink(generation=4, width=8, max_generation=4, max_width=16, state="load")),
    ),
    Example(name="pageable", kind="lacks", case=_case(6.6, metric="h2d_pageable")),
    Example(name="no figure", kind="lacks", case=_case(6.6, low=None)),
)
