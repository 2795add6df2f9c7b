"""Runs in the measuring child: what NVML says about one GPU while a copy keeps it busy."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpudoctor.estimate import pcie_generation

PERIOD_S = 0.05
_DEVICES = Path("/sys/bus/pci/devices")
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_READINGS = ("generation", "width", "pstate", "reasons", "temperature_c")
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
    """Counts readings in a thread between `with` and its end. A call that NVML refuses is simply not counted.

    `hops` are the bus addresses of the ports above the GPU: their links are read from /sys beside the GPU's own.
    """

    def __init__(self, bdf: str, hops: Sequence[str] = ()) -> None:
        self.counts: dict[str, collections.Counter[int]] = {
            name: collections.Counter()
            for name in (
                "generation",
                "width",
                "pstate",
                "reasons",
                "temperature_c",
                "sm_clock_mhz",
                "memory_clock_mhz",
            )
        }
        self.hops: dict[str, collections.Counter[str]] = {hop: collections.Counter() for hop in hops}
        self.errors: dict[str, list[int]] = {}  # error counter -> its value before and after
        self.problem: str | None = None
        self._bdf = bdf
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def __enter__(self) -> Self:
        self._note(aer_correctable(self._bdf, list(self.hops)))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._note(aer_correctable(self._bdf, list(self.hops)))

    def as_json(self) -> dict[str, Any]:
        """Counts by value, with the values as JSON keys."""
        return {
            **{name: {str(value): count for value, count in counter.items()} for name, counter in self.counts.items()},
            "hops": {hop: dict(counter) for hop, counter in self.hops.items()},
            "errors": {name: values for name, values in self.errors.items() if len(values) > 1},
        }

    def _note(self, counters: dict[str, int]) -> None:
        for name, value in counters.items():
            self.errors[name] = [*self.errors.get(name, [])[:1], value]

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
        extra: dict[str, Callable[[], int]] = {  # worth knowing, no reason to complain where they are refused
            "sm_clock": lambda: pynvml.nvmlDeviceGetClockInfo(device, _SM_CLOCK),
            "memory_clock": lambda: pynvml.nvmlDeviceGetClockInfo(device, _MEMORY_CLOCK),
            "processes": lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(device)),
        }

        def replays() -> dict[str, int]:
            with contextlib.suppress(pynvml.NVMLError):
                return {"pcie_replays": int(pynvml.nvmlDeviceGetPcieReplayCounter(device))}
            return {}

        self._note(replays())
        while not self._done.is_set():
            for name, call in calls.items():
                try:
                    self.counts[name][int(call())] += 1
                except pynvml.NVMLError as error:
                    self.problem = f"NVML: {error}"
            for name, call in extra.items():
                with contextlib.suppress(pynvml.NVMLError):
                    self.counts[name][int(call())] += 1
            for hop, counter in self.hops.items():
                if link := _link(hop):
                    counter[link] += 1
            self._done.wait(PERIOD_S)
        self._note(replays())


def _link(bdf: str) -> str | None:
    """Generation and width of the port at `bdf` now, as "5 16"; None where /sys does not tell."""
    folder = _DEVICES / bdf
    try:
        speed, width = ((folder / f"current_link_{name}").read_text() for name in ("speed", "width"))
    except OSError:
        return None
    generation = pcie_generation(speed)
    return f"{generation} {width.strip()}" if generation and width.strip().isdigit() else None


def aer_correctable(bdf: str, hops: Sequence[str]) -> dict[str, int]:
    """Corrected errors of the GPU's link and of each port above it since boot, where the kernel counts them."""
    found = {}
    for device in dict.fromkeys((bdf, *hops)):
        with contextlib.suppress(OSError, ValueError):
            for line in (_DEVICES / device / "aer_dev_correctable").read_text().splitlines():
                name, _, value = line.rpartition(" ")
                if name.strip() == "TOTAL_ERR_COR":
                    found[f"aer_correctable {device}"] = int(value)
    return found
