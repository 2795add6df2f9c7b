"""What a figure should be, and the verdict: one judge for what gpudoctor measures and for what other tools printed.

A figure is judged against the best figure with a source (profiles/): measured on this GPU model, else theory of the
link times the usual ratio of its class. What physics does not allow is rejected, not reported as good.
"""

from __future__ import annotations

import dataclasses
import re

from gpudoctor import profiles
from gpudoctor.estimate import NVLINK_C2C_GB_S, PCIE_GENERATIONS, PCIE_WIDTHS, pcie_gb_s
from gpudoctor.model import Case, Expected, Gpu, Measurement, Pair, Verdict

# Ours, from the published runs behind profiles/: healthy machines of one kind lie within 5 % of each other, and a
# link of the next lower class (half the lanes, one generation less) gives at most half.
OK_SHARE = 0.95
BAD_SHARE = 0.80
_LIMIT_SLACK = 1.005  # clocks of events and links differ by less
_MEMORY_SLACK = 1.05  # caches carry a little of what is copied inside a GPU
_COHERENT = re.compile(r"\bG[HB]\d{3}\b")  # Grace Hopper and Grace Blackwell: the GPU hangs on NVLink-C2C
_PINNED = ("h2d", "d2h", "h2d_while_d2h", "d2h_while_h2d")
_OVER_THE_LINK = (*_PINNED, "h2d_pageable", "d2h_pageable")
_PEER = ("p2p_write", "p2p_read")
_FASTEST_PCIE_GB_S = pcie_gb_s(5, 16)  # of the links that GPUs have today: what is faster ran over NVLink


def judged(case: Case, item: Measurement) -> Measurement:
    """The measurement with expected, verdict and notes, as far as profiles know; unchanged where it was judged."""
    if item.verdict is not None or item.expected is not None or item.unit != "GB/s":
        return item
    gpu = gpu_of(case, item.subject)
    expected, limit = expected_for(case, item), limit_for(case, item)
    notes = list(item.notes)
    verdict: Verdict | None = None
    if limit is not None and item.value > limit[0]:
        verdict = "rejected"
        notes.append(f"more than {limit[1]}: a measurement error, not a result")
    elif expected is not None:
        verdict = _verdict(item.value, expected.low)
        high = item.spread[1] if item.spread else item.value
        if verdict != "ok" and _verdict(high, expected.low) == "ok":
            verdict = "no verdict"
            notes.append("the samples differ so much that they decide nothing: the host is busy; repeat when it is not")
        elif verdict != "ok" and gpu and item.metric in _PINNED[:2] and (likely := like_link(gpu, item.value)):
            notes.append(f"about what {likely} gives")
    if expected is None and verdict is None:
        return item
    return dataclasses.replace(item, expected=expected, verdict=verdict, notes=tuple(notes))


def judged_all(case: Case) -> Case:
    """The Case with its measurements judged; those that were judged when they were taken keep their verdict."""
    if all(item.verdict is not None or item.unit != "GB/s" for item in case.measurements):
        return case
    return dataclasses.replace(case, measurements=tuple(judged(case, item) for item in case.measurements))


def expected_for(case: Case, item: Measurement) -> Expected | None:
    """What a healthy machine gives for this metric and subject; None where no figure fits every host."""
    if item.metric.endswith(".busbw"):
        ranks, size = item.settings.get("ranks"), item.settings.get("bytes")
        name = item.settings.get("gpu") or next((gpu.name for gpu in case.gpus if gpu.name), None)
        if isinstance(ranks, int) and isinstance(size, int):
            return profiles.expected_collective(str(name or ""), item.metric, gpus=ranks, size_bytes=size)
        return None
    if item.metric in _PEER:
        return _expected_peer(case, item, 1)
    if item.metric == "p2p_sum":
        return _expected_peer(case, item, 2)
    gpu = gpu_of(case, item.subject)
    if gpu is None or gpu.mig:  # a MIG instance has a share of the memory and of the copy engines
        return None
    if item.metric == "d2d":
        return profiles.expected_copy(gpu, "d2d")
    for metric in _PINNED:
        if item.metric == metric:
            expected = profiles.expected_copy(gpu, metric)  # type: ignore[arg-type]
            return None if expected is not None and expected.basis == "theory" and is_coherent(gpu) else expected
    return None  # pageable and staged copies depend on the CPU


def limit_for(case: Case, item: Measurement) -> tuple[float, str] | None:
    """What physics allows at most, with slack, and its name; None where the link was not read or does not matter."""
    gpu = gpu_of(case, item.subject)
    if gpu is None:
        return None
    if item.metric == "d2d":
        peak = profiles.memory_gb_s(gpu)
        if peak is None:
            return None
        # Each byte is read and written, and counted once.
        return peak / 2 * _MEMORY_SLACK, f"the memory can give ({peak:g} GB/s for reads and writes together)"
    limit = limit_gb_s(gpu)
    if item.metric not in _OVER_THE_LINK or limit is None:
        return None
    return limit * _LIMIT_SLACK, f"the link can carry ({limit:.1f} GB/s)"


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
    return like_lower_link(best, value)


def like_lower_link(best: tuple[int, int], value: float) -> str | None:
    """As like_link, for links below `best` (generation, width)."""
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


def gpu_of(case: Case, subject: str) -> Gpu | None:
    """The GPU of a subject such as gpu:2, or None."""
    return next((gpu for gpu in case.gpus if subject == f"gpu:{gpu.index}"), None)


def pair_of(case: Case, subject: str) -> tuple[Gpu, Gpu, Pair | None] | None:
    """The GPUs of a subject gpu:0-gpu:1 in the order of the copy, and what the Case knows of the pair."""
    names = re.fullmatch(r"(gpu:\d+)-(gpu:\d+)", subject)
    if names is None:
        return None
    a, b = gpu_of(case, names[1]), gpu_of(case, names[2])
    if a is None or b is None:
        return None
    known = next((pair for pair in case.pairs if {pair.a, pair.b} == {names[1], names[2]}), None)
    return a, b, known


def _expected_peer(case: Case, item: Measurement, ways: int) -> Expected | None:
    """`ways` is 2 for the sum of both directions, which a link carries independently."""
    found = pair_of(case, item.subject)
    if found is None or item.settings.get("path") == "staged":
        return None
    a, b, pair = found
    near = pair is not None and pair.path in ("PIX", "PXB", "PHB", "NODE")
    nvlinks = pair.nvlinks if pair else None
    if nvlinks is None and item.value / ways > _FASTEST_PCIE_GB_S:
        return _times(profiles.expected_board(a, item.value / ways), ways)
    return _times(profiles.expected_peer(a, b, nvlinks=nvlinks, near=near), ways)


def _times(expected: Expected | None, ways: int) -> Expected | None:
    if expected is None or ways == 1:
        return expected
    high = None if expected.high is None else expected.high * ways
    return dataclasses.replace(
        expected, low=expected.low * ways, high=high, source=f"{expected.source}; both directions summed"
    )


def _verdict(value: float, usual: float) -> Verdict:
    if value >= OK_SHARE * usual:
        return "ok"
    return "low" if value >= BAD_SHARE * usual else "bad"
