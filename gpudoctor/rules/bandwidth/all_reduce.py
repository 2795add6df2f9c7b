"""The bus bandwidth of a collective is below what this machine should give.

What it means
    With large messages and all GPUs of a machine, the bus bandwidth depends on the fabric alone. Below nine tenths of
    what others measured on the same machine, some link, bridge or setting holds it up.
Why it costs
    Gradient exchange takes that much longer. Usual for eight GPUs: 230 GB/s on NVLink 3, 370 as a ring and 480 with
    NVLS on NVLink 4 (https://github.com/Azure/azurehpc-health-checks).
How we know
    The figure at 256 MiB or more, the same number of GPUs of the same model, and a published figure at that size or a
    smaller one. The average over a sweep does not count.
Fix
    Follow the findings about links, peer access and transports; compare NCCL's own log.
When to ignore
    Small messages; jobs over several hosts, where the network is the limit.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Expected, Finding, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates

RULE = Rule(code="BND012", name="all-reduce-below-expected", severity="warning", needs=("measurements",), since="0.1")

_LEAST_BYTES = 256 << 20


def check(case: Case) -> Iterator[Finding | Unchecked]:
    items = [item for item in case.measurements if item.metric.endswith(".busbw")]
    if not items:
        return
    large = [item for item in items if isinstance(size := item.settings.get("bytes"), int) and size >= _LEAST_BYTES]
    known = [item for item in large if item.expected is not None and item.settings.get("nodes") in (None, 1)]
    if not known:
        yield Unchecked(reason="no figure of this fabric is known, or the messages are smaller than 256 MiB")
        return
    for item in known:
        usual = item.expected.low if item.expected else 0.0
        if item.value < case.threshold(RULE.code, "share") * usual:
            yield Finding(
                rule=RULE.code,
                name=RULE.name,
                severity=RULE.severity,
                subject=item.subject,
                message=f"{item.metric} reaches {item.value:.0f} GB/s where {usual:.0f} is usual on this machine",
                evidence=(
                    rates.shown(case, item, f"{usual:.4g} GB/s: {item.expected.source if item.expected else ''}"),
                ),
                remedies=(
                    Remedy(kind="measure", text="nvidia-smi nvlink -s, gpudoctor topo: are all links up?"),
                    Remedy(kind="measure", text="NCCL_DEBUG=INFO: which transports and how many channels are used?"),
                ),
                confidence="likely",
            )


def _case(value: float, size: int = 1 << 30, *, low: float | None = 463.6) -> Case:
    item = Measurement(
        metric="all_reduce.busbw",
        subject="host",
        value=value,
        unit="GB/s",
        settings={"bytes": size, "ranks": 8, "nodes": 1},
        expected=Expected(low=low, basis="measured", source="example") if low else None,
    )
    return Case(measurements=(item,))


EXAMPLES = (
    Example(name="a tenth missing", kind="fires", case=_case(400.0), subjects=("host",)),
    Example(name="usual", kind="quiet", case=_case(470.0)),
    Example(
        name="no collectives",
        kind="quiet",
        case=Case(measurements=(Measurement(metric="h2d", subject="gpu:0", value=55.0, unit="GB/s"),)),
    ),
    Example(name="small messages", kind="lacks", case=_case(40.0, 1 << 20)),
    Example(name="no figure", kind="lacks", case=_case(400.0, low=None)),
)
