"""Runs in the measuring child: what NVML says about one GPU while a copy keeps it busy."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

PERIOD_S = 0.05
_GRAPHICS_IDLE = "gpu_idle"
# NVML's clock event reasons (nvml.h) in snake case.
_REASONS = {
    0x001: _GRAPHICS_IDLE,
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}


def reason_names(bits: int) -> tuple[str, ...]:
    """The clock event reasons in a bit mask, without "gpu_idle": copies leave the cores idle."""
    return tuple(name for bit, name in _REASONS.items() if bits & bit and name != _GRAPHICS_IDLE)


class Watch:
    """Counts readings in a thread between `with` and its end. A call that NVML refuses is simply not counted."""

    def __init__(self, bdf: str) -> None:
        self.counts: dict[str, collections.Counter[int]] = {
            name: collections.Counter() for name in ("generation", "width", "pstate", "reasons", "temperature_c")
        }
        self.problem: str | None = None
        self._bdf = bdf
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def as_json(self) -> dict[str, Any]:
        """Counts by value, with the values as JSON keys."""
        return {name: {str(value): count for value, count in counter.items()} for name, counter in self.counts.items()}

    def _run(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            self.problem = str(error)
            return
        try:
            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByPciBusId(self._bdf.encode())
        except pynvml.NVMLError as error:
            self.problem = f"NVML: {error}"
            return
        reasons = getattr(
            pynvml, "nvmlDeviceGetCurrentClocksEventReasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons
        )
        calls: dict[str, Callable[[], int]] = {
            "generation": lambda: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(device),
            "width": lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(device),
            "pstate": lambda: pynvml.nvmlDeviceGetPerformanceState(device),
            "reasons": lambda: reasons(device),
            "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU),
        }
        while not self._done.is_set():
            for name, call in calls.items():
                try:
                    self.counts[name][int(call())] += 1
                except pynvml.NVMLError as error:
                    self.problem = f"NVML: {error}"
            self._done.wait(PERIOD_S)
