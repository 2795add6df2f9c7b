"""The error counters of a PCIe link grew while copies ran.

What it means
    A packet arrived damaged and was sent again. The link corrects it by itself, but each retry costs time, and many of
    them are the first sign of a link that will drop to a lower speed or lose the GPU.
Why it costs
    A few retries cost nothing that can be measured. A steady rate of them points at a riser, a cable or a contact that
    gets worse (https://github.com/geerlingguy/raspberry-pi-pcie-devices/issues/4).
How we know
    The replay counter of the GPU, or the kernel's count of corrected errors of its link or of a port above it, was read
    before and after the copies of `gpudoctor bench-pcie`, and differs. Old absolute counts do not matter.
Fix
    Seat the card again, replace riser or cable, or cap the generation of the slot: signal quality is the first suspect.
When to ignore
    A single count in hours.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import answering, subject

RULE = Rule(code="PCI005", name="link-errors-rising", severity="warning", needs=("gpus",), since="0.1")

_COUNTERS = ("pcie_replays", "aer_correctable")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for gpu in answering(case):
        counted = [item for item in rates.of(case, *_COUNTERS) if item.subject == subject(gpu)]
        if not counted:
            yield Unchecked(reason="no error counter was read before and after a copy", subject=subject(gpu))
            continue
        grown = [item for item in counted if item.value > case.threshold(RULE.code, "growth")]
        if grown:
            yield _finding(case, gpu, grown)


def _finding(case: Case, gpu: Gpu, grown: list[Measurement]) -> Finding:
    words = "; ".join(
        f"{item.value:.0f} {'replays' if item.metric == 'pcie_replays' else 'corrected errors'}"
        + (f" at {item.settings['device']}" if item.settings.get("device") else "")
        for item in grown
    )
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject(gpu),
        message=f"the link of this GPU made errors while copies ran: {words}",
        evidence=tuple(rates.shown(case, item, "0") for item in grown),
        remedies=(
            Remedy(kind="hardware", text="seat the card again; replace riser or cable"),
            Remedy(kind="bios", text="cap the generation of the slot", undo="set the slot to Auto"),
            Remedy(kind="measure", text="gpudoctor bench-pcie --seconds 60 shows how fast the counters grow"),
        ),
        confidence="certain",
    )


def _case(*counts: tuple[str, float]) -> Case:
    items = tuple(
        Measurement(metric=metric, subject="gpu:0", value=value, unit="count", settings={"device": "0000:01:00.0"})
        for metric, value in counts
    )
    return Case(gpus=(Gpu(index=0),), measurements=items)


EXAMPLES = (
    Example(
        name="12 replays during the copies",
        kind="fires",
        case=_case(("pcie_replays", 12), ("aer_correctable", 0)),
        subjects=("gpu:0",),
    ),
    Example(name="corrected errors of a port", kind="fires", case=_case(("aer_correctable", 3)), subjects=("gpu:0",)),
    Example(name="counters that stand still", kind="quiet", case=_case(("pcie_replays", 0), ("aer_correctable", 0))),
    Example(name="not read", kind="lacks", case=Case(gpus=(Gpu(index=0),))),
)
