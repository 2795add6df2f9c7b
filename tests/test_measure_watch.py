"""What is read of the GPU while it copies, and the child that starts CUDA early."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpudoctor.measure import early, nvml_watch
from gpudoctor.measure.gpu_copies import _warmed_up
from gpudoctor.measure.nvml_watch import Watch, Window


class NVMLError(Exception):
    pass


def nvml(**answers: Any) -> SimpleNamespace:
    """A pynvml that answers with numbers; an answer that is an exception is raised."""

    def call(name: str) -> Any:
        def ask(*_arguments: Any) -> Any:
            value = answers.get(name, usual[name])
            if isinstance(value, Exception):
                raise value
            return next(value) if hasattr(value, "__next__") else value

        return ask

    usual: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByPciBusId": "handle",
        "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetPerformanceState": 0,
        "nvmlDeviceGetCurrentClocksEventReasons": 4,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
        "nvmlDeviceGetTemperature": 41,
        "nvmlDeviceGetClockInfo": 1980,
        "nvmlDeviceGetPcieReplayCounter": 7,
        "nvmlDeviceGetComputeRunningProcesses": ["ours"],
    }
    return SimpleNamespace(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, **{name: call(name) for name in usual})


def watched(monkeypatch: pytest.MonkeyPatch, module: Any, *, readings: int = 6) -> Window:
    """A window that was open until it had this many readings, or a problem."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(nvml_watch, "PERIOD_S", 0.001)
    watch = Watch("0000:3b:00.0")
    end = time.monotonic() + 30
    with watch.window() as seen:
        while sum(seen.counts["width"].values()) < readings and not watch._problem and time.monotonic() < end:
            time.sleep(0.002)
    return seen


def test_readings_go_on_during_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch, nvml())
    counts = seen.as_json()
    assert seen.problem is None
    assert counts["generation"]["5"] >= 6
    assert set(counts["sm_clock_mhz"]) == {"1980"}
    assert set(counts["temperature_c"]) == {"41"}
    assert set(counts["processes"]) == {"1"}
    assert counts["errors"]["pcie_replays"] == [7, 7]


def test_growth_of_an_error_counter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(3, 1000))
    first, last = watched(monkeypatch, nvml(nvmlDeviceGetPcieReplayCounter=numbers)).errors["pcie_replays"]
    assert first == 3
    assert last >= 8


def test_what_nvml_refuses_costs_that_reading_only(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = {
        name: NVMLError("Not Supported") for name in ("nvmlDeviceGetPcieReplayCounter", "nvmlDeviceGetClockInfo")
    }
    counts = watched(monkeypatch, nvml(**refusals)).as_json()
    assert counts["width"]["16"] >= 6
    assert "sm_clock_mhz" not in counts
    assert counts["errors"] == {}


def test_no_driver_is_a_problem_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch, nvml(nvmlInit=NVMLError("Driver Not Loaded")))
    assert seen.problem == "NVML: Driver Not Loaded"
    assert not any(seen.counts.values())


def test_copies_of_a_link_that_wakes_count_for_nothing() -> None:
    now = [0.0]
    times = iter([0.09, 0.08, 0.03, 0.01, 0.01, 0.01, 0.01])

    def one(_count: int) -> float:
        took = next(times)
        now[0] += took
        return took

    assert _warmed_up(one, 0.0, lambda: now[0]) == 0.01
    assert now[0] == pytest.approx(0.09 + 0.08 + 0.03 + 0.01 * 3)  # the last three agree


def test_a_link_that_never_settles_is_measured_all_the_same() -> None:
    now = [0.0]
    times = iter([0.05, 0.04] * 100)

    def one(_count: int) -> float:
        took = next(times)
        now[0] += took
        return took

    assert _warmed_up(one, 0.1, lambda: now[0]) == 0.04
    assert 0.4 <= now[0] < 0.5


def test_the_child_that_was_begun_serves_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "fake_cuda"))
    early.begin(["bench-pcie", "--engine", "cuda", "--json"])
    server = early.server("cuda")
    pid = server.pid
    assert pid is not None
    answer = server.call(early.TARGET, {"engine": "cuda"}, deadline_s=60)
    assert answer.value == {"engine": "cuda-bindings, CUDA 13.0"}
    assert answer.pid == pid
    server.close()
    assert early.server("cuda").pid is None  # the next one starts with its first call


def test_a_child_of_another_engine_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "fake_cuda"))
    early.begin(["bench-pcie", "--engine=cuda"])
    assert early.server(None).pid is None
    early.begin(["bench-pcie", "--engine=opencl"])  # a usage error that is told elsewhere
    early.discard()
    assert early.server(None).pid is None
