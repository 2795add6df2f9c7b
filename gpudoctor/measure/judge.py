"""From samples to a Measurement: median, spread, what is expected, and the verdict."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from gpudoctor import profiles
from gpudoctor.estimate import NVLINK_C2C_GB_S, PCIE_GENERATIONS, PCIE_WIDTHS, pcie_gb_s
from gpudoctor.measure.series import outliers, spread
from gpudoctor.model import Expected, Gpu, Measurement, Setting, Verdict

# Ours, from the published runs behind profiles/: healthy machines of one kind lie within 5 % of each other, and a
# link of the next lower class (half the lanes, one generation less) gives at most half.
OK_SHARE = 0.95
BAD_SHARE = 0.80
_LIMIT_SLACK = 1.005  # clocks of events and links differ by less
_COHERENT = re.compile(r"\bG[HB]\d{3}\b")  # Grace Hopper and Grace Blackwell: the GPU hangs on NVLink-C2C


def measurement(
    gpu: Gpu, metric: str, samples: Sequence[float], settings: dict[str, Setting], notes: Sequence[str] = ()
) -> Measurement:
    """One Measurement of a GPU whose `pcie` was read under load. `samples` are GB/s; at least one."""
    value = statistics.median(samples)
    low, high = spread(samples)
    said = list(notes)
    strange = outliers(samples)
    if strange:
        said.append(
            f"{len(strange)} of {len(samples)} samples lie far from the rest (down to {min(samples):.1f}, up to "
            f"{max(samples):.1f} GB/s): something else used the link or the memory; repeat on a quiet machine"
        )
    expected = _expected(gpu, metric)
    limit = limit_gb_s(gpu)
    verdict: Verdict | None = None
    if limit is not None and value > limit * _LIMIT_SLACK:
        verdict = "rejected"
        said.append(f"more than the link can carry ({limit:.1f} GB/s): a measurement error, not a result")
    elif expected is not None:
        verdict = _verdict(value, expected.low)
        if verdict != "ok" and _verdict(high, expected.low) == "ok":
            verdict = "no verdict"
            said.append("the samples differ so much that they decide nothing: the host is busy; repeat when it is not")
        elif verdict != "ok" and (likely := like_link(gpu, value)):
            said.append(f"about what {likely} gives")
    return Measurement(
        metric=metric,
        subject=f"gpu:{gpu.index}",
        value=value,
        unit="GB/s",
        spread=(low, high),
        samples=len(samples),
        settings=settings,
        expected=expected,
        verdict=verdict,
        notes=tuple(said),
    )


def limit_gb_s(gpu: Gpu) -> float | None:
    """What the GPU's link carries at most as it was read under load; None when it was not read then."""
    if is_coherent(gpu):
        return NVLINK_C2C_GB_S
    link = gpu.pcie
    if link is None or link.state != "load" or link.generation not in PCIE_GENERATIONS or link.width not in PCIE_WIDTHS:
        return None
    return pcie_gb_s(link.generation, link.width)


def is_coherent(gpu: Gpu) -> bool:
    """Whether copies run over NVLink-C2C to a Grace CPU; the PCIe link of such a GPU says nothing about them."""
    return gpu.memory_node is not None or (gpu.name is not None and _COHERENT.search(gpu.name) is not None)


def like_link(gpu: Gpu, value: float) -> str | None:
    """The fastest lower links whose usual rate (75-92 % of theory) holds `value`, in words; None when none does."""
    best = profiles.best_link(gpu)
    if best is None:
        return None
    lower = [
        (pcie_gb_s(generation, width), f"Gen{generation} x{width}")
        for generation in range(best[0], 0, -1)
        for width in (16, 8, 4, 2, 1)
        if width <= best[1] and (generation, width) != best
    ]
    near = [(rate, name) for rate, name in lower if 0.75 <= value / rate <= 0.92]
    if not near:
        return None
    fastest = max(rate for rate, _ in near)
    return "a " + " or ".join(name for rate, name in near if rate > 0.97 * fastest) + " link"


def _expected(gpu: Gpu, metric: str) -> Expected | None:
    if metric == "h2d":
        expected = profiles.expected_copy(gpu, "h2d")
    elif metric == "d2h":
        expected = profiles.expected_copy(gpu, "d2h")
    else:
        return None  # pageable copies depend on the CPU; no published figure fits every host
    return None if expected is not None and expected.basis == "theory" and is_coherent(gpu) else expected


def _verdict(value: float, usual: float) -> Verdict:
    if value >= OK_SHARE * usual:
        return "ok"
    return "low" if value >= BAD_SHARE * usual else "bad"
