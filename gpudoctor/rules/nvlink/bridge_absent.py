"""The cards could be joined by an NVLink bridge, and none is there.

What it means
    All NVLinks of these slot cards are down because no bridge connects them. A bridge is optional hardware; monitoring
    that counts inactive links reports a fault here that is none.
Why it costs
    Copies between the cards run over PCIe or host memory. Jobs that talk little do not notice.
How we know
    Every card of a model with NVLink shows all of its links inactive.
Fix
    Nothing is needed. A bridge between two cards would give them a direct way.
When to ignore
    Always, unless a bridge should be there (https://github.com/NVIDIA/NVSentinel/pull/1481).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gap, Gpu, NvLink, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence

RULE = Rule(code="NVL004", name="nvlink-bridge-absent", severity="info", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = answering(case)
    bare = [gpu for gpu in gpus if _bare(case, gpu)]
    unknown = [gpu for gpu in gpus if not gpu.nvlinks and case.gap(path(gpu, "nvlinks")) is None]
    if len(gpus) < 2 or any("SXM" in (gpu.name or "") or "HBM3" in (gpu.name or "") for gpu in gpus):
        return
    if len(unknown) == len(gpus) and not any(pair.nvlinks for pair in case.pairs):
        yield Unchecked(reason="the states of the NVLinks are unknown")
        return
    if len(bare) == len(gpus):
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject="host",
            message=f"no NVLink bridge joins the {len(bare)} cards: all of their links are inactive, which is no fault",
            evidence=tuple(evidence(case, path(gpu, "nvlinks"), "all inactive") for gpu in bare),
            remedies=(Remedy(kind="hardware", text="nothing is needed; a bridge would join two cards directly"),),
            confidence="certain",
        )


def _bare(case: Case, gpu: Gpu) -> bool:
    if gpu.nvlinks:
        return all(link.active is False for link in gpu.nvlinks)
    gap = case.gap(path(gpu, "nvlinks"))
    return gap is not None and "inactive" in (gap.detail or "").lower()


def _gpu(index: int, *states: bool, name: str = "NVIDIA RTX A6000") -> Gpu:
    links = tuple(NvLink(link=number, active=state) for number, state in enumerate(states))
    return Gpu(index=index, name=name, nvlinks=links)


_GAPS = tuple(
    Gap(path=f"gpus[{i}].nvlinks", reason="not present", detail="NVML: all links are inActive") for i in range(2)
)

EXAMPLES = (
    Example(
        name="two cards",
        kind="fires",
        case=Case(gpus=(_gpu(0, False, False), _gpu(1, False, False))),
        subjects=("host",),
    ),
    Example(
        name="as nvidia-smi says it", kind="fires", case=Case(gpus=(_gpu(0), _gpu(1)), gaps=_GAPS), subjects=("host",)
    ),
    Example(name="joined", kind="quiet", case=Case(gpus=(_gpu(0, True, True), _gpu(1, True, True)))),
    Example(name="one card", kind="quiet", case=Case(gpus=(_gpu(0, False),))),
    Example(name="unknown", kind="lacks", case=Case(gpus=(_gpu(0), _gpu(1)))),
)
