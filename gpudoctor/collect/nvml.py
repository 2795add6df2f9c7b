"""NVML's facts, asked for in child processes (nvml_child.py): one hung or lost GPU costs only itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gpudoctor import child, codec
from gpudoctor.collect import nvml_start
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import GapReason, Gpu, P2PStatus, PathClass

Answer = dict[str, Any]
GapEntry = tuple[str, GapReason, str]  # field, reason, detail


@dataclass
class NvmlGpu:
    """What NVML said about one GPU: facts, affinity as it prints it, and gaps by field name."""

    gpu: Gpu
    cpus: tuple[int, ...] | None = None
    nodes: tuple[int, ...] | None = None
    system_max_generation: int | None = None  # of GPU and slot together
    gaps: list[GapEntry] = field(default_factory=list)


@dataclass
class NvmlPair:
    a: int
    b: int
    path: PathClass | None = None
    p2p: dict[str, P2PStatus] = field(default_factory=dict)
    gaps: list[GapEntry] = field(default_factory=list)


@dataclass
class NvmlFacts:
    """Everything NVML said. `failure` is why it said nothing at all."""

    driver: str | None = None
    nvml: str | None = None
    cuda: str | None = None
    count: int | None = None
    gpus: list[NvmlGpu] = field(default_factory=list)
    pairs: list[NvmlPair] = field(default_factory=list)
    gaps: list[GapEntry] = field(default_factory=list)
    failure: tuple[GapReason, str] | None = None


def ask(timeout_s: float) -> NvmlFacts:
    """NVML's facts. A GPU whose calls do not return in `timeout_s` is asked once more alone, then given up as lost."""
    asked = nvml_start.question(timeout_s)
    result, heard = asked.answer(), asked.heard
    system = next((message["system"] for message in heard if "system" in message), None)
    gpus = {message["gpu"]["index"]: message for message in heard if "gpu" in message}
    pairs = [pair for message in heard if "pairs" in message for pair in message["pairs"]]
    if result.status == "ok" and "failure" in result.value:
        reason, text = result.value["failure"]
        return NvmlFacts(failure=(reason, text))
    if system is None:
        return NvmlFacts(failure=("not probed", f"NVML: {result.error}"))
    if result.status != "ok":
        silent = [index for index in range(system["count"]) if index not in gpus]
        gpus.update(_ask_each(silent, timeout_s))
        if not pairs:
            pairs = _ask_pairs([index for index, answer in gpus.items() if not answer["gpu"]["lost"]], timeout_s)
    return NvmlFacts(
        driver=system["driver"],
        nvml=system["nvml"],
        cuda=system["cuda"],
        count=system["count"],
        gpus=[_gpu(gpus[index]) for index in sorted(gpus)],
        pairs=[
            NvmlPair(pair["a"], pair["b"], pair["path"], pair["p2p"], [_gap(gap) for gap in pair["gaps"]])
            for pair in pairs
        ],
        gaps=[_gap(gap) for gap in system["gaps"]],
    )


def _ask_each(indices: Sequence[int], timeout_s: float) -> dict[int, Answer]:
    """One child a GPU, side by side, so that several hung ones cost one deadline."""

    def one(index: int) -> Answer:
        result = child.run("gpudoctor.collect.nvml_child:query_one", {"index": index}, deadline_s=timeout_s)
        if result.status == "ok":
            return dict(result.value)
        reason = f"NVML: {result.error}"
        return {"gpu": {"index": index, "lost": True, "lost_reason": reason}, "gaps": [["", "not probed", reason]]}

    if not indices:
        return {}
    with ThreadPoolExecutor(max_workers=min(len(indices), 16)) as pool:
        return dict(zip(indices, pool.map(one, indices), strict=True))


def _ask_pairs(indices: Sequence[int], timeout_s: float) -> list[Answer]:
    result = child.run("gpudoctor.collect.nvml_child:query_pairs", {"indices": list(indices)}, deadline_s=timeout_s)
    return list(result.value) if result.status == "ok" else []


def _gpu(answer: Answer) -> NvmlGpu:
    try:
        gpu = codec.decode(json.dumps(answer["gpu"]), Gpu, what="the answer of NVML")
    except GpudoctorError as error:  # a driver or binding whose answer has another shape
        gpu = Gpu(index=answer["gpu"]["index"], lost=True, lost_reason=error.message)
        return NvmlGpu(gpu=gpu, gaps=[("", "not supported", error.message)])
    return NvmlGpu(
        gpu=gpu,
        cpus=None if answer.get("cpus") is None else tuple(answer["cpus"]),
        nodes=None if answer.get("nodes") is None else tuple(answer["nodes"]),
        system_max_generation=answer.get("system_max_generation"),
        gaps=[_gap(gap) for gap in answer["gaps"]],
    )


def _gap(raw: Sequence[Any]) -> GapEntry:
    return raw[0], raw[1], raw[2]
