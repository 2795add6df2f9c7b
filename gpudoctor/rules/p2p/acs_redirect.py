"""A bridge between the GPUs sends their direct traffic up to the processor: ACS redirection is on.

What it means
    Access Control Services can redirect requests between two devices below one switch to the root, so that an IOMMU may
    check them. On a machine that runs no virtual machines that is a detour, and with some platforms a dead end.
Why it costs
    Copies below one switch reached 50 instead of 103 GB/s; collectives hung until it was off
    (https://github.com/NVIDIA/nccl/issues/2079).
How we know
    ACSCtl of a bridge on the way between two GPUs has ReqRedir or CmpltRedir on. SrcValid and UpstreamFwd alone
    redirect nothing, and ACSCap only says what could be.
Fix
    ACS off in the firmware, or clear ACSCtl of every bridge at boot (setpci ECAP_ACS+6.w=0000), switch ports and root
    ports alike.
When to ignore
    Hosts that pass devices to virtual machines need ACS.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Gpu, Host, PcieHop, Remedy, Rule, Unchecked
from gpudoctor.model.facts import Acs
from gpudoctor.rules.acs import redirecting
from gpudoctor.rules.evidence import answering, evidence
from gpudoctor.rules.locality import is_guest

RULE = Rule(code="P2P006", name="acs-redirect-on-p2p-path", severity="error", needs=("acs",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = answering(case)
    if len(case.gpus) == 1:
        return
    if is_guest(case):
        yield Unchecked(reason="a virtual machine shows the hypervisor's bridges")
        return
    bridges = redirecting(case)
    named = [acs.bdf for acs in bridges if acs.bdf is not None]
    if bridges and named and not gpus:
        yield Unchecked(reason="bridges redirect, but whether they lie between GPUs is unknown")
        return
    if not bridges:
        return
    where = f"{len(named)} bridges ({', '.join(named[:4])})" if named else f"{len(bridges)} of {len(case.acs)} bridges"
    controls = sorted({word for acs in bridges for word in acs.on if word in ("ReqRedir", "CmpltRedir")})
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"ACS redirects traffic between devices at {where}: {' and '.join(controls)} on",
        evidence=(evidence(case, "acs", f"{' '.join(controls)} on at {where}", "off on bare metal"),),
        remedies=(
            Remedy(kind="bios", text="ACS off", undo="ACS on", risk="hosts that pass devices to guests need it"),
            Remedy(
                kind="command",
                text="at boot, for every bridge: setpci -s BRIDGE ECAP_ACS+6.w=0000",
                undo="the value that setpci -s BRIDGE ECAP_ACS+6.w printed before",
            ),
        ),
        gain=Gain(
            low=1.0,
            high=2.0,
            unit="x",
            basis="published",
            source="50 to 103 GB/s below one switch; hangs cured elsewhere",
        ),
        confidence="certain" if named else "likely",
    )


def _case(*acs: Acs, virtualization: str | None = None) -> Case:
    gpus = tuple(
        Gpu(
            index=index,
            pcie_path=(
                PcieHop(bdf=f"0000:0{index + 3}:00.0", kind="endpoint"),
                PcieHop(bdf=f"0000:02:0{index}.0", kind="switch-down"),
            ),
        )
        for index in range(2)
    )
    return Case(host=Host(virtualization=virtualization), gpus=gpus, acs=acs)


_ON = ("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd")

EXAMPLES = (
    Example(
        name="switch ports",
        kind="fires",
        case=_case(Acs(bdf="0000:02:00.0", on=_ON), Acs(bdf="0000:02:01.0")),
        subjects=("host",),
    ),
    Example(name="a list without names", kind="fires", case=Case(acs=(Acs(on=_ON), Acs())), subjects=("host",)),
    Example(name="SrcValid alone", kind="quiet", case=_case(Acs(bdf="0000:02:00.0", on=("SrcValid", "UpstreamFwd")))),
    Example(name="a bridge elsewhere", kind="quiet", case=_case(Acs(bdf="0000:80:01.0", on=_ON))),
    Example(name="guest", kind="lacks", case=_case(Acs(bdf="0000:02:00.0", on=_ON), virtualization="kvm")),
    Example(name="not readable without root", kind="lacks", case=_case()),
    Example(name="no GPUs in the text", kind="lacks", case=Case(acs=(Acs(bdf="0000:02:00.0", on=_ON),))),
)
