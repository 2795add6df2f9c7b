"""Traces on the terminal: folded, in ASCII, with names from outside, and two side by side; `read` as a command."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import report_samples as samples
import trace_support as support

from gpudoctor.checkup import examine
from gpudoctor.cli.app import run
from gpudoctor.errors import EXIT_OK, EXIT_USAGE
from gpudoctor.model import Case, TraceFacts
from gpudoctor.read import read_artifacts
from gpudoctor.report import render
from gpudoctor.report.text import Style, columns
from gpudoctor.report.trace import one, picture, short_name, traces
from gpudoctor.report.trace_compare import compare

NAMES = ("resnet50_workers0", "resnet50_workers4", "dlrm_rank1", "alexnet", "triton", "amd_mi250", "event_sync")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [60, 100, 200])
def test_every_line_fits(name: str, width: int) -> None:
    for line in one(support.recorded(name), Style(width=width)):
        assert columns(line) <= width or " " not in line.strip(), line


def test_ascii_and_piped() -> None:
    job = [support.facts(path) for path in support.DLRM]
    text = "\n".join(traces(job, Style(width=None, unicode=False)))
    assert text.isascii()
    assert "#" in text
    assert "\x1b" not in text


def test_the_parts_of_the_device_time_are_told_with_their_causes() -> None:
    text = "\n".join(one(support.recorded("resnet50_workers0"), Style(width=None)))
    assert "loader bound: the device idles" in text
    assert "num_workers=0" in text
    assert "resnet50_profiler_api.py:44 aten::to > aten::copy_" in text
    assert "the host waits for the loader" in text


def test_slow_and_fast_ranks_are_named_and_the_slow_one_is_shown() -> None:
    result = read_artifacts([str(path) for path in support.DLRM])
    text = "\n".join(traces(result.cases[0].traces, Style(width=None)))
    assert "slow: ranks 7, 2, 6 (they come last to the collectives); fast: ranks 1, 3" in text
    assert "trace dlrm_rank7.json.gz" in text
    assert "trace dlrm_rank0.json.gz" not in text
    assert "the other 7 ranks in detail with -v" in text
    assert "trace dlrm_rank0.json.gz" in "\n".join(traces(result.cases[0].traces, Style(width=None, verbose=1)))


def test_picture_of_a_step(tmp_path: Path) -> None:
    facts = support.facts(support.write(tmp_path / "trace.json", support.events()))
    assert facts.timeline is not None
    lines = picture(facts.timeline, Style(width=80, unicode=False))
    rows = {line.split("|")[0].strip(): line.split("|")[1] for line in lines if "|" in line}
    room = len(rows["loader"])
    assert rows["loader"][: room // 5].strip("#") == ""
    assert rows["loader"][room // 5 + 2 :].strip() == ""
    kernels = rows["computing"]
    assert kernels[: round(0.38 * room)].strip() == ""
    assert kernels[round(0.42 * room) : round(0.78 * room)].strip("#") == ""
    assert kernels[round(0.82 * room) :].strip() == ""


def test_nothing_from_a_trace_acts_on_the_terminal() -> None:
    words = samples.HOSTILE.replace("\ud800", "")  # no JSON text holds half a pair
    hostile = samples.hostile(TraceFacts, words)
    lines = [*one(hostile, Style(width=80)), *compare([hostile], [hostile], Style(width=80)).splitlines()]
    for line in lines:
        assert all(unicodedata.category(character) not in ("Cc", "Cf", "Cs") for character in line), repr(line)
    envelope = examine(Case(traces=(hostile,)), command="read")
    for form in ("human", "markdown", "json", "junit"):
        assert "\x1b" not in render(envelope, form)  # type: ignore[arg-type]


def test_short_names() -> None:
    name = "void at::native::(anonymous namespace)::reduce_kernel<512, 1>(at::native::Op<float>)"
    assert short_name(name) == "at::native::reduce_kernel"
    assert short_name("ncclDevKernel_AllReduce_Sum_f32") == "ncclDevKernel_AllReduce_Sum_f32"
    assert short_name("<lambda>") == "<lambda>"


def test_comparison() -> None:
    text = compare(
        [support.recorded("resnet50_workers0")],
        [support.recorded("resnet50_workers4")],
        Style(width=None, unicode=False),
    )
    assert "B is 1.39" in text
    assert "x as fast as A, by the median step" in text
    row = next(line for line in text.splitlines() if "waiting for the loader, ms/step" in line)
    assert row.split()[-1].startswith("-")
    assert "waits that changed most" in text


def folder(name: str) -> str:
    return str(support.FOLDER / f"{name}.json.gz")


def test_read_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["read", folder("resnet50_workers0")]) == EXIT_OK
    out = capsys.readouterr().out
    assert "Tesla V100-DGXS-32GB" in out
    assert "one step (ProfilerStep#" in out
    assert "LDR001" in out
    assert run(["read", folder("resnet50_workers0"), "--json"]) == EXIT_OK
    document = json.loads(capsys.readouterr().out)
    assert document["case"]["traces"][0]["bound"] == "loader"
    metrics = {item["metric"]: item for item in document["measurements"]}
    assert metrics["trace.idle_pct"]["subject"] == "rank:0"
    assert metrics["trace.idle_pct"]["unit"] == "%"


def test_compare_as_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pair = [folder("resnet50_workers0"), folder("resnet50_workers4")]
    assert run(["read", *pair, "--compare"]) == EXIT_OK
    assert "B is 1.39" in capsys.readouterr().out
    assert run(["read", *pair, "--compare", "--json"]) == EXIT_OK
    assert len(json.loads(capsys.readouterr().out)["cases"]) == 2
    for wrong in (
        [pair[0]],
        [*pair, pair[0]],
        [pair[0], str(tmp_path / "missing.json")],
        [pair[0], str(support.FOLDER)],
    ):
        assert run(["read", *wrong, "--compare"]) == EXIT_USAGE
        told = capsys.readouterr()
        assert "compare" in told.err
        assert "Traceback" not in told.err


def test_a_bad_trace_is_one_line_and_the_rest_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.json.gz"
    bad.write_bytes(b"\x1f\x8b\x08\x00\x00")
    assert run(["read", str(bad), folder("triton")]) == EXIT_USAGE
    told = capsys.readouterr()
    assert "bad.json.gz" in told.err
    assert "Traceback" not in told.err
    assert "triton_poi_fused_add_cos_sin_0" in told.out
