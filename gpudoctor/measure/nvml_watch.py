"""Runs in the measuring child: what NVML says about one GPU while a copy keeps it busy."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpudoctor.estimate import pcie_generation

PERIOD_S = 0.05
_DEVICES = Path("/sys/bus/pci/devices")
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_PROCESSES_EVERY = 4  # readings: listing processes takes the driver longer than everything else
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


def wake() -> None:
    """Start NVML in this process, so that the first window need not wait for it; what goes wrong is told there."""
    with contextlib.suppress(ImportError):
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()


class Window:
    """Counts of the readings taken during one run of copies, by value; filled by Watch."""

    def __init__(self, hops: Sequence[str]) -> None:
        self.counts: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        self.hops: dict[str, collections.Counter[str]] = {hop: collections.Counter() for hop in hops}
        self.errors: dict[str, list[int]] = {}  # error counter -> its value before and after
        self.problem: str | None = None

    def note(self, counters: dict[str, int]) -> None:
        """Values of error counters: the first one stays, the last one replaces those between."""
        for name, value in counters.items():
            self.errors[name] = [*self.errors.get(name, [])[:1], value]

    def add(self, reading: dict[str, int], links: dict[str, str]) -> None:
        for name, value in reading.items():
            self.counts[name][value] += 1
        for hop, link in links.items():
            self.hops[hop][link] += 1

    def as_json(self) -> dict[str, Any]:
        """Counts by value, with the values as JSON keys."""
        return {
            **{name: {str(value): count for value, count in counter.items()} for name, counter in self.counts.items()},
            "hops": {hop: dict(counter) for hop, counter in self.hops.items()},
            "errors": {name: values for name, values in self.errors.items() if len(values) > 1},
        }


class Watch:
    """Reads NVML in a thread of its own while a `window` is open. A call that NVML refuses is simply not counted.

    One a session: starting NVML takes long, so that it happens beside the start of CUDA, and nothing waits for it: a
    window that is over before NVML answers has no readings. `hops` are the bus addresses of the ports above the GPU:
    their links are read from /sys beside the GPU's own.
    """

    def __init__(self, bdf: str, hops: Sequence[str] = ()) -> None:
        self._bdf = bdf
        self._hops = tuple(hops)
        self._problem: str | None = None
        self._replays: int | None = None  # as read last
        self._open: Window | None = None
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    @contextlib.contextmanager
    def window(self) -> Iterator[Window]:
        """Readings are counted from here to the end of the `with`."""
        found = Window(self._hops)
        found.note(aer_correctable(self._bdf, self._hops))
        with self._lock:
            if self._replays is not None:
                found.note({"pcie_replays": self._replays})
            self._open = found
        self._wanted.set()
        try:
            yield found
        finally:
            self._wanted.clear()
            with self._lock:
                self._open = None
                found.problem = self._problem
            found.note(aer_correctable(self._bdf, self._hops))

    def _run(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            self._problem = str(error)
            return
        try:
            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByPciBusId(self._bdf.encode())
        except pynvml.NVMLError as error:
            self._problem = f"NVML: {error}"
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
            "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(device, _SM_CLOCK),
            "memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(device, _MEMORY_CLOCK),
            "pcie_replays": lambda: pynvml.nvmlDeviceGetPcieReplayCounter(device),
        }
        rare: dict[str, Callable[[], int]] = {
            "processes": lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(device)),
        }
        number = 0
        while True:
            self._wanted.wait()
            window = self._open
            reading: dict[str, int] = {}
            for name, call in {**calls, **extra, **(rare if number % _PROCESSES_EVERY == 0 else {})}.items():
                try:
                    reading[name] = int(call())
                except pynvml.NVMLError as error:
                    if name in calls:
                        self._problem = f"NVML: {error}"
            links = {hop: link for hop in self._hops if (link := _link(hop))}
            with self._lock:
                self._replays = reading.pop("pcie_replays", None)
                if window is not None and window is self._open:  # else it ended while this was read
                    if self._replays is not None:
                        window.note({"pcie_replays": self._replays})
                    window.add(reading, links)
                    number += 1
            time.sleep(PERIOD_S)


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
