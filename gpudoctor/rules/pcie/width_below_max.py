"""The PCIe link of a GPU runs with fewer lanes than card and slot can do.

What it means
    Card and slot both have more lanes than the link uses now. Lanes are lost where a contact is dirty, a riser is
    bad, another device shares the lanes (often an M.2 drive), or the firmware splits the slot.
Why it costs
    Copies between host and GPU scale with the lanes: on Gen3, x1 gives about 0.75, x8 about 6.3 and x16 about 12.9
    GB/s (https://github.com/tinygrad/open-gpu-kernel-modules/issues/17). A job that moves little data may not notice.
How we know
    The width that NVML reports and the one of the kernel's device tree agree, or the width was read while a copy
    ran. The limit is the smaller one of card and slot. A single idle reading is not enough: some drivers print a
    wrong width when power management of the link is off.
Fix
    Seat the card again, try another slot, take out what shares its lanes, set the split (bifurcation) in the
    firmware, or replace the riser.
When to ignore
    Cards and slots that are x8 or x4 by design (their maximum says so), a board that splits 16 lanes between two
    cards, and a virtual machine, where the slot cannot be seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpudoctor.model import (
    Case,
    Example,
    Finding,
    Gain,
    Gpu,
    Host,
    PcieHop,
    PcieLink,
    Remedy,
    Rule,
    Severity,
    Source,
    Unchecked,
)
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence, source, subject
from gpudoctor.rules.link import low_copy, slot_hidden

RULE = Rule(code="PCI001", name="link-width-below-max", severity="error", needs=("gpus.pcie.width",), since="0.1")

REMEDIES: tuple[Remedy, ...] = (
    Remedy(kind="hardware", text="seat the card again and clean its contacts; try another slot or riser"),
    Remedy(kind="hardware", text="take out what shares the lanes of this slot, often an M.2 drive"),
    Remedy(kind="bios", text="set the slot to x16 instead of a split (bifurcation)", undo="set the split again"),
)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for gpu in answering(case):
        link = gpu.pcie
        if link is None or not link.width:
            yield Unchecked(reason="the link width is unknown", subject=subject(gpu))
            continue
        limits = [width for width in (link.max_width, link.port_max_width) if width]
        if not limits:
            yield Unchecked(reason="the widest possible link is unknown", subject=subject(gpu))
        elif _disagree(case, gpu):
            yield Unchecked(reason="sources disagree about the link width (SWV010)", subject=subject(gpu))
        elif link.width < min(limits):
            yield _finding(case, gpu, link, link.width, min(limits))


def _disagree(case: Case, gpu: Gpu) -> bool:
    """Whether sources of the Case disagree about the width of this GPU's link."""
    hop = gpu.pcie_path[0].link if gpu.pcie_path else None
    differs = bool(hop and hop.width and gpu.pcie and gpu.pcie.width and hop.width != gpu.pcie.width)
    return differs or any(conflict.path == path(gpu, "pcie.width") for conflict in case.conflicts)


def _finding(case: Case, gpu: Gpu, link: PcieLink, width: int, limit: int) -> Finding:
    severity, reason = _severity(case, gpu, link, width)
    message = f"the PCIe link runs x{width} where card and slot can do x{limit}"
    remedies = REMEDIES
    if severity == "unknown":
        measure = Remedy(kind="measure", text="gpudoctor bench-pcie reads the link while a copy runs")
        remedies = (measure, *REMEDIES)
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=severity,
        subject=subject(gpu),
        message=f"{message}; {reason}" if reason else message,
        evidence=(evidence(case, path(gpu, "pcie.width"), f"x{width} ({link.state})", f"x{limit}"),),
        remedies=remedies,
        gain=Gain(
            low=1.0,
            high=limit / width,
            unit="x",
            basis="estimate",
            source="copies scale with the lanes; bounds host-device copies only, not the whole job",
        ),
        confidence="certain" if severity == RULE.severity and link.state == "load" else "likely",
        symptoms=low_copy(case, gpu),
    )


