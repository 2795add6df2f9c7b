"""The probes themselves, run in real children through a stand-in for cuda-bindings: what they copy, time and check."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gpudoctor import child
from gpudoctor.measure import BenchResult, bench_copies, conditions, groups, lock, placement
from gpudoctor.measure.copies import Run
from gpudoctor.measure.engine import UnusableError, available, open_engine
from gpudoctor.model import Case, Gpu, NumaNode, Pair, PcieLink

FAKE = Path(__file__).parent / "fake_cuda"
LINK = PcieLink(generation=5, width=16, max_generation=5, max_width=16, state="load")
GPU = Gpu(index=0, name="NVIDIA H200", bdf="0000:3b:00.0", pcie=LINK, processes=())
SECOND = dataclasses.replace(GPU, index=1, bdf="0000:86:00.0")
PAIR = Pair(a="gpu:0", b="gpu:1", path="NODE", nvlinks=18, p2p_read="OK")
PAYLOAD: dict[str, Any] = {
    "engine": "cuda",
    "bdf": "0000:3b:00.0",
    "cpus": [],
    "node": None,
    "block_bytes": 256 << 20,
    "seconds": 0.05,
    "warm_up_s": 0.0,
    "memory_bytes": None,
    "hops": [],
}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.tempfile, "gettempdir", lambda: str(tmp_path))
    # The machine that runs the tests may be busy with others.
    quiet = conditions.Reading(at=0.0, cpu_s=None, own_s=0.0, swapped_pages=None)
    monkeypatch.setattr(conditions, "read", lambda _children=(): quiet)
    monkeypatch.setenv("PYTHONPATH", str(FAKE))


def like(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    monkeypatch.setenv("FAKE_CUDA", json.dumps(settings))


def bench(case: Case, **options: Any) -> BenchResult:
    return bench_copies(case, **{"engine": "cuda", "seconds_per_gpu": 0.5, **options})


def test_every_copy_of_one_gpu() -> None:
    result = bench(Case(gpus=(GPU,)), level="thorough")
    assert result.errors == ()
    rate = {one.metric: one.value for one in result.measurements if not one.metric.endswith("_curve")}
    # 2 us of each launch are hidden behind the copies, not in them: 16 MiB at 55 GB/s takes 0.3 ms
    assert rate["h2d"] == pytest.approx(55.4, rel=0.02)
    assert rate["d2h"] == pytest.approx(55.3, rel=0.02)
    assert rate["h2d_while_d2h"] == pytest.approx(55.4 * 0.92, rel=0.03)
    assert rate["d2h_while_h2d"] == pytest.approx(55.3 * 0.92, rel=0.03)
    assert rate["d2d"] == pytest.approx(2092, rel=0.25)  # 16 MiB take 8 us: the launch shows
    assert 0 < rate["h2d_latency"] < 5000
    assert 0 < rate["h2d_pageable"] <= 56
    curve = [(one.settings["bytes"], one.value) for one in result.measurements if one.metric == "h2d_curve"]
    assert [size for size, _ in curve] == [4096 * 4**step for step in range(7)]
    assert curve[0][1] < curve[3][1] < curve[-1][1]
    first = result.measurements[0]
    assert first.settings["backend"] == "cuda-bindings, CUDA 13.0"
    assert "blocks of 16 MiB instead of 256" in first.notes[0]


def test_the_opposite_direction_runs_all_the_time_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    like(monkeypatch, rates={"h2d": 11.0, "d2h": 60.0, "d2d": 2000.0, "peer": 20.0}, both=0.5)
    answer = child.run("gpudoctor.measure.gpu_copies:copies", PAYLOAD | {"kind": "h2d_while_d2h"}, deadline_s=60)
    assert answer.status == "ok", answer.error
    # Were the fast opposite copies over early, some of these would run alone, at 11 GB/s.
    assert max(answer.value["samples"]) < 5.7


def test_hidden_gpu_and_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = dataclasses.replace(GPU, bdf="0000:ff:00.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    result = bench(Case(gpus=(hidden,)), only=["h2d"])
    assert "CUDA does not show the GPU at 0000:ff:00.0 (CUDA_VISIBLE_DEVICES is '0,1')" in result.errors[0]
    like(monkeypatch, compute=100)
    result = bench(Case(gpus=(GPU, SECOND)), only=["h2d"])
    assert result.errors == (
        "copies cannot be measured: CUDA does not start: cuInit gives error 100 (CUDA_VISIBLE_DEVICES is '0,1')",
    )


def test_memory_of_a_node_is_placed_and_verified() -> None:
    nodes = (NumaNode(node=0, cpus=(0, 1)), NumaNode(node=7, cpus=(0,)))
    placed = placement.on_node(1 << 20, 0)
    result = bench(Case(gpus=(dataclasses.replace(GPU, numa_node=0),), numa_nodes=nodes))
    near, far = [one for one in result.measurements if one.metric == "h2d_node"]
    assert (near.settings["node"], near.settings["near"], near.settings["on_node"]) == (0, True, placed.share)
    assert far.settings["near"] is False
    assert any("the place of the memory is not certain" in note for note in far.notes)  # there is no node 7 here
    placement.close(placed)


def between(**options: Any) -> Run:
    """Both orders of the pair, without everything else."""
    run = Run(case=Case(gpus=(GPU, SECOND), pairs=(PAIR,)), engine="cuda", **{"deadline_s": 60.0, **options})
    groups.peers(run, run.case.gpus, 0.02)
    return run


def test_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    like(monkeypatch, real=True)
    run = Run(case=Case(gpus=(GPU, SECOND)), engine="cuda", deadline_s=60.0)
    groups.together(run, run.case.gpus, 0.2)
    assert run.errors == []
    rates = {(one.metric, one.subject): one.value for one in run.measurements}
    # A loaded machine delays the copies; none is faster than the link.
    assert 0 < rates["h2d_all", "gpu:1"] < 56
    assert 0 < rates["d2h_all", "gpu:0"] < 56


def test_peers() -> None:
    run = between()
    assert run.errors == []
    found = {(one.metric, one.subject): one for one in run.measurements}
    for subject in ("gpu:0-gpu:1", "gpu:1-gpu:0"):
        assert found["p2p_check", subject].value == 1.0
        assert found["p2p_write", subject].value == pytest.approx(390, rel=0.1)
        assert found["p2p_read", subject].verdict == "ok"
        assert 20 < found["p2p_staged", subject].value < 60
        assert found["p2p_latency", subject].unit == "us"


def test_no_peer_access_leaves_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    like(monkeypatch, peers=0)
    run = between()
    assert {one.metric for one in run.measurements} == {"p2p_staged"}
    assert run.errors == []


def test_data_that_does_not_arrive_is_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    like(monkeypatch, lost=True)
    found = {one.metric: one for one in between().measurements if one.subject == "gpu:0-gpu:1"}
    assert found["p2p_check"].value == 0.0
    assert "other data after a peer write and a peer read" in found["p2p_check"].notes[0]
    assert {"p2p_write", "p2p_read"}.isdisjoint(found)
    assert found["p2p_staged"].value > 0


def test_peer_copy_that_hangs_costs_its_pair_only(monkeypatch: pytest.MonkeyPatch) -> None:
    like(monkeypatch, hang=True)
    run = between(deadline_s=1.5)
    assert [one.value for one in run.measurements if one.metric == "p2p_check"] == [0.0, 0.0]
    assert "did not end" in run.measurements[0].notes[0]
    assert [error.split(":")[:3] for error in run.errors] == [["gpu", "0-gpu", "1 check"], ["gpu", "1-gpu", "0 check"]]


def test_which_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAKE))
    assert available() == "cuda"
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(UnusableError, match="torch"):
            open_engine("torch")
