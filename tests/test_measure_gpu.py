"""bench_copies on a real GPU: the figures, their agreement with nvbandwidth, and the same numbers from both engines."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

import pytest

from gpudoctor.collect import collect_case
from gpudoctor.judge import limit_gb_s
from gpudoctor.measure import BenchResult, bench_copies
from gpudoctor.model import Case

# nvbandwidth v0.8 on one H200: medians, and how far ours may be from them.
REFERENCE = {"h2d": (55.4, 0.01), "d2h": (55.3, 0.01), "d2d": (2092.0, 0.01)}
BOTH_WAYS = {"h2d_while_d2h": (50.0, 0.03), "d2h_while_h2d": (50.7, 0.03)}
COPIES = (*REFERENCE, *BOTH_WAYS)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is None
        or subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True).returncode != 0,
        reason="needs an NVIDIA GPU",
    ),
]
needs_both = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs the package cuda-bindings beside torch"
)


@pytest.fixture(scope="module")
def case() -> Case:
    return collect_case()


@pytest.fixture(scope="module")
def result(case: Case) -> BenchResult:
    return bench_copies(case, indices=[0], deadline_s=120.0)


def rates(result: BenchResult) -> dict[str, float]:
    return {one.metric: one.value for one in result.measurements if one.subject == "gpu:0" and one.unit == "GB/s"}


def test_all_rates_of_one_gpu_are_measured(result: BenchResult) -> None:
    assert result.errors == ()
    assert {*COPIES, "h2d_pageable", "d2h_pageable"} <= set(rates(result))
    assert all(one.value > 0 and one.samples >= 3 for one in result.measurements if one.metric in COPIES)


def test_link_was_read_under_load_and_holds_the_rates(result: BenchResult) -> None:
    gpu = result.case.gpus[0]
    assert gpu.pcie is not None
    assert gpu.pcie.state == "load"
    limit = limit_gb_s(gpu)
    assert limit is not None
    for one in result.measurements:
        assert one.verdict != "rejected"
        if one.metric.startswith(("h2d", "d2h")) and one.unit == "GB/s":
            assert one.value <= limit
    assert gpu.throttle_state == "load"


def test_pinned_copies_are_no_slower_than_pageable_ones(result: BenchResult) -> None:
    rate = rates(result)
    assert rate["h2d"] >= 0.9 * rate["h2d_pageable"]
    assert rate["d2h"] >= 0.9 * rate["d2h_pageable"]


@needs_both
def test_both_engines_give_the_same_numbers(case: Case) -> None:
    by_engine = {
        engine: rates(bench_copies(case, indices=[0], only=COPIES, engine=engine, deadline_s=120.0))
        for engine in ("cuda", "torch")
    }
    for metric in REFERENCE:
        assert by_engine["cuda"][metric] == pytest.approx(by_engine["torch"][metric], rel=0.01), by_engine
    for metric in BOTH_WAYS:
        assert by_engine["cuda"][metric] == pytest.approx(by_engine["torch"][metric], rel=0.03), by_engine


def test_reference_figures_of_one_h200(result: BenchResult) -> None:
    if result.case.gpus[0].name != "NVIDIA H200" or result.measurements[0].settings["link"] != "Gen5 x16":
        pytest.skip("needs an H200 at Gen5 x16")
    rate = rates(result)
    for metric, (reference, share) in {**REFERENCE, **BOTH_WAYS}.items():
        assert rate[metric] == pytest.approx(reference, rel=share), (metric, result.measurements)
