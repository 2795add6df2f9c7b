"""A GPU has no BAR1: the firmware found no address range for its window.

What it means
    BAR1 is the window through which processor and other devices reach the memory of the GPU. Without it the driver
    cannot use the card, or only in part.
Why it costs
    The GPU does not start, or peer access and RDMA fail (https://github.com/NVIDIA/gpu-operator/issues/492).
How we know
    The size of BAR1 is reported as 0.
Fix
    Switch on "above 4G decoding" in the firmware. In a virtual machine give the guest a larger 64-bit MMIO window.
When to ignore
    Never on a GPU that shall be used; a vGPU has no BAR1 of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence, subject

RULE = Rule(code="PCI006", name="bar1-unassigned", severity="error", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for gpu in answering(case):
        if gpu.bar1_bytes is None:
            yield Unchecked(reason="the size of BAR1 is unknown", subject=subject(gpu))
        elif gpu.bar1_bytes == 0 and gpu.virtualization != "vgpu":
            yield Finding(
                rule=RULE.code,
                name=RULE.name,
                severity=RULE.severity,
                subject=subject(gpu),
                message="BAR1 has size 0: the firmware gave the GPU no address range for its memory",
                evidence=(evidence(case, path(gpu, "bar1_bytes"), 0, "256 MiB or more"),),
                remedies=(
                    Remedy(kind="bios", text="switch on above 4G decoding", undo="switch it off"),
                    Remedy(kind="config", text="virtual machine: a larger 64-bit MMIO window for the guest"),
                ),
                confidence="certain",
            )


EXAMPLES = (
    Example(name="size 0", kind="fires", case=Case(gpus=(Gpu(index=0, bar1_bytes=0),)), subjects=("gpu:0",)),
    Example(name="a window", kind="quiet", case=Case(gpus=(Gpu(index=0, bar1_bytes=1 << 28),))),
    Example(name="vGPU", kind="quiet", case=Case(gpus=(Gpu(index=0, bar1_bytes=0, virtualization="vgpu"),))),
    Example(name="unknown", kind="lacks", case=Case(gpus=(Gpu(index=0),))),
)
