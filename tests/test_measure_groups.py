"""Several GPUs and NUMA nodes at once: what counts as the common window, and what is made of it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from gpudoctor.measure import bench, conditions, copies, groups, lock
from gpudoctor.measure.groups import Trace, window_rates
from gpudoctor.model import Case, Gpu, Limits, NumaNode, PcieLink

LINK = PcieLink(generation=4, width=16, max_generation=4, max_width=16, state="load")
CHUNK = 32 << 20


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.tempfile, "gettempdir", lambda: str(tmp_path))
    # The machine that runs the tests may be busy with others.
    quiet = conditions.Reading(at=0.0, cpu_s=None, own_s=0.0, swapped_pages=None)
    monkeypatch.setattr(conditions, "read", lambda _children=(): quiet)


def trace(begin: float, end: float, rate: float, *, slow_from: float | None = None, slow: float = 0.0) -> Trace:
    times = [begin]
    while times[-1] < end:
        now = slow if slow_from is not None and times[-1] >= slow_from else rate
        times.append(times[-1] + CHUNK / now / 1e9)
    return Trace(times, CHUNK)


def test_rates_of_the_common_window() -> None:
    assert window_rates([trace(0, 1, 25.0), trace(0.3, 1.4, 12.0)]) == pytest.approx([25.0, 12.0], rel=0.02)


def test_time_alone_does_not_count() -> None:
    # Alone until 0.5 at 25 GB/s, then at 12.5 beside the other: only the second half is common.
    first = trace(0, 1.5, 25.0, slow_from=0.5, slow=12.5)
    assert window_rates([first, trace(0.5, 1.5, 12.5)]) == pytest.approx([12.5, 12.5], rel=0.02)


def test_windows_too_short_to_tell() -> None:
    assert window_rates([trace(0, 1, 25.0), trace(2, 3, 25.0)]) is None
    assert window_rates([trace(0, 1, 25.0), trace(0.999, 1.5, 25.0)]) is None
    assert window_rates([Trace([0.1, 0.2], CHUNK)]) is None
    assert window_rates([Trace([], CHUNK), Trace([], CHUNK)]) is None


def test_jitter_does_not_move_the_rate() -> None:
    noise = random.Random(7)
    times = list(itertools.accumulate(CHUNK / 25e9 * noise.uniform(0.7, 1.3) for _ in range(1000)))
    assert window_rates([Trace(times, CHUNK), trace(0, 1.2, 25.0)]) == pytest.approx([25.0, 25.0], rel=0.02)


def gpu(index: int, node: int = 0) -> Gpu:
    return Gpu(index=index, bdf=f"0000:0{index + 1}:00.0", pcie=LINK, processes=(), numa_node=node, local_cpus=(0,))


def test_all_gpus_at_once_against_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "TARGET", "measure_targets:slow")  # 26.2 GB/s alone
    monkeypatch.setattr(groups, "PREPARE", "measure_targets:ready")
    monkeypatch.setattr(groups, "WINDOW", "measure_targets:steady_window")  # 12 GB/s each
    monkeypatch.setattr(groups, "peers", lambda *_: None)
    result = bench.bench_copies(Case(gpus=(gpu(0), gpu(1), gpu(2))))
    assert result.errors == ()
    together = [one for one in result.measurements if one.metric == "h2d_all"]
    assert [one.value for one in together] == pytest.approx([12.0] * 3, rel=0.01)
    assert together[0].settings == {"gpus": 3, "alone": 26.2}
    pairs = [one for one in result.measurements if one.metric == "d2h_pair_sum"]  # all lost rate: all pairs are tried
    assert [one.subject for one in pairs] == ["gpu:0-gpu:1", "gpu:0-gpu:2", "gpu:1-gpu:2"]
    assert pairs[0].value == pytest.approx(24.0, rel=0.01)
    assert pairs[0].settings["alone"] == pytest.approx(52.4)


def test_far_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "TARGET", "measure_targets:far_memory_is_slow")
    nodes = tuple(NumaNode(node=node, cpus=(node,)) for node in (0, 1, 2))
    limits = Limits(allowed_cpus=(0, 1, 2), allowed_nodes=(0, 1))  # a cpuset keeps this process off node 2
    result = bench.bench_copies(Case(gpus=(gpu(0),), numa_nodes=nodes, limits=limits))
    found = {(one.metric, one.settings["node"]): one for one in result.measurements if one.metric.endswith("_node")}
    assert set(found) == {("h2d_node", 0), ("d2h_node", 0), ("h2d_node", 1), ("d2h_node", 1)}
    assert (found["h2d_node", 0].value, found["h2d_node", 0].settings["near"]) == (25.0, True)
    assert (found["h2d_node", 1].value, found["h2d_node", 1].settings["near"]) == (12.5, False)
