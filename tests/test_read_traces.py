"""Traces: HolisticTraceAnalysis's figures, the loader told apart, ranks by pace, waits by origin, bounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import trace_support as support

from gpudoctor import codec, rules
from gpudoctor.checkup import examine
from gpudoctor.model import Case, TraceFacts
from gpudoctor.read import breakdown, read_artifacts
from gpudoctor.read.intervals import Union, join, union
from gpudoctor.read.kineto import read_kineto
from gpudoctor.read.recording import COMMUNICATION, COMPUTE, COPY, MEMSET, SYNC, Recording
from gpudoctor.read.trace_steps import find_steps
from gpudoctor.read.traces import read_traces, trace_case

# Printed by HolisticTraceAnalysis 0.5.0 for the full files: idle, compute, other, overlap in percent; by rank for dlrm.
HTA_DLRM = (
    (49.34, 7.95, 42.71, 4.50),
    (34.28, 6.65, 59.07, 2.47),
    (62.08, 9.41, 28.51, 7.88),
    (43.20, 6.58, 50.22, 3.31),
    (53.57, 6.79, 39.64, 0.56),
    (55.64, 6.35, 38.01, 0.64),
    (61.80, 9.21, 28.99, 7.56),
    (75.75, 9.66, 14.59, 9.51),
)
HTA = {"alexnet": (99.49, 0.08, 0.43, None), "sampled_rank0": (53.56, 17.71, 28.74, 11.81)}
# Here HTA's definition differs: it rounds activities inwards to microseconds, and takes cuda_sync records for work.
HTA_OTHERWISE = {"ns_resolution": (2.63, 96.75, 0.62), "event_sync": (78.71, 18.63, 2.66)}
HTA_STREAMS = {
    "dlrm_rank0": {7: (11.448, 0.123, 0.0), 24: (5.906, 0.018, 0.0), 84: (4.740, 0.003, 0.0), 22: (0.145, 0.0, 0.0)},
    "sampled_rank0": {7: (213.825, 1.985, 261.740), 23: (596.037, 0.070, 0.034), 25: (0.0, 0.009, 47.865)},
}
HTA_KERNEL_SHARES = {"COMMUNICATION": 83.8, "COMPUTATION": 12.9, "both": 3.0, "MEMORY": 0.3}  # all ranks of dlrm


def figures(facts: TraceFacts) -> tuple[float | None, ...]:
    return facts.idle_pct, facts.compute_pct, facts.other_pct, facts.overlap_pct


@pytest.mark.parametrize("rank", range(8))
def test_dlrm_has_the_figures_of_hta(rank: int) -> None:
    assert figures(support.facts(support.DLRM[rank])) == pytest.approx(HTA_DLRM[rank], abs=0.01)


@pytest.mark.parametrize("name", HTA)
def test_shares_are_those_of_hta(name: str) -> None:
    assert figures(support.recorded(name)) == pytest.approx(HTA[name], abs=0.01)


@pytest.mark.parametrize("name", HTA_STREAMS)
def test_idle_time_of_each_stream_is_that_of_hta(name: str) -> None:
    streams = {item.stream: item for item in support.recorded(name).streams}
    for stream, expected in HTA_STREAMS[name].items():
        item = streams[stream]
        assert (item.host_wait_ms, item.kernel_wait_ms, item.other_ms) == pytest.approx(expected, abs=0.0011)


def with_habits_of_hta(recording: Recording) -> Recording:
    """Activities rounded inwards to whole microseconds, and a stream's synchronisation records taken for work.

    An end is a sum of 64-bit floats there, which are a quarter of a microsecond apart at today's times.
    """
    import numpy as np

    columns = {
        name: recording.activities.ints(name).copy()
        for name in ("start", "end", "correlation", "bytes", "stream", "device", "name", "kind")
    }
    columns["start"] = -(-columns["start"] // 1000) * 1000
    columns["end"] = np.rint(columns["end"] / 250).astype(np.int64) * 250 // 1000 * 1000
    columns["kind"][(columns["kind"] == SYNC) & (columns["stream"] >= 0)] = MEMSET
    changed = Recording(launches=recording.launches)
    changed.activities.add(**columns)
    return changed


@pytest.mark.parametrize("name", HTA_OTHERWISE)
def test_each_difference_to_hta_is_one_of_definition(name: str) -> None:
    recording = read_kineto(support.FOLDER / f"{name}.json.gz", name=name)
    work = breakdown.device_work(with_habits_of_hta(recording), find_steps(recording).window_before)
    assert work is not None
    start, end = work.window
    busy, computing = work.of(COMPUTE, COMMUNICATION, COPY, MEMSET).total(), work.of(COMPUTE).total()
    shares = [100 * part / (end - start) for part in (end - start - busy, computing, busy - computing)]
    assert shares == pytest.approx(HTA_OTHERWISE[name], abs=0.01)
    ours = support.recorded(name)
    assert ours.idle_pct is not None
    assert abs(ours.idle_pct - HTA_OTHERWISE[name][0]) > 0.5


def test_kinds_of_kernels_over_all_ranks_are_those_of_hta() -> None:
    sums = dict.fromkeys(HTA_KERNEL_SHARES, 0)
    for path in support.DLRM:
        work = breakdown.device_work(read_kineto(path, name=path.name), None)
        assert work is not None
        compute, communication, copy = work.of(COMPUTE), work.of(COMMUNICATION), work.of(COPY, MEMSET)
        sums["both"] += compute.overlap(communication)
        sums["COMMUNICATION"] += communication.without(join(compute, copy))
        sums["COMPUTATION"] += compute.without(join(communication, copy))
        sums["MEMORY"] += copy.without(join(communication, compute))
    for kind, share in HTA_KERNEL_SHARES.items():
        assert 100 * sums[kind] / sum(sums.values()) == pytest.approx(share, abs=0.06), kind


def test_workers_are_told_apart() -> None:
    without, with_four = support.recorded("resnet50_workers0"), support.recorded("resnet50_workers4")
    assert without.bound == "loader"
    assert with_four.bound == "device"
    assert without.loader is not None
    assert without.loader.workers is False
    assert with_four.loader is not None
    assert with_four.loader.workers is True
    assert [round(step.loader_wait_ms or 0) for step in without.steps] == [69, 69, 73]
    assert max(step.loader_wait_ms or 0 for step in with_four.steps) < 5
    assert without.idle is not None
    assert without.idle.loader_ms > 0.5 * without.idle_pct * without.window_ms / 100  # type: ignore[operator]
    codes = {
        name: {finding.rule for finding in rules.run_rules(Case(traces=(facts,))).findings}
        for name, facts in (("0", without), ("4", with_four))
    }
    assert "LDR020" in codes["4"]
    assert "LDR021" not in codes["4"]
    assert "LDR020" not in codes["0"]


def test_a_healthy_trace_gives_no_finding() -> None:
    (case,) = read_artifacts([str(support.FOLDER / "ns_resolution.json.gz")]).cases
    envelope = examine(case, command="read")
    assert (envelope.status, envelope.findings, envelope.exit_code) == ("clean", (), 0)
    assert case.traces[0].bound == "device"
    assert {item.metric for item in envelope.measurements} >= {"trace.idle_pct", "trace.compute_pct", "trace.other_pct"}


def test_slow_and_fast_ranks_are_named() -> None:
    (job,) = read_traces(support.DLRM).jobs
    assert [facts.rank for facts in job] == list(range(8))
    paces = {pace: [facts.rank for facts in job if facts.pace == pace] for pace in ("slow", "fast")}
    assert paces == {"slow": [2, 6, 7], "fast": [1, 3]}
    assert job[7].waits_for_peers_ms == 0
    assert job[1].waits_for_peers_ms == pytest.approx(9.59, abs=0.05)
    finding = next(found for found in rules.run_rules(trace_case(job)).findings if found.rule == "BND013")
    assert finding.subject == "rank:7"
    assert "ranks 2, 6" in finding.message
    assert "ranks 1, 3" in finding.message


def test_a_missing_rank_is_told() -> None:
    (job,) = read_traces([support.DLRM[0], support.DLRM[7]]).jobs
    assert all("2 of 8 ranks: one that the others wait for may be missing" in facts.notes for facts in job)


def test_waits_lead_to_the_line_of_the_user() -> None:
    facts = support.recorded("resnet50_workers4")
    wait = facts.waits[0]
    assert (wait.site, wait.call, wait.copy) == ("resnet50_profiler_api.py:44", "cudaMemcpyAsync", "h2d")
    assert (wait.origin, wait.inner) == ("aten::to", "aten::copy_")
    assert wait.calls_per_step == 2


def test_invented_steps_to_the_microsecond(tmp_path: Path) -> None:
    """10 ms a step: 2 loader, 1 copy, 4 of kernels, 1 of communication of which half is hidden."""
    facts = support.facts(support.write(tmp_path / "trace.json", support.events()))
    assert facts.whole_steps == 3  # the last may be cut off
    assert figures(facts) == pytest.approx((37.5, 45.455, 17.045, 50.0), abs=0.001)
    step = facts.steps[1]
    assert (step.wall_ms, step.loader_wait_ms, step.sync_wait_ms) == (10, 2, 5.5)
    assert (step.compute_ms, step.communication_ms, step.copy_ms, step.idle_ms) == (4, 0.5, 1, 4.5)
    assert facts.idle is not None
    parts = [getattr(facts.idle, name) for name in ("loader_ms", "sync_ms", "host_ms", "launch_ms", "kernel_ms")]
    assert parts == pytest.approx([4.0, 3.5, 0.0, 2.4, 0.0])
    assert sum(parts) == pytest.approx((facts.idle_pct or 0) * (facts.window_ms or 0) / 100)
    assert (facts.copies[0].gb_s, facts.copies[0].with_compute) == (10.0, 3)
    assert (facts.waits[0].origin, facts.waits[0].inner) == ("aten::item", "aten::_local_scalar_dense")
    assert facts.waits[0].idle_after_ms == pytest.approx(3.2)
    assert facts.timeline is not None
    lanes = {lane.name: sum(lane.occupied) / len(lane.occupied) for lane in facts.timeline.lanes}
    assert lanes == pytest.approx(
        {"loader": 0.2, "operators": 0.62, "waits": 0.55, "compute": 0.4, "communication": 0.1, "copy": 0.1}, abs=0.01
    )


def test_what_bounds_the_step() -> None:
    bounds = {name: support.recorded(name).bound for name in ("alexnet", "sampled_rank0", "dlrm_rank1", "dlrm_rank7")}
    assert bounds == {
        "alexnet": "host",
        "sampled_rank0": "host",
        "dlrm_rank1": "communication",
        "dlrm_rank7": "host",
    }


def test_facts_survive_the_case_file(tmp_path: Path) -> None:
    result = read_artifacts([str(path) for path in support.DLRM])
    (case,) = result.cases
    assert codec.decode(codec.encode(case), Case) == case
    assert all(math.isfinite(item.value) for item in case.measurements)
    assert {item.subject for item in case.measurements} == {f"rank:{rank}" for rank in range(8)}
    path = tmp_path / "case.json"
    path.write_text(codec.encode(case))
    assert read_artifacts([str(path)]).cases == (case,)


def test_intervals() -> None:
    import numpy as np

    ints = np.array
    found = union(ints([5, 0, 2, 30, 40]), ints([8, 3, 4, 30, 35]))
    assert (found.start.tolist(), found.end.tolist()) == ([0, 5], [4, 8])
    assert found.before(ints([-1, 0, 2, 4, 5, 6, 100])).tolist() == [0, 0, 2, 4, 4, 5, 7]
    gaps = found.gaps(-2, 10)
    assert list(zip(gaps.start.tolist(), gaps.end.tolist(), strict=True)) == [(-2, 0), (4, 5), (8, 10)]
    other = Union(ints([3]), ints([6]))
    assert (found.overlap(other), found.without(other), found.within(3, 6)) == (2, 5, 2)
