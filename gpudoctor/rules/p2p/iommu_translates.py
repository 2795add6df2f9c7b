"""The IOMMU translates addresses on bare metal, and direct copies between the GPUs suffer.

What it means
    Each device has its own address space, and peer packets go up to the IOMMU to be translated. That protects guests
    of a virtual machine host; on a training machine it breaks or slows peer access.
Why it costs
    Hangs that vanish with intel_iommu=off (https://github.com/NVIDIA/nccl/issues/257); 2.6 instead of 13 GB/s.
How we know
    The IOMMU groups of the GPUs are of a translating type, this is no virtual machine, and a peer copy failed or is
    slower than staging. A translating IOMMU alone is no fault.
Fix
    iommu=pt on the kernel command line, or the IOMMU (VT-d, AMD-Vi) off in the firmware. Check after a cold boot that
    the firmware kept it.
When to ignore
    Hosts of virtual machines.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Host, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import answering, evidence
from gpudoctor.rules.locality import is_guest
from gpudoctor.rules.p2p.slower_than_staged import slower_pairs

RULE = Rule(code="P2P007", name="iommu-breaks-p2p", severity="error", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if len(answering(case)) < 2 or case.host.iommu in ("off", "identity"):
        return
    if case.host.iommu is None:
        yield Unchecked(reason="whether the IOMMU translates is unknown")
        return
    if is_guest(case):
        yield Unchecked(reason="the IOMMU of a virtual machine is the hypervisor's")
        return
    slow, compared = slower_pairs(case)
    failed = [item for item in rates.of(case, "p2p_check") if item.value == 0]
    if not compared and not rates.of(case, "p2p_check"):
        yield Unchecked(reason="the IOMMU translates; peer copies were not measured (`gpudoctor bench-pcie` does)")
        return
    if not slow and not failed:
        return
    what = f"peer copies between {rates.listed([rates.name(pair) for pair in slow])} are slower than staging"
    if failed:
        what = f"peer copies fail ({rates.listed([item.subject for item in failed])})"
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"the IOMMU translates addresses of the GPUs, and {what}",
        evidence=(evidence(case, "host.iommu", "translated", "identity or off"),),
        remedies=(
            Remedy(
                kind="config",
                text="iommu=pt (with amd_iommu=on or intel_iommu=on) on the kernel command line",
                undo="the old command line",
                risk="hosts that pass devices to guests need translation",
            ),
            Remedy(kind="bios", text="VT-d or AMD-Vi off", undo="on"),
        ),
        confidence="likely",
    )


def _case(iommu: str | None, direct: float | None, *, virtualization: str | None = "none") -> Case:
    figures = () if direct is None else (("p2p_write", direct), ("p2p_staged", 13.2))
    items = tuple(Measurement(metric=m, subject="gpu:0-gpu:1", value=v, unit="GB/s") for m, v in figures)
    host = Host(iommu=iommu, virtualization=virtualization)
    return Case(host=host, gpus=(Gpu(index=0), Gpu(index=1)), measurements=items)


EXAMPLES = (
    Example(name="translated and slow", kind="fires", case=_case("translated", 2.6), subjects=("host",)),
    Example(name="translated and fast", kind="quiet", case=_case("translated", 26.0)),
    Example(name="passthrough", kind="quiet", case=_case("identity", 2.6)),
    Example(name="unknown", kind="lacks", case=_case(None, 2.6)),
    Example(name="not measured", kind="lacks", case=_case("translated", None)),
)
