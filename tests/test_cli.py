"""The command line: what goes where, exit codes, errors in one line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples

from gpudoctor import codec
from gpudoctor.cli import output
from gpudoctor.cli.app import run
from gpudoctor.model import Case

COMMAND = [sys.executable, "-m", "gpudoctor"]


@pytest.fixture
def case_file(tmp_path: Path) -> str:
    path = tmp_path / "case.json"
    path.write_text(codec.encode(samples.faulty_machine()))
    return str(path)


@pytest.fixture
def good_file(tmp_path: Path) -> str:
    path = tmp_path / "good.json"
    path.write_text(codec.encode(samples.switch_machine()))
    return str(path)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "LC_ALL", "GPUDOCTOR_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def no_gpu(monkeypatch: pytest.MonkeyPatch, answer: Any = None) -> None:
    """This machine as one without a GPU; or `answer` raises."""

    def collect_case(**_: object) -> Case:
        if answer is not None:
            answer()
        return Case()

    monkeypatch.setattr("gpudoctor.collect.collect_case", collect_case)


def test_bare_command_looks_at_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu(monkeypatch)
    assert run([]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("no NVIDIA GPU found\n")
    assert "note: no NVIDIA GPU found; rules about GPUs were not checked" in told.err


def test_findings_make_exit_code_one(case_file: str, good_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkup", "--from", case_file]) == 1
    assert " FAIL PCI001  gpu:2" in capsys.readouterr().out
    assert run(["checkup", "--from", case_file, "--fail-on", "never"]) == 0
    assert run(["checkup", "--from", case_file, "--ignore", "PCI", "--fail-on", "critical"]) == 0
    assert run(["checkup", "--from", good_file]) == 0
    assert run(["--from", case_file]) == 1  # the bare command takes the same options


def test_require_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_gpu(monkeypatch)
    target = tmp_path / "junit.xml"
    assert run(["checkup", "--require-gpu", "1", "-o", str(target)]) == 1
    assert "gpudoctor: require-gpu: 0 GPUs answer, 1 required" in capsys.readouterr().err
    assert '<failure message="require-gpu: 0 GPUs answer, 1 required"' in target.read_text()
    assert run(["topo", "--require-gpu", "1"]) == 1


def test_result_goes_to_stdout_and_notes_to_stderr(good_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkup", "--from", good_file, "--json", "--require-gpu", "8"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["command"] == "checkup"
    assert "note: require-gpu: 8 GPUs answer, 8 required" in told.err
    assert run(["checkup", "--from", good_file, "--json", "--require-gpu", "8", "-q"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("form", "start"), [("json", "{"), ("junit", "<?xml"), ("markdown", "# gpudoctor"), ("human", "node-a")]
)
def test_formats(case_file: str, form: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topo", "--from", case_file, "--format", form]) == 1
    assert capsys.readouterr().out.startswith(start)


def test_files_beside_the_result(case_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.xml", tmp_path / "c.md"]
    assert run(["checkup", "--from", case_file, *(word for file in files for word in ("-o", str(file)))]) == 1
    assert capsys.readouterr().out.startswith("node-a")
    assert json.loads(files[0].read_text())["exit_code"] == 1
    assert all(file.stat().st_size for file in files)


def test_a_file_that_cannot_be_written_does_not_cost_the_result(
    case_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.json").mkdir()
    assert run(["checkup", "--from", case_file, "-o", str(tmp_path / "folder.json")]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("node-a")
    assert "cannot write" in told.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "no such command 'nope'"),
        (["topo", "--nope"], "no such option"),
        (["topo", "--format", "html"], "invalid value for '--format': 'html' is not one of"),
        (["checkup", "--fail-on", "fatal"], "invalid value for '--fail-on'"),
        (["checkup", "--require-gpu", "0"], "invalid value for '--require-gpu'"),
        (["checkup", "-o", "x.html"], "cannot write 'x.html': no format has the suffix '.html'"),
        (["tune", "-o", "none/x.json"], "-o none/x.json: there is no folder 'none'"),
        (["checkup", "--level", "deep"], "no such option"),
        (["read"], "missing argument 'FILE...'"),
        (["explain", "XXX999"], "there is no rule 'XXX999'"),
        (["--json", "topo"], "options stand after the command"),
        (["launch"], "there is no command to launch"),
        (["patch", "x.py", "--apply", "--revert"], "--apply and --revert exclude each other"),
    ],
)
def test_usage_errors_are_one_line_and_a_hint(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu(monkeypatch)
    assert run(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    first, *rest = told.err.splitlines()
    assert first.startswith(f"gpudoctor: {message}")
    assert len(rest) == 1
    assert rest[0].startswith("  ")


def test_unreadable_input_is_told_after_the_rest(case_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["read", case_file, "/no/such/file"]) == 2
    told = capsys.readouterr()
    assert " FAIL PCI001  gpu:2" in told.out
    assert "/no/such/file" in told.err
    assert "Traceback" not in told.err


def test_stdin_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(codec.encode(samples.switch_machine()).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(["topo", "--from", "-"]) == 0
    assert "GPU7  0000:88:00.0" in capsys.readouterr().out


def test_error_in_json_is_an_envelope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu(monkeypatch)
    assert run(["bench-pcie", "--select", "NOPE", "--json", "-o", str(tmp_path / "a.xml")]) == 2
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert (document["status"], document["exit_code"]) == ("failed", 2)
    assert document["errors"] == ["there is no rule, family or name 'NOPE'"]
    assert "<error" in (tmp_path / "a.xml").read_text()


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def raise_bug() -> None:
    raise RuntimeError("two\nlines \x1b[31m")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("ends", "code", "word"), [(raise_interrupt, 130, "interrupted"), (terminate, 143, "terminated")]
)
def test_signals(
    ends: Any, code: int, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    no_gpu(monkeypatch, ends)
    assert run(["checkup", "--json"]) == code
    told = capsys.readouterr()
    assert told.err == f"gpudoctor: {word}\n"
    assert json.loads(told.out)["exit_code"] == code
    assert signal.getsignal(signal.SIGTERM) is before


def test_partial_result_of_an_interrupted_run() -> None:
    envelope = output.interrupted(samples.envelope())
    assert (envelope.status, envelope.exit_code) == ("failed", 130)
    assert envelope.errors == ("interrupted: the result holds what was done until then",)


def test_a_bug_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_gpu(monkeypatch, raise_bug)
    assert run(["checkup"]) == 2
    told = capsys.readouterr().err
    assert "this is a bug in gpudoctor: RuntimeError at " in told
    assert "two lines \\x1b[31m" in told
    assert len(told.splitlines()) == 2
    monkeypatch.setenv("GPUDOCTOR_DEBUG", "1")
    assert run(["checkup"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_topology_of_a_terminal_and_of_a_pipe(case_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topo", "--from", case_file]) == 1
    both = capsys.readouterr().out
    assert "host bridge pci0000:80" in both
    assert "CPU Affinity  NUMA Affinity" in both
    assert " FAIL PCI001  gpu:2" in both
    assert run(["topo", "--from", case_file, "--matrix"]) == 1
    assert "host bridge pci0000:80" not in capsys.readouterr().out


def test_locale_c_gets_ascii(
    case_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    assert run(["topo", "--from", case_file]) == 1
    assert capsys.readouterr().out.isascii()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "terminal", "coloured"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "FORCE_COLOR": "1"}, False, True),
        ({"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour(environment: dict[str, str], terminal: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert output.style(Terminal() if terminal else io.StringIO()).color is coloured


def test_width_is_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert output.style(Terminal()).width == 72
    assert output.style(io.StringIO()).width is None


def test_output_that_the_stream_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.write("naïve\n")
    assert raw.getvalue() == b"na\\xefve\n"


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("copies", total=3) as update:
        update(1, 3, "gpu:0")
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress("copies [x]", total=3) as update:
        update(1, 3, "gpu:0 \x1b]0;t\x07")
    assert "copies [x]" in stream.getvalue()
    assert "\x1b]0" not in stream.getvalue()


def test_closed_pipe_ends_quietly(case_file: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, "checkup", "-q", "--from", case_file],
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1  # as the findings say


def test_version() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gpudoctor 0.")


def test_explain_and_rules(case_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "link-width-below-max"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("PCI001 link-width-below-max (error)")
    for heading in ("What it means", "Why it costs", "How we know", "Fix", "When to ignore"):
        assert heading in told
    assert run(["explain", "PCI001", "--from", case_file]) == 0
    assert " FAIL PCI001  gpu:2" in capsys.readouterr().out
    assert run(["rules"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert any(row.startswith("PCI001  link-width-below-max") for row in rows)
    assert run(["rules", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["rules"]) == len(rows)


def test_bench_of_a_recorded_machine(case_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench-pcie", "--from", case_file]) == 2
    assert "a recorded machine cannot be loaded" in capsys.readouterr().err
    measured = tmp_path / "measured.json"
    case = dataclasses.replace(samples.switch_machine(), measurements=samples.measurements())
    measured.write_text(codec.encode(case))
    run(["bench-pcie", "--from", str(measured)])
    assert "  h2d           24.9  GB/s" in capsys.readouterr().out


def test_bench_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_gpu(monkeypatch)
    assert run(["bench-pcie"]) == 0
    assert "note: no GPU answers: nothing to measure" in capsys.readouterr().err
