"""The PCIe link was only read while the GPU was idle, and at less than its maximum: nothing can be said yet.

What it means
    An idle GPU lowers the generation of its link to save power and raises it within milliseconds when a copy
    starts. So a low reading at idle is normal, and hides the links that are really stuck.
Why it costs
    Nothing by itself. A link that stays low under load costs half of the copy rate per generation (PCI002).
How we know
    Every reading in the Case was taken idle, or it is not known when, and is below the smaller maximum of card and
    slot. No copy was measured that is faster than such a link.
Fix
    Run a copy of two seconds and read the link during it: `gpudoctor bench-pcie` does.
When to ignore
    Always, when copies are known to be fast. "(downgraded)" in lspci without load is no fault
    (https://github.com/janhq/jan/issues/183).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Measurement, PcieLink, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence, subject
from gpudoctor.rules.link import faster_than

RULE = Rule(
    code="PCI003",
    name="link-speed-unknown-at-idle",
    severity="unknown",
    needs=("gpus.pcie.generation",),
    since="0.1",
)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    """One finding for all GPUs concerned: they idle together, and one command decides for all."""
    idle: list[tuple[Gpu, int, int]] = []
    for gpu in answering(case):
        link = gpu.pcie
        if link is None or not link.generation:
            yield Unchecked(reason="the link generation is unknown", subject=subject(gpu))
            continue
        limits = [value for value in (link.max_generation, link.port_max_generation) if value]
        if not limits:
            yield Unchecked(reason="the highest generation of card and slot is unknown", subject=subject(gpu))
        elif link.state != "load" and link.generation < min(limits) and not _fast(case, gpu, link):
            idle.append((gpu, link.generation, min(limits)))
    if idle:
        names = ", ".join(f"gpu:{gpu.index}" for gpu, _, _ in idle)
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=subject(idle[0][0]) if len(idle) == 1 else "host",
            message=f"the PCIe link of {names} was read without load only, below its maximum: healthy or stuck, "
            "a reading under load decides",
            evidence=tuple(
                evidence(
                    case, path(gpu, "pcie.generation"), f"Gen{now} ({gpu.pcie.state if gpu.pcie else ''})", f"Gen{top}"
                )
                for gpu, now, top in idle
            ),
            remedies=(Remedy(kind="measure", text="gpudoctor bench-pcie"),),
            confidence="certain",
        )


def _fast(case: Case, gpu: Gpu, link: PcieLink) -> bool:
    return bool(link.generation and link.width and faster_than(case, gpu, link.generation, link.width))


def _gpu(index: int, generation: int | None, *, load: bool = False) -> Gpu:
    link = PcieLink(
        generation=generation,
        width=16,
        max_generation=4,
        max_width=16,
        port_max_generation=4,
        state="load" if load else "idle",
    )
    return Gpu(index=index, bdf=f"0000:0{index + 1}:00.0", pcie=link, pstate=0 if load else 8)


EXAMPLES = (
    Example(name="idle at Gen1", kind="fires", case=Case(gpus=(_gpu(0, 1),)), subjects=("gpu:0",)),
    Example(
        name="two idle GPUs, one finding", kind="fires", case=Case(gpus=(_gpu(0, 1), _gpu(1, 1))), subjects=("host",)
    ),
    Example(name="read under load", kind="quiet", case=Case(gpus=(_gpu(0, 4, load=True),))),
    Example(name="stuck under load is PCI002", kind="quiet", case=Case(gpus=(_gpu(0, 1, load=True),))),
    Example(
        name="idle, but a copy was faster than Gen1 can be",
        kind="quiet",
        case=Case(
            gpus=(_gpu(0, 1),),
            measurements=(Measurement(metric="h2d", subject="gpu:0", value=26.8, unit="GB/s"),),
        ),
    ),
    Example(name="no reading", kind="lacks", case=Case(gpus=(_gpu(0, None),))),
)
