"""`gpudoctor bench-pcie` and `topo --svg` as commands: choices, comparing with another tool, pictures in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpudoctor import codec
from gpudoctor.cli.app import run
from gpudoctor.measure import BenchResult
from gpudoctor.model import Case, Gpu, Measurement, PcieLink

LINK = PcieLink(generation=5, width=16, max_generation=5, max_width=16, state="load")
CASE = Case(
    gpus=(Gpu(index=0, name="NVIDIA H200", bdf="0000:3b:00.0", pcie=LINK),),
    measurements=(
        Measurement(metric="h2d", subject="gpu:0", value=55.4, unit="GB/s", spread=(55.3, 55.5), samples=8),
        Measurement(metric="d2d", subject="gpu:0", value=2092.0, unit="GB/s", spread=(2091.0, 2093.0), samples=8),
        Measurement(metric="h2d_latency", subject="gpu:0", value=9.1, unit="us", spread=(9.0, 9.4), samples=8),
    ),
)
NVBANDWIDTH = """\
nvbandwidth Version: v0.8
Device 0: NVIDIA H200 (00000000:3b:00)

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0
 0     55.51

SUM host_to_device_memcpy_ce 55.51
"""


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    path = tmp_path / "case.json"
    path.write_text(codec.encode(CASE))
    return str(path)


def test_recorded_figures_are_judged_again(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench-pcie", "--from", recorded, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    verdicts = {item["metric"]: item["verdict"] for item in document["measurements"]}
    assert verdicts == {"h2d": "ok", "d2d": "ok", "h2d_latency": None}


def test_compare_sets_another_tool_beside(recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "nvbandwidth.txt"
    other.write_text(NVBANDWIDTH)
    assert run(["bench-pcie", "--from", recorded, "--compare", str(other), "--json"]) == 0
    first, second, *_ = json.loads(capsys.readouterr().out)["measurements"]
    assert first["settings"]["compared_value"] == 55.51
    assert first["notes"][-1] == f"{other} says 55.51 GB/s: this is -0.2%"
    assert "compared_value" not in second["settings"]  # the other tool did not measure it
    assert run(["bench-pcie", "--from", recorded, "--compare", str(other)]) == 0
    assert "says 55.51 GB/s: this is -0.2%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quick", "--thorough"], "--quick and --thorough exclude each other"),
        (["--compare", "missing.txt"], "cannot read missing.txt"),
        (["--engine", "opencl"], "invalid value for '--engine'"),
    ],
)
def test_usage_errors(words: list[str], message: str, recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench-pcie", "--from", recorded, *words]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert "Traceback" not in told.err


def test_file_without_rates_cannot_be_compared(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "numa.txt"
    other.write_text("available: 1 nodes (0)\nnode 0 cpus: 0 1\nnode 0 size: 100 MB\n")
    assert run(["bench-pcie", "--from", recorded, "--compare", str(other)]) == 2
    assert "holds no copy rates" in capsys.readouterr().err


def test_choices_reach_the_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told: dict[str, object] = {}

    def bench(case: Case, **options: object) -> BenchResult:
        told.update(options)
        return BenchResult(case=case)

    monkeypatch.setattr("gpudoctor.collect.collect_case", lambda **_: Case(gpus=CASE.gpus))
    monkeypatch.setattr("gpudoctor.measure.bench_copies", bench)
    assert run(["bench-pcie", "--quick", "--only", "h2d", "--only", "d2d", "--engine", "torch", "-i", "0"]) == 0
    assert (told["level"], told["only"], told["engine"], told["indices"]) == ("quick", ["h2d", "d2d"], "torch", [0])
    assert run(["bench-pcie", "--thorough"]) == 0
    assert (told["level"], told["only"], told["engine"], told["seconds_per_gpu"]) == ("thorough", None, None, None)
    capsys.readouterr()


def test_topo_writes_a_picture(recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.svg"
    assert run(["topo", "--from", recorded, "--svg", str(path)]) == 0
    assert path.read_text().startswith("<svg ")
    assert "H2D 55.4 GB/s" in path.read_text().replace("\u00a0", " ")
    assert "GPU0" in capsys.readouterr().out  # the text is printed all the same
    assert run(["topo", "--from", recorded, "--svg", str(tmp_path / "no" / "such" / "folder.svg")]) == 2
    assert "cannot write" in capsys.readouterr().err
