"""Recorded machines through the command line: every one readable in every terminal, in a pipe and in ASCII."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from gpudoctor import codec
from gpudoctor.cli.app import run
from gpudoctor.model import Case
from gpudoctor.report import render_topo
from gpudoctor.report.text import columns

MACHINES = sorted((Path(__file__).parent / "machines").glob("*/case.json"))
TEXTS = sorted((Path(__file__).parent / "machines").glob("*/topo.txt"))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_there_are_recorded_machines() -> None:
    assert MACHINES
    assert TEXTS


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("path", [*MACHINES, *TEXTS], ids=lambda path: f"{path.parent.name}-{path.name}")
def test_topology_fits_every_terminal(path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = Terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(["topo", "--from", str(path), "--fail-on", "never"]) == 0
    lines = stdout.getvalue().splitlines()
    assert any("GPU0" in line for line in lines)
    assert [line for line in lines if columns(line) > width] == []


@pytest.mark.parametrize("path", [*MACHINES, *TEXTS], ids=lambda path: f"{path.parent.name}-{path.name}")
def test_topology_in_a_pipe_and_in_ascii(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LC_ALL", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert run(["topo", "--from", str(path), "--fail-on", "never"]) == 0
    told = capsys.readouterr().out
    monkeypatch.setenv("LC_ALL", "C")
    assert run(["topo", "--from", str(path), "--fail-on", "never"]) == 0
    ascii_text = capsys.readouterr().out
    assert ascii_text.isascii()
    assert len(ascii_text.splitlines()) == len(told.splitlines())


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.parent.name)
def test_pictures_are_the_recorded_ones(path: Path) -> None:
    """expected.txt holds what was looked at and found right; write it anew with `python tests/test_cli_machines.py`."""
    assert picture(path) == path.with_name("expected.txt").read_text(encoding="utf-8")


def picture(path: Path) -> str:
    case = codec.decode(path.read_bytes(), Case, what=path.name)
    kinds = (render_topo(case, matrix=kind, width=None, unicode=True, color=False) for kind in (False, True))
    return "\n".join(kinds)


if __name__ == "__main__":
    for machine in MACHINES:
        machine.with_name("expected.txt").write_text(picture(machine), encoding="utf-8")