def _severity(case: Case, gpu: Gpu, link: PcieLink, width: int) -> tuple[Severity, str | None]:
    """The severity, and the reason when it is lowered."""
    if slot_hidden(case, gpu) and not link.port_max_width:
        return "unknown", "a virtual machine hides the slot, which may have fewer lanes by design"
    if link.state != "load" and len(_witnesses(case, gpu, width)) < 2:
        return "unknown", "only one reading without load says so"
    cards = answering(case)
    split = case.threshold(RULE.code, "split_width")
    if len(cards) == 2 and all(card.pcie is not None and card.pcie.width == split == width for card in cards):
        return "info", "both cards run x8, as on a board that splits 16 lanes between two slots"
    return RULE.severity, None


def _witnesses(case: Case, gpu: Gpu, width: int) -> set[str]:
    """Who says so: the origins of the GPU's own reading, and the kernel's reading of the same link if it agrees."""
    width_path = path(gpu, "pcie.width")
    found = {s.origin for s in case.sources if s.path == width_path} or {_file(source(case, width_path) or "the GPU")}
    hop = gpu.pcie_path[0].link if gpu.pcie_path else None
    if hop is not None and hop.width == width:
        found.add(_file(source(case, path(gpu, "pcie_path")) or "/sys"))
    return {"/sys" if origin.startswith("/sys") else origin for origin in found}


def _file(origin: str) -> str:
    """An origin without its line: two lines of one artifact are one witness."""
    return re.sub(r":\d+$", "", origin)


def _gpu(width: int | None, *, index: int = 0, hop: int | None = None, state: str = "idle", port: int = 16) -> Gpu:
    bdf = f"0000:{index + 1:02x}:00.0"
    link = PcieLink(width=width, max_width=16, port_max_width=port, state="load" if state == "load" else "idle")
    above = (PcieHop(bdf=bdf, kind="endpoint", link=PcieLink(width=hop, max_width=16)),) if hop else ()
    return Gpu(index=index, bdf=bdf, pcie=link, pcie_path=above)


EXAMPLES = (
    Example(name="x4 under load", kind="fires", case=Case(gpus=(_gpu(4, state="load"),)), subjects=("gpu:0",)),
    Example(
        name="x1 riser, NVML and sysfs agree",
        kind="fires",
        case=Case(gpus=(_gpu(16, hop=16), _gpu(1, index=1, hop=1))),
        subjects=("gpu:1",),
    ),
    Example(
        name="one idle reading decides nothing",
        kind="fires",
        case=Case(gpus=(_gpu(8),)),
        subjects=("gpu:0",),
        severity="unknown",
    ),
    Example(
        name="NVML was not asked: the kernel is one witness",
        kind="fires",
        case=Case(gpus=(_gpu(8, hop=8),), sources=(Source(path="gpus", origin="/sys/bus/pci/devices"),)),
        subjects=("gpu:0",),
        severity="unknown",
    ),
    Example(
        name="board splits 16 lanes into two slots",
        kind="fires",
        case=Case(gpus=(_gpu(8, hop=8), _gpu(8, index=1, hop=8))),
        subjects=("gpu:0", "gpu:1"),
        severity="info",
    ),
    Example(
        name="passed through: the slot is hidden",
        kind="fires",
        case=Case(
            host=Host(virtualization="kvm"),
            gpus=(Gpu(index=0, pcie=PcieLink(width=8, max_width=16, state="load")),),
        ),
        subjects=("gpu:0",),
        severity="unknown",
    ),
    Example(name="full width", kind="quiet", case=Case(gpus=(_gpu(16, hop=16),))),
    Example(name="x8 slot", kind="quiet", case=Case(gpus=(_gpu(8, hop=8, port=8),))),
    Example(name="width unknown in a VM", kind="lacks", case=Case(gpus=(_gpu(None),))),
    Example(name="NVML says x1, sysfs x8", kind="lacks", case=Case(gpus=(_gpu(1, hop=8),))),
)
