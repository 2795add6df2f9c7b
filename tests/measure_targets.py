"""Stand-ins for the probes that load GPUs, run in real children by tests/test_measure*.py."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

UPLINKS = {"0000:01:00.0": 0, "0000:02:00.0": 0, "0000:03:00.0": 1, "0000:04:00.0": 2}  # GPUs by switch


def answer(payload: dict[str, Any], rate: float = 55.0, generation: int = 5) -> dict[str, Any]:
    return {
        "samples": [rate, rate + 0.1, rate - 0.1],
        "stopped": "stable",
        "bytes": payload["block_bytes"],
        "copies": 16,
        "cpus": payload["cpus"],
        "engine": "stand-in",
        "problem": None,
        "placed": None,
        "readings": {
            "generation": {"1": 1, str(generation): 30},
            "width": {"16": 31},
            "pstate": {"0": 31},
            "reasons": {"1": 20, "68": 11},
            "temperature_c": {"40": 10, "43": 21},
            "hops": {hop: {"4 16": 9, "1 16": 2} for hop in payload["hops"]},
            "errors": {"pcie_replays": [7, 7], "aer_correctable 0000:3b:00.0": [1, 4]},
        },
        "notes": [],
    }


def healthy(payload: dict[str, Any]) -> dict[str, Any]:
    return answer(payload, 2092.0 if payload["kind"] == "d2d" else 51.0 if "while" in payload["kind"] else 55.4)


def slow(payload: dict[str, Any]) -> dict[str, Any]:
    return answer(payload, 26.2)


def faster_than_light(payload: dict[str, Any]) -> dict[str, Any]:
    return answer(payload, 90.0 if payload["kind"] != "d2d" else 3000.0)


def killed_once(payload: dict[str, Any]) -> dict[str, Any]:
    if payload["kind"] == "d2h":
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(payload)


def hangs(payload: dict[str, Any]) -> dict[str, Any]:
    if payload["kind"] == "d2h":
        time.sleep(600)
    return answer(payload)


def refused(payload: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")


def unusable(payload: dict[str, Any]) -> dict[str, Any]:
    return {"unusable": "torch 2.9.0 is built without CUDA"}


def slow_beside_another_process(payload: dict[str, Any]) -> dict[str, Any]:
    told = answer(payload, 26.2)
    told["readings"]["processes"] = {"1": 20, "2": 11}
    return told


def far_memory_is_slow(payload: dict[str, Any]) -> dict[str, Any]:
    share = 1.0 if payload["node"] in (None, 0) else 0.5
    placed = None if payload["node"] is None else {"share": 1.0, "reason": None}
    return answer(payload, 25.0 * share) | {"placed": placed}


def ready(payload: dict[str, Any]) -> dict[str, Any]:
    return {"engine": "stand-in", "cpus": [], "notes": []}


def steady_window(payload: dict[str, Any]) -> dict[str, Any]:
    """Half a second of chunks at 12 GB/s, with a start that is late by a tenth for every bus number."""
    late = int(payload["bdf"][5:7], 16) / 100
    size = 32 << 20
    step = size / 12e9
    begin = payload["start_at"] + late
    return {"times": [begin + step * (number + 1) for number in range(int(0.5 / step))], "bytes": size}
