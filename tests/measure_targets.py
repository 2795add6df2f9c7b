"""Stand-ins for the probe that loads a GPU, run in real children by tests/test_measure.py."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def answer(payload: dict[str, Any], rate: float = 55.0, generation: int = 5) -> dict[str, Any]:
    return {
        "samples": [rate, rate + 0.1, rate - 0.1],
        "stopped": "stable",
        "bytes": payload["block_bytes"],
        "copies": 16,
        "cpus": payload["cpus"],
        "readings": {
            "generation": {"1": 1, str(generation): 30},
            "width": {"16": 31},
            "pstate": {"0": 31},
            "reasons": {"1": 20, "68": 11},
            "temperature_c": {"40": 10, "43": 21},
        },
        "notes": [],
    }


def healthy(payload: dict[str, Any]) -> dict[str, Any]:
    return answer(payload)


def slow(payload: dict[str, Any]) -> dict[str, Any]:
    return answer(payload, 26.2)


def faster_than_light(payload: dict[str, Any]) -> dict[str, Any]:
    return answer(payload, 90.0)


def killed_once(payload: dict[str, Any]) -> dict[str, Any]:
    if payload["direction"] == "d2h" and payload["pinned"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(payload)


def hangs(payload: dict[str, Any]) -> dict[str, Any]:
    if payload["direction"] == "d2h" and payload["pinned"]:
        time.sleep(600)
    return answer(payload)


def refused(payload: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")


def unusable(payload: dict[str, Any]) -> dict[str, Any]:
    return {"unusable": "torch 2.9.0 is built without CUDA"}
