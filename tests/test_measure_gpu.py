"""bench_copies on a real GPU."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gpudoctor.collect import collect_case
from gpudoctor.measure import BenchResult, bench_copies
from gpudoctor.measure.judge import limit_gb_s

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is None
        or subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True).returncode != 0,
        reason="needs an NVIDIA GPU",
    ),
]


@pytest.fixture(scope="module")
def result() -> BenchResult:
    return bench_copies(collect_case(), seconds_per_gpu=3.0, indices=[0], deadline_s=120.0)


def test_all_four_rates_are_measured(result: BenchResult) -> None:
    assert result.errors == ()
    assert [one.metric for one in result.measurements] == ["h2d", "d2h", "h2d_pageable", "d2h_pageable"]
    assert all(one.value > 0 and one.samples >= 3 for one in result.measurements)


def test_link_was_read_under_load_and_holds_the_rates(result: BenchResult) -> None:
    gpu = result.case.gpus[0]
    assert gpu.pcie is not None
    assert gpu.pcie.state == "load"
    limit = limit_gb_s(gpu)
    assert limit is not None
    for one in result.measurements:
        assert one.value <= limit
        assert one.verdict != "rejected"
    assert gpu.throttle_state == "load"


def test_pinned_copies_are_no_slower_than_pageable_ones(result: BenchResult) -> None:
    rate = {one.metric: one.value for one in result.measurements}
    assert rate["h2d"] >= 0.9 * rate["h2d_pageable"]
    assert rate["d2h"] >= 0.9 * rate["d2h_pageable"]


def test_reference_figures_of_one_h200(result: BenchResult) -> None:
    if result.case.gpus[0].name != "NVIDIA H200" or result.measurements[0].settings["link"] != "Gen5 x16":
        pytest.skip("needs an H200 at Gen5 x16")
    rate = {one.metric: one.value for one in result.measurements}
    assert rate["h2d"] == pytest.approx(55.4, rel=0.02), result.measurements[0]
    assert rate["d2h"] == pytest.approx(55.3, rel=0.02), result.measurements[1]
