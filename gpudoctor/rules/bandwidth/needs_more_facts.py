"""A figure cannot be judged, or a sweep has a jump that its sizes do not explain.

What it means
    Without the model of the GPU and its link there is no figure to compare with. And a bus bandwidth that stays flat
    over many sizes and then jumps by 5x or more between two neighbours shows a change of protocol or path, not of size.
Why it costs
    A wrong verdict sends people looking in the wrong place.
How we know
    The tool's output names neither model nor link; or the table over sizes has such a jump where at most a doubling is
    usual (https://github.com/NVIDIA/nccl-tests/issues/293).
Fix
    Get model, link and clocks (`gpudoctor capture` on that machine), larger buffers, and NCCL's protocol and algorithm
    (NCCL_DEBUG=INFO).
When to ignore
    Rates that rise with the size by a factor of two at most, as latency makes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates

RULE = Rule(code="BND010", name="figure-needs-more-facts", severity="unknown", needs=("measurements",), since="0.1")

_SMALLEST_BYTES = 64 << 10
_JUDGED = (*rates.PINNED, *rates.PEER)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    foreign = [item for item in case.measurements if rates.tool_of(item) is not None]
    if not foreign:
        yield Unchecked(reason="no figures of other tools to judge")
        return
    open_items = [item for item in rates.of(case, *_JUDGED) if item in foreign and item.expected is None]
    if open_items:
        yield _no_figure(case, open_items)
    for metric, jump in _jumps(case):
        yield _jump(case, metric, *jump)


def _no_figure(case: Case, items: list[Measurement]) -> Finding:
    metrics = ", ".join(dict.fromkeys(item.metric for item in items))
    unnamed = not any(gpu.name for gpu in case.gpus)
    why = (
        "neither the model of the GPUs nor their link is known"
        if unnamed
        else "no figure for this GPU and link is known"
    )
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=items[0].subject if len(items) == 1 else "host",
        message=f"{metrics} of {rates.spread_text([item.value for item in items])} GB/s cannot be judged: {why}",
        evidence=tuple(rates.shown(case, item) for item in items[:6]),
        remedies=(
            Remedy(kind="measure", text="give model and link as well: nvidia-smi -q, or gpudoctor capture there"),
        ),
        confidence="certain",
    )


def _jumps(case: Case) -> Iterator[tuple[str, tuple[Measurement, Measurement]]]:
    tables: dict[str, list[Measurement]] = {}
    for item in case.measurements:
        if item.metric.endswith(".busbw_curve") and isinstance(item.settings.get("bytes"), int):
            tables.setdefault(item.metric, []).append(item)
    for metric, items in tables.items():
        items.sort(key=_size)
        for low, high in itertools.pairwise(items):
            near = _size(low) >= _SMALLEST_BYTES and _size(high) <= 4 * _size(low)
            if near and low.value > 0 and high.value >= case.threshold(RULE.code, "jump") * low.value:
                yield metric, (low, high)
                break


def _jump(case: Case, metric: str, low: Measurement, high: Measurement) -> Finding:
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"{metric.removesuffix('_curve')} jumps from {low.value:.3g} to {high.value:.3g} GB/s between "
        f"{_size(low) >> 10} and {_size(high) >> 10} KiB: a change of protocol or path, not of size",
        evidence=(rates.shown(case, low), rates.shown(case, high)),
        remedies=(
            Remedy(
                kind="measure", text="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING,GRAPH tells protocol and path by size"
            ),
            Remedy(kind="measure", text="run once with NCCL_PROTO=Simple: does the flat part vanish?"),
        ),
        confidence="likely",
    )


def _size(item: Measurement) -> int:
    size = item.settings.get("bytes")
    return size if isinstance(size, int) else 0


def _curve(*values: float) -> Case:
    return Case(
        measurements=tuple(
            Measurement(
                metric="all_reduce.busbw_curve",
                subject="host",
                value=value,
                unit="GB/s",
                settings={"tool": "nccl-tests", "bytes": (256 << 10) * 2**place},
            )
            for place, value in enumerate(values)
        )
    )


EXAMPLES = (
    Example(name="flat, then 18x", kind="fires", case=_curve(0.3, 0.3, 0.31, 5.6, 6.2), subjects=("host",)),
    Example(
        name="no model named",
        kind="fires",
        case=Case(
            gpus=(Gpu(index=0),),
            measurements=(
                Measurement(metric="h2d", subject="gpu:0", value=12.4, unit="GB/s", settings={"tool": "nvbandwidth"}),
            ),
        ),
        subjects=("gpu:0",),
    ),
    Example(name="usual ramp", kind="quiet", case=_curve(5.0, 8.6, 11.2, 16.8, 20.6)),
    Example(
        name="our own figures",
        kind="lacks",
        case=Case(measurements=(Measurement(metric="h2d", subject="gpu:0", value=1.0, unit="GB/s"),)),
    ),
)
