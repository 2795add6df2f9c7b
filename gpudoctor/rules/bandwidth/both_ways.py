"""Copies in both directions at once slow each other down more than usual.

What it means
    A link carries both directions at once, each at its full rate by the book. Memory, the processor's fabric and flow
    control set lower limits, which differ between platforms.
Why it costs
    Programs that load batches and write results or offload at the same time get the lower rate. Gen5 hosts keep 81 to
    94 % in each direction, some Gen4 hosts 45 % (https://github.com/NVIDIA/nvbandwidth/issues/15).
How we know
    The rate of one direction while the other runs is below 0.8 of its rate alone, and alone it is fine.
Fix
    Nothing on the machine is known to lift it; report both figures. Locked memory clocks are worth a look.
When to ignore
    Jobs that copy one way.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates

RULE = Rule(code="BND007", name="bidirectional-contention", severity="info", needs=("measurements",), since="0.1")

_BOTH = {"h2d_while_d2h": "h2d", "d2h_while_h2d": "d2h"}


def check(case: Case) -> Iterator[Finding | Unchecked]:
    items = rates.of(case, *_BOTH)
    if not items:
        yield Unchecked(reason="copies in both directions at once were not measured")
        return
    subjects: dict[str, list[tuple[Measurement, float]]] = {}
    for item in items:
        alone = [one for one in rates.of(case, _BOTH[item.metric]) if one.subject == item.subject]
        if not alone or any(one.verdict in ("low", "bad") for one in alone):
            continue  # slow alone already: another rule's matter
        rate = max(one.value for one in alone)
        if item.value < case.threshold(RULE.code, "share") * rate:
            subjects.setdefault(item.subject, []).append((item, rate))
    if subjects:
        worst, alone_rate = min(
            (entry for seen in subjects.values() for entry in seen), key=lambda e: e[0].value / e[1]
        )
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=next(iter(subjects)) if len(subjects) == 1 else "host",
            message=f"{_BOTH[worst.metric]} falls from {alone_rate:.1f} to {worst.value:.1f} GB/s while the other "
            "direction runs: the platform's memory or fabric is shared by both",
            evidence=tuple(
                rates.shown(case, item, f"{rate:.4g} GB/s alone") for seen in subjects.values() for item, rate in seen
            )[:8],
            remedies=(Remedy(kind="config", text="report both figures; overlap copies of both directions less"),),
            confidence="possible",
        )


def _case(both: float, alone: float | None = 24.8, verdict: str | None = "ok") -> Case:
    items = [Measurement(metric="h2d_while_d2h", subject="gpu:0", value=both, unit="GB/s")]
    if alone:
        items.append(
            Measurement(metric="h2d", subject="gpu:0", value=alone, unit="GB/s", verdict=verdict)  # type: ignore[arg-type]
        )
    return Case(measurements=tuple(items))


EXAMPLES = (
    Example(name="A100 on a dual-socket host", kind="fires", case=_case(11.0), subjects=("gpu:0",)),
    Example(name="usual on Gen5", kind="quiet", case=_case(50.0, 55.4)),
    Example(name="slow alone too", kind="quiet", case=_case(5.0, 12.0, "bad")),
    Example(
        name="one way only",
        kind="lacks",
        case=Case(measurements=(Measurement(metric="h2d", subject="gpu:0", value=24.8, unit="GB/s"),)),
    ),
)
