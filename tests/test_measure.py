"""bench_copies around its probe: what is measured, judged, left alone, and what a failing probe costs."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import sys
from pathlib import Path

import pytest

from gpudoctor import child
from gpudoctor.errors import GpudoctorError
from gpudoctor.judge import is_coherent, judged, like_link, limit_gb_s
from gpudoctor.measure import BenchResult, bench_copies, conditions, copies, lock
from gpudoctor.measure.copies import binding, described
from gpudoctor.measure.engine import normal_bdf
from gpudoctor.measure.gpu_copies import MIB, fitting, plan
from gpudoctor.measure.nvml_watch import reason_names
from gpudoctor.measure.series import outliers, percentile, repeat
from gpudoctor.model import Case, Gap, Gpu, GpuProcess, Measurement, PcieHop, PcieLink

LINK = PcieLink(generation=1, width=16, max_generation=5, max_width=16, state="idle")
GPU = Gpu(index=0, name="NVIDIA H200", bdf="0000:3b:00.0", pcie=LINK, processes=())
SECOND = dataclasses.replace(GPU, index=1, bdf="0000:86:00.0")
LOADED = dataclasses.replace(GPU, pcie=dataclasses.replace(LINK, generation=5, state="load"))
METRICS = ["h2d", "d2h", "d2d", "h2d_pageable", "d2h_pageable"]


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.tempfile, "gettempdir", lambda: str(tmp_path))
    # The machine that runs the tests may be busy with others.
    quiet = conditions.Reading(at=0.0, cpu_s=None, own_s=0.0, swapped_pages=None)
    monkeypatch.setattr(conditions, "read", lambda _children=(): quiet)


def bench(monkeypatch: pytest.MonkeyPatch, target: str, case: Case, **options: object) -> BenchResult:
    """Only copies of single GPUs: what needs several is tested in test_measure_groups.py."""
    monkeypatch.setattr(copies, "TARGET", f"measure_targets:{target}")
    return bench_copies(case, **{"only": METRICS, **options})  # type: ignore[arg-type]


def rates(result: BenchResult) -> list[Measurement]:
    return [one for one in result.measurements if one.unit == "GB/s"]


def measurement(gpu: Gpu, metric: str, samples: list[float]) -> Measurement:
    return judged(Case(gpus=(gpu,)), described(metric, f"gpu:{gpu.index}", samples, {}))


def test_readings_under_load_are_merged_and_judge_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(gpus=(GPU,), gaps=(Gap(path="gpus[0000:3b:00.0].throttle_reasons", reason="not probed"),))
    seen: list[tuple[int, int, str]] = []
    result = bench(monkeypatch, "healthy", case, on_progress=lambda *step: seen.append(step))
    assert [one.metric for one in rates(result)] == METRICS
    assert result.errors == ()
    assert not result.interrupted
    (gpu,) = result.case.gpus
    assert gpu.pcie == dataclasses.replace(LINK, generation=5, state="load")
    assert (gpu.throttle_state, gpu.throttle_reasons) == ("load", ("sw_power_cap", "hw_thermal_slowdown"))
    assert (gpu.pstate, gpu.temperature_c) == (0, 43)
    assert result.case.gaps == ()
    assert {source.path for source in result.case.sources} >= {"gpus[0000:3b:00.0].pcie.generation"}
    assert "changed during the copies: Gen1, Gen5" in result.notes[0]
    first = result.measurements[0]
    assert (first.subject, first.unit, first.value, first.samples, first.verdict) == ("gpu:0", "GB/s", 55.4, 9, "ok")
    assert first.spread == pytest.approx((55.3, 55.5))
    assert first.expected is not None
    assert first.settings["link"] == "Gen5 x16"
    assert first.settings["binding"] == "none: locality unknown"
    assert result.measurements[2].verdict == "ok"  # d2d against the figure of the model
    assert result.measurements[3].expected is None  # pageable: no published figure fits every host
    assert (seen[0], seen[-1]) == ((0, 5, "gpu:0 h2d"), (5, 5, ""))


def test_ports_above_and_error_counters_are_read_during_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    port = PcieHop(bdf="0000:3a:00.0", kind="root-port", link=PcieLink(generation=1, width=16, state="idle"))
    endpoint = PcieHop(bdf="0000:3b:00.0", kind="endpoint", link=LINK)
    result = bench(monkeypatch, "healthy", Case(gpus=(dataclasses.replace(GPU, pcie_path=(endpoint, port)),)))
    hop = result.case.gpus[0].pcie_path[1]
    assert hop.link == PcieLink(generation=4, width=16, state="load")
    counts = {(one.metric, one.settings.get("device")): one.value for one in result.measurements if one.unit == "count"}
    assert counts == {("pcie_replays", None): 0.0, ("aer_correctable", "0000:3b:00.0"): 33.0}  # 3 in each round


def test_what_is_measured_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench(monkeypatch, "healthy", Case(gpus=(GPU,)), only=None, level="quick")
    assert [one.metric for one in result.measurements if one.unit != "count"] == [
        *("h2d", "d2h", "h2d_while_d2h", "d2h_while_h2d", "d2d", "h2d_latency", "d2h_latency")
    ]
    with pytest.raises(GpudoctorError, match="no copy 'h2h'"):
        bench_copies(Case(gpus=(GPU,)), only=["h2h"])


def test_a_busy_host_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(
        (
            conditions.Reading(at=0.0, cpu_s=100.0, own_s=5.0, swapped_pages=3),
            conditions.Reading(at=10.0, cpu_s=100.0 + 9.0 * (os.cpu_count() or 1), own_s=5.0, swapped_pages=3),
        )
    )
    monkeypatch.setattr(conditions, "read", lambda _children=(): next(readings))
    result = bench(monkeypatch, "slow", Case(gpus=(GPU,)))
    assert result.measurements[0].verdict == "no verdict"
    assert any("other processes used 90%" in note for note in result.notes)


def test_a_process_that_came_meanwhile_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench(monkeypatch, "slow_beside_another_process", Case(gpus=(GPU,)))
    assert result.measurements[0].verdict == "no verdict"
    assert any("another process came onto this GPU" in note for note in result.notes)
    known = dataclasses.replace(GPU, processes=(GpuProcess(pid=4242),))  # allowed, and there from the beginning
    result = bench(monkeypatch, "slow_beside_another_process", Case(gpus=(known,)), allow_busy=True)
    assert result.measurements[0].verdict == "bad"


def test_conditions() -> None:
    quiet = conditions.Reading(at=0.0, cpu_s=100.0, own_s=1.0, swapped_pages=10)
    ours = conditions.Reading(at=10.0, cpu_s=120.0, own_s=20.0, swapped_pages=10)  # the work was our own
    assert conditions.judge(quiet, ours, cpus=2) == ((), False)
    swapping = dataclasses.replace(ours, swapped_pages=500)
    notes, busy = conditions.judge(quiet, swapping, cpus=2)
    assert busy
    assert "490 pages" in notes[0]
    unknown = conditions.Reading(at=0.0, cpu_s=None, own_s=0.0, swapped_pages=None)
    assert conditions.judge(unknown, unknown, cpus=2) == ((), False)
    assert (conditions._cpu_s() or 1) > 0
    assert (conditions._swapped() or 0) >= 0
    assert conditions._process_s(os.getpid()) > 0
    assert conditions._process_s(2**22 + 1) == 0.0  # above every pid


def test_slow_and_impossible_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = bench(monkeypatch, "slow", Case(gpus=(GPU,))).measurements[0]
    assert slow.verdict == "bad"
    assert "about what a Gen5 x8 or Gen4 x16 link gives" in slow.notes
    impossible = bench(monkeypatch, "faster_than_light", Case(gpus=(GPU,)))
    assert {one.verdict for one in rates(impossible)} == {"rejected"}


def test_probe_killed_by_sigkill_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench(monkeypatch, "killed_once", Case(gpus=(GPU, SECOND)))
    assert [one.metric for one in rates(result)] == [m for m in METRICS if m != "d2h"] * 2
    assert [error.split(" ")[:2] for error in result.errors] == [["gpu:0", "d2h:"], ["gpu:1", "d2h:"]]
    assert "SIGKILL" in result.errors[0]


def test_probe_that_hangs_costs_the_time_of_its_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench(monkeypatch, "hangs", Case(gpus=(GPU,)), deadline_s=10.0)
    assert [one.metric for one in rates(result)] == ["h2d"]
    assert "no answer within" in result.errors[0]
    assert all("no time left" in error for error in result.errors[1:])


def test_refusal_is_said_once_a_gpu_and_no_cuda_once_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench(monkeypatch, "refused", Case(gpus=(GPU, SECOND)))
    assert [error.split(":")[1].split(" ")[0] for error in result.errors] == ["0", "1"]
    assert "busy or unavailable" in result.errors[0]
    result = bench(monkeypatch, "unusable", Case(gpus=(GPU, SECOND)))
    assert result.errors == ("copies cannot be measured: torch 2.9.0 is built without CUDA",)
    assert result.measurements == ()
    assert result.case.gpus == (GPU, SECOND)


def test_the_real_probe_without_a_gpu_says_why() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    result = bench_copies(Case(gpus=(GPU,)))
    (error,) = result.errors
    assert "CUDA" in error
    assert "torch" not in sys.modules or "Traceback" not in error


def test_no_gpu_is_a_note() -> None:
    result = bench_copies(Case())
    assert (result.measurements, result.errors) == ((), ())
    assert "no GPU" in result.notes[0]


def test_gpus_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = dataclasses.replace(GPU, processes=(GpuProcess(pid=4242),))
    hidden = dataclasses.replace(SECOND, utilization_pct=87)
    lost = Gpu(index=2, bdf="0000:af:00.0", lost=True, lost_reason="GPU is lost")
    nameless = Gpu(index=3)
    closed = Gpu(index=4, bdf="0000:b0:00.0", compute_mode="prohibited")
    case = Case(gpus=(busy, hidden, lost, nameless, closed))
    result = bench(monkeypatch, "healthy", case)
    assert result.measurements == ()
    for note, words in zip(result.notes, ("4242", "87 %", "GPU is lost", "bus address", "prohibited"), strict=True):
        assert words in note
    result = bench(monkeypatch, "healthy", case, allow_busy=True, indices=[1, 0, 1])
    assert [one.subject for one in rates(result)] == ["gpu:1"] * 5 + ["gpu:0"] * 5


def test_unknown_index_is_refused() -> None:
    with pytest.raises(GpudoctorError, match="no GPU 7") as caught:
        bench_copies(Case(gpus=(GPU,)), indices=[7])
    assert caught.value.hint is not None
    assert "0" in caught.value.hint


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    call = child.Server.call

    def interrupted(self: child.Server, target: str, payload: dict[str, object], **options: object) -> object:
        if payload["kind"] == "h2d_pageable":
            raise KeyboardInterrupt
        return call(self, target, payload, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(child.Server, "call", interrupted)
    result = bench(monkeypatch, "healthy", Case(gpus=(GPU, SECOND)))
    assert result.interrupted
    assert [one.metric for one in rates(result)] == ["h2d", "d2h", "d2d"]
    assert result.case.gpus[0].pcie != GPU.pcie


def test_second_gpudoctor_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / lock.NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(GpudoctorError, match="another gpudoctor"):
            bench_copies(Case(gpus=(GPU,)))
    assert bench(monkeypatch, "healthy", Case(gpus=(GPU,))).measurements


def test_lock_that_cannot_be_made_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / lock.NAME).symlink_to(tmp_path / "elsewhere")
    result = bench(monkeypatch, "healthy", Case(gpus=(GPU,)))
    assert "no lock" in result.notes[0]
    assert len(rates(result)) == 5
    assert not (tmp_path / "elsewhere").exists()


def test_binding_only_where_the_place_is_sure() -> None:
    near = dataclasses.replace(GPU, numa_node=1, local_cpus=(8, 9, 10))
    assert binding(near, None) == ([8, 9, 10], "node 1")
    assert binding(near, (0, 9)) == ([9], "node 1")
    assert binding(near, (0, 1)) == ([], "none: no CPU of node 1 may be used")
    assert binding(dataclasses.replace(near, numa_node=None), None)[0] == []
    assert binding(dataclasses.replace(near, local_cpus=()), None)[0] == []


def test_noise_gives_no_verdict_and_outliers_are_said() -> None:
    noisy = measurement(LOADED, "h2d", [30.0, 40.0, 44.0, 55.0, 55.2])
    assert noisy.verdict == "no verdict"
    one_off = measurement(LOADED, "h2d", [55.3, 55.4, 55.35, 55.3, 55.4, 31.2])
    assert one_off.verdict == "ok"
    assert "1 of 6 samples" in one_off.notes[0]
    assert measurement(LOADED, "d2h", [50.0] * 5).verdict == "low"


def test_limits_of_links() -> None:
    assert limit_gb_s(GPU) is None  # an idle reading limits nothing
    assert limit_gb_s(LOADED) == pytest.approx(63.0, abs=0.1)
    grace = dataclasses.replace(LOADED, name="NVIDIA GH200 480GB")
    assert is_coherent(grace)
    assert limit_gb_s(grace) == 450.0
    assert measurement(grace, "h2d", [370.0] * 5).verdict != "rejected"
    assert like_link(LOADED, 55.0) is None or "Gen5 x16" not in str(like_link(LOADED, 55.0))
    assert like_link(LOADED, 6.5) is not None
    assert like_link(GPU, 1000.0) is None


def test_repeat_ends_when_stable_or_late() -> None:
    assert repeat(lambda: 5.0, seconds=1000.0).stopped == "stable"
    values = iter(range(1, 1000))
    ticks = iter(range(1000))
    series = repeat(lambda: float(next(values)), seconds=20.0, clock=lambda: float(next(ticks)))
    assert series.stopped == "time"
    assert len(series.samples) == 22
    assert len(repeat(lambda: 1.0, seconds=0.0).samples) == 3


def test_percentile_and_outliers() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.9) == pytest.approx(1.9)
    assert percentile([7.0], 0.1) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
    assert outliers([10.0, 10.01, 9.99, 10.0, 6.0]) == (6.0,)
    assert outliers([10.0, 10.0, 10.0, 10.1]) == ()  # far by spread, too near to matter


def test_plan_fits_slow_links_into_the_time() -> None:
    assert plan(256 * MIB / 26e9, 256 * MIB, 0.22, pinned=True) == (16, 256 * MIB)  # Gen4 x16
    assert plan(256 * MIB / 55e9, 256 * MIB, 0.22, pinned=True) == (16, 256 * MIB)
    count, size = plan(256 * MIB / 0.2e9, 256 * MIB, 0.22, pinned=True)  # Gen1 x1
    assert (count, size) == (4, 16 * MIB)
    count, size = plan(256 * MIB / 10e9, 256 * MIB, 0.1, pinned=False)
    assert (count, size) == (4, 256 * MIB)  # pageable blocks stay larger than the caches


def test_small_words() -> None:
    assert reason_names(0x001 | 0x004 | 0x040) == ("sw_power_cap", "hw_thermal_slowdown")
    assert normal_bdf("00000000:3B:00.0") == "0000:3b:00.0"


def test_little_memory_takes_smaller_blocks() -> None:
    assert fitting(256 * MIB, [64 << 30, 20 << 30]) == 256 * MIB
    assert fitting(256 * MIB, [64 << 30, 1 << 30]) == 128 * MIB
    assert fitting(256 * MIB, [1 << 20]) == 16 * MIB
    assert fitting(256 * MIB, []) == 256 * MIB


def test_parent_never_imports_torch() -> None:
    code = (
        "import sys; from gpudoctor.measure import bench_copies; from gpudoctor.model import Case, Gpu;"
        "r = bench_copies(Case(gpus=(Gpu(index=0, bdf='0000:3b:00.0'),)));"
        "sys.exit(1 if {'torch', 'pynvml'} & set(sys.modules) else 0)"
    )
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
