"""A hop between the GPU and the processor carries less than the GPU's own link.

What it means
    The card's link is only the first hop. Above it lie switch ports or the uplink of the chipset, and the slowest hop
    limits every copy. nvidia-smi and the card itself report the first hop only, so that all looks well there.
Why it costs
    A card in a chipset slot copied 6.5 instead of 13.2 GB/s
    (https://github.com/noonghunna/club-3090/blob/HEAD/docs/PCIE_P2P.md); a switch whose uplink had trained at Gen2 gave
    14 instead of 95 GB/s to its GPUs.
How we know
    The link of a bridge above the GPU can do less, or ran at less while a copy was measured, than the GPU's own link.
    A root port and the card below it are two ends of one link and count once.
Fix
    Move the card to a slot of the processor or to another port of the switch; raise the uplink in the firmware.
When to ignore
    Jobs that copy little. In a virtual machine the bridges are the hypervisor's invention: nothing is said there.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.estimate.link import pcie_gb_s
from gpudoctor.model import Case, Example, Finding, Gain, Gpu, Host, PcieHop, PcieLink, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence, subject
from gpudoctor.rules.link import low_copy, slot_hidden

RULE = Rule(
    code="PCI004", name="path-narrower-than-endpoint", severity="warning", needs=("gpus.pcie_path",), since="0.1"
)

_UPLINKS = ("switch-up", "bridge")  # their link leads up; that of a port that leads down is the child's own


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for gpu in answering(case):
        if slot_hidden(case, gpu):
            yield Unchecked(reason="a virtual machine hides the ports above the GPU", subject=subject(gpu))
            continue
        if len(gpu.pcie_path) < 2:
            yield Unchecked(reason="the ports above the GPU are not known", subject=subject(gpu))
            continue
        own = _rate(gpu.pcie or gpu.pcie_path[0].link, loaded=False)
        if own is None:
            yield Unchecked(reason="the GPU's own link is not known", subject=subject(gpu))
            continue
        slow = _slowest(gpu, own[0])
        if slow is not None:
            yield _finding(case, gpu, own[1], *slow)


def _slowest(gpu: Gpu, own: float) -> tuple[PcieHop, float, str] | None:
    """The slowest hop above the GPU that is slower than the GPU's own link."""
    found = []
    running = _rate(gpu.pcie, loaded=True)
    for hop in gpu.pcie_path[1:]:
        if hop.kind not in _UPLINKS:
            continue
        best = _rate(hop.link, loaded=False)
        now = _rate(hop.link, loaded=True)
        if best is not None and best[0] < own:
            found.append((hop, best[0] / own, f"can do {best[1]}"))
        elif now is not None and running is not None and now[0] < running[0]:
            found.append((hop, now[0] / running[0], f"ran {now[1]} during the copies"))
    return min(found, key=lambda entry: entry[1], default=None)


def _rate(link: PcieLink | None, *, loaded: bool) -> tuple[float, str] | None:
    """GB/s of a link and its name: as it was read under load, or the best that its ends can do."""
    if link is None or (loaded and link.state != "load"):
        return None
    if loaded:
        generation, width = link.generation, link.width
    else:
        generation = min((value for value in (link.max_generation, link.port_max_generation) if value), default=None)
        width = min((value for value in (link.max_width, link.port_max_width) if value), default=None)
    try:
        return (pcie_gb_s(generation, width), f"Gen{generation} x{width}") if generation and width else None
    except ValueError:
        return None


def _finding(case: Case, gpu: Gpu, own: str, hop: PcieHop, share: float, what: str) -> Finding:
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject(gpu),
        message=f"the port {hop.bdf} above this GPU {what}, the GPU's own link {own}: every copy is limited by it",
        evidence=(evidence(case, path(gpu, "pcie_path"), f"{hop.bdf} {what}", own),),
        remedies=(
            Remedy(kind="hardware", text="move the card to a slot of the processor, or to another port of the switch"),
            Remedy(kind="bios", text="raise the uplink of the switch or chipset", undo="set the former speed"),
        ),
        gain=Gain(low=1.0, high=1 / share, unit="x", basis="estimate", source="the ratio of the two links"),
        confidence="certain" if low_copy(case, gpu) else "likely",
        symptoms=low_copy(case, gpu),
    )


def _gpu(uplink: PcieLink | None, *, state: str = "idle") -> Gpu:
    own = PcieLink(generation=4, width=16, max_generation=4, max_width=16, state="load" if state == "load" else "idle")
    hops = (
        PcieHop(bdf="0000:03:00.0", kind="endpoint", link=own),
        PcieHop(bdf="0000:02:00.0", kind="switch-down", link=own),
        PcieHop(bdf="0000:01:00.0", kind="switch-up", link=uplink),
        PcieHop(bdf="0000:00:01.0", kind="root-port", link=uplink),
    )
    return Gpu(index=0, bdf="0000:03:00.0", pcie=own, pcie_path=hops)


_X4 = PcieLink(generation=4, width=4, max_generation=4, max_width=4)
_GEN2 = PcieLink(generation=2, width=16, max_generation=4, max_width=16, state="load")
_FULL = PcieLink(generation=4, width=16, max_generation=4, max_width=16)

EXAMPLES = (
    Example(name="chipset slot with a x4 uplink", kind="fires", case=Case(gpus=(_gpu(_X4),)), subjects=("gpu:0",)),
    Example(
        name="uplink trained at Gen2",
        kind="fires",
        case=Case(gpus=(_gpu(_GEN2, state="load"),)),
        subjects=("gpu:0",),
    ),
    Example(name="switch with a full uplink", kind="quiet", case=Case(gpus=(_gpu(_FULL),))),
    Example(
        name="x4 root port: two ends of one link",
        kind="quiet",
        case=Case(
            gpus=(
                Gpu(
                    index=0,
                    bdf="0000:01:00.0",
                    pcie=_FULL,
                    pcie_path=(
                        PcieHop(bdf="0000:01:00.0", kind="endpoint", link=_FULL),
                        PcieHop(bdf="0000:00:01.0", kind="root-port", link=_X4),
                    ),
                ),
            )
        ),
    ),
    Example(name="no ports known", kind="lacks", case=Case(gpus=(Gpu(index=0, pcie=_FULL),))),
    Example(name="virtual machine", kind="lacks", case=Case(host=Host(virtualization="kvm"), gpus=(_gpu(_X4),))),
)
