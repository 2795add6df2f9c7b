"""The driver refuses direct copies because of the chipset between the GPUs.

What it means
    The P2P matrix says CNS, "chipset not supported": the GPUs could reach each other, but the platform between them is
    not on the driver's list, or its firmware does not allow it.
Why it costs
    Copies between the GPUs are staged through host memory, at half the rate or less and ten times the latency.
How we know
    The P2P status of the pair, from NVML or `nvidia-smi topo -p2p`, is CNS, and this is no virtual machine, whose
    emulated chipset always says so.
Fix
    Look for a firmware setting of PCIe peer-to-peer and for a newer kernel; put both cards under one switch or socket
    (https://github.com/stas00/ml-engineering/blob/744d01e18b79512572f64a6bbd8b5f4a725203a7/network/debug/README.md).
When to ignore
    Jobs with one GPU per process group.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Host, Pair, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import answering, evidence
from gpudoctor.rules.locality import is_guest

RULE = Rule(code="P2P002", name="p2p-refused-by-chipset", severity="warning", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if len(answering(case)) < 2:
        return
    pairs = rates.gpu_pairs(case)
    known = [pair for pair in pairs if pair.p2p_read is not None or pair.p2p_write is not None]
    if not known:
        yield Unchecked(reason="the P2P status of the pairs is unknown (`nvidia-smi topo -p2p r` prints it)")
        return
    refused = [pair for pair in known if "CNS" in (pair.p2p_read, pair.p2p_write)]
    if not refused:
        return
    if is_guest(case):
        yield Unchecked(reason="CNS in a virtual machine is the emulated chipset's answer, whatever lies below")
        return
    names = [rates.name((pair.a, pair.b)) for pair in refused]
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=names[0] if len(names) == 1 else "host",
        message=f"the chipset refuses direct copies between {rates.listed(names)} (CNS): they go through host memory",
        evidence=tuple(
            evidence(
                case, f"pairs[{pair.a},{pair.b}].{'p2p_read' if pair.p2p_read == 'CNS' else 'p2p_write'}", "CNS", "OK"
            )
            for pair in refused
        ),
        remedies=(
            Remedy(kind="bios", text="look for a setting of PCIe peer-to-peer", undo="the old setting"),
            Remedy(kind="hardware", text="both cards under one switch or one socket"),
            Remedy(kind="measure", text="gpudoctor bench-pcie shows what staging gives"),
        ),
        confidence="certain",
    )


def _case(status: str | None, *, gpus: int = 2, virtualization: str | None = None) -> Case:
    pairs = tuple(
        Pair(a=f"gpu:{a}", b=f"gpu:{b}", p2p_read=status)  # type: ignore[arg-type]
        for a in range(gpus)
        for b in range(a + 1, gpus)
    )
    return Case(
        host=Host(virtualization=virtualization), gpus=tuple(Gpu(index=index) for index in range(gpus)), pairs=pairs
    )


EXAMPLES = (
    Example(name="one pair", kind="fires", case=_case("CNS"), subjects=("gpu:0-gpu:1",)),
    Example(name="four cards", kind="fires", case=_case("CNS", gpus=4), subjects=("host",)),
    Example(name="granted", kind="quiet", case=_case("OK")),
    Example(name="product policy is P2P001", kind="quiet", case=_case("GNS")),
    Example(name="guest", kind="lacks", case=_case("CNS", virtualization="kvm")),
    Example(name="no status", kind="lacks", case=_case(None)),
)
