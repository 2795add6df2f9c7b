"""What several PCIe rules ask about a link: is its slot visible, is a low copy rate its symptom, was it fast."""

from __future__ import annotations

from gpudoctor.estimate.link import pcie_gb_s
from gpudoctor.model import Case, Gpu, Measurement
from gpudoctor.rules.evidence import subject


def slot_hidden(case: Case, gpu: Gpu) -> bool:
    """Whether this is a guest, where the slot above the GPU is the hypervisor's invention."""
    return case.host.virtualization not in (None, "none") or gpu.virtualization not in (None, "none")


def copies(case: Case, gpu: Gpu) -> tuple[Measurement, ...]:
    """The pinned one-way copy rates measured on this GPU."""
    return tuple(m for m in case.measurements if m.metric in ("h2d", "d2h") and m.subject == subject(gpu))


def low_copy(case: Case, gpu: Gpu) -> tuple[str, ...]:
    """One symptom for each copy rate of this GPU that lies below what is expected of its link."""
    return tuple(
        f"{m.metric} {m.value:.1f} GB/s where {m.expected.low:.1f} is usual"
        for m in copies(case, gpu)
        if m.expected is not None and m.value < m.expected.low and m.verdict in ("low", "bad")
    )


def faster_than(case: Case, gpu: Gpu, generation: int, width: int) -> bool:
    """Whether a copy was measured that a link of this generation and width cannot carry."""
    try:
        limit = pcie_gb_s(generation, width)
    except ValueError:
        return False
    return any(m.unit == "GB/s" and m.value > limit and m.verdict != "rejected" for m in copies(case, gpu))
