"""The PCIe link of a GPU runs at a lower generation than card and slot can do, while a copy keeps it busy.

What it means
    GPUs lower the link speed when idle, which is healthy. This reading was taken during a copy, in a working
    P-state, and is still below what card and slot can do: the link failed to train at full speed, or is held down.
Why it costs
    Each generation doubles the rate: a healthy Gen4 x16 link copies 26-27 GB/s, Gen5 x16 53-57 GB/s. A link that is
    stuck at Gen1 copies about 3 GB/s (https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1010).
How we know
    The generation was sampled while a copy of a second or more ran, and is below the smaller maximum of card and
    slot. Where the maximum of the slot is unknown, the finding says so and stays undecided.
Fix
    Replace or shorten the riser, set the link speed of the slot to Auto in the firmware, seat the card again. Watch
    the counters of corrected errors: signal quality is the first suspect.
When to ignore
    The firmware caps the speed on purpose, because the riser cannot carry more.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Gpu, PcieLink, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence, subject
from gpudoctor.rules.link import low_copy

RULE = Rule(
    code="PCI002",
    name="link-gen-below-max-under-load",
    severity="error",
    needs=("gpus.pcie.generation",),
    since="0.1",
)

REMEDIES = (
    Remedy(kind="bios", text="set the link speed of the slot to Auto", undo="set the former speed"),
    Remedy(kind="hardware", text="replace or shorten the riser; seat the card again"),
    Remedy(
        kind="measure", text="watch the corrected errors of the link while a copy runs: aer_dev_correctable in sysfs"
    ),
)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for gpu in answering(case):
        link = gpu.pcie
        if link is None or not link.generation:
            yield Unchecked(reason="the link generation is unknown", subject=subject(gpu))
        elif link.state != "load":
            yield Unchecked(
                reason="the link was not read under load (`gpudoctor bench-pcie` does)", subject=subject(gpu)
            )
        elif gpu.pstate is not None and gpu.pstate > case.threshold(RULE.code, "max_pstate"):
            yield Unchecked(reason=f"the GPU was in P{gpu.pstate} during the reading", subject=subject(gpu))
        else:
            yield from _judge(case, gpu, link, link.generation)


def _judge(case: Case, gpu: Gpu, link: PcieLink, generation: int) -> Iterator[Finding | Unchecked]:
    limits = [value for value in (link.max_generation, link.port_max_generation) if value]
    if not limits:
        yield Unchecked(reason="the highest generation of card and slot is unknown", subject=subject(gpu))
        return
    limit = min(limits)
    if generation >= limit:
        return
    decided = bool(link.port_max_generation)
    message = f"the PCIe link runs Gen{generation} during a copy where card and slot can do Gen{limit}"
    undecided = (
        f"the PCIe link runs Gen{generation} during a copy; the card can do Gen{limit}, the slot's limit is unknown"
    )
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity if decided else "unknown",
        subject=subject(gpu),
        message=message if decided else undecided,
        evidence=(evidence(case, path(gpu, "pcie.generation"), f"Gen{generation} (load)", f"Gen{limit}"),),
        remedies=REMEDIES,
        gain=Gain(
            low=1.0,
            high=2.0 ** min(limit - generation, 5),  # Gen1 to Gen6
            unit="x",
            basis="estimate",
            source="each generation doubles the link; bounds host-device copies only, not the whole job",
        ),
        confidence="certain" if decided else "possible",
        symptoms=low_copy(case, gpu),
    )


def _gpu(generation: int | None, *, state: str = "load", pstate: int = 0, port: int | None = 4) -> Gpu:
    link = PcieLink(
        generation=generation,
        width=16,
        max_generation=5,
        max_width=16,
        port_max_generation=port,
        state="load" if state == "load" else "idle",
    )
    return Gpu(index=0, bdf="0000:01:00.0", pcie=link, pstate=pstate)


EXAMPLES = (
    Example(name="stuck at Gen1", kind="fires", case=Case(gpus=(_gpu(1),)), subjects=("gpu:0",)),
    Example(
        name="the slot's limit is unknown",
        kind="fires",
        case=Case(gpus=(_gpu(4, port=None),)),
        subjects=("gpu:0",),
        severity="unknown",
    ),
    Example(name="Gen5 card in a Gen4 slot", kind="quiet", case=Case(gpus=(_gpu(4),))),
    Example(name="idle", kind="lacks", case=Case(gpus=(_gpu(1, state="idle", pstate=8),))),
    Example(name="P8 although marked as load", kind="lacks", case=Case(gpus=(_gpu(1, pstate=8),))),
)
