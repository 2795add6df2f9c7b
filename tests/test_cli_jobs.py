"""launch, patch and capture: what they print and write, and that nothing is written without being asked."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import report_samples as samples

from gpudoctor import codec
from gpudoctor.cli.app import run
from gpudoctor.model import Case, Change, Edit, Envelope, Host, LaunchConfig, Prescription

SCRIPT = """\
from torch.utils.data import DataLoader

loader = DataLoader([1, 2, 3], batch_size=2)
for batch in loader:
    print(batch)
"""
CHANGE = Change(
    id="C1",
    rule="LDR001",
    site="train.py:3",
    mechanism="loader",
    title="num_workers=4",
    change_class="exact",
    kept=True,
    edits=(Edit(kind="loader-arguments", site="train.py:3", arguments={"num_workers": 4}),),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and what tune wrote about it."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    told(CHANGE)
    return tmp_path


def told(*changes: Change, launch: LaunchConfig | None = None, case: Case | None = None) -> None:
    envelope = Envelope(
        version="0",
        command="tune",
        status="clean",
        exit_code=0,
        case=case or samples.switch_machine(),
        prescription=Prescription(changes=changes, launch=launch),
    )
    Path("gpudoctor-out").mkdir(exist_ok=True)
    Path("gpudoctor-out/case.json").write_text(codec.encode_envelope(envelope))


def test_patch_prints_a_diff_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["patch", "train.py"]) == 0
    diff = capsys.readouterr().out
    assert diff.startswith("--- a/train.py\n+++ b/train.py\n")
    assert "+loader = DataLoader([1, 2, 3], batch_size=2, num_workers=4)\n" in diff
    assert Path("train.py").read_text() == SCRIPT
    subprocess.run(["git", "apply", "--check", "-"], input=diff, text=True, check=True, cwd=folder)


def test_patch_is_applied_and_taken_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["patch", "train.py", "--apply"]) == 0
    assert "num_workers=4" in Path("train.py").read_text()
    assert "--revert takes it back" in capsys.readouterr().err
    assert run(["patch", "train.py", "--apply"]) == 0  # a second time changes nothing, and keeps the way back
    assert "is patched already" in capsys.readouterr().err
    assert run(["patch", "train.py", "--revert"]) == 0
    assert Path("train.py").read_text() == SCRIPT
    assert run(["patch", "train.py", "--revert"]) == 2
    assert "there is nothing to take back" in capsys.readouterr().err


def test_patch_takes_only_kept_changes_of_this_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(dataclasses.replace(CHANGE, kept=False), dataclasses.replace(CHANGE, site="other.py:3"))
    assert run(["patch", "train.py", "--apply"]) == 0
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "no change of train.py is prescribed" in streams.err
    assert Path("train.py").read_text() == SCRIPT


def test_patch_finds_the_script_from_another_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sites are relative to where tune ran; the diff to where patch runs."""
    watched = dataclasses.replace(samples.watched(), cwd=str(folder))
    told(CHANGE, case=dataclasses.replace(samples.switch_machine(), watched=watched))
    Path("sub").mkdir()
    Path("train.py").rename("sub/train.py")
    told(dataclasses.replace(CHANGE, site="sub/train.py:3"), case=dataclasses.replace(Case(), watched=watched))
    monkeypatch.chdir("sub")
    assert run(["patch", "train.py", "--from", "../gpudoctor-out/case.json"]) == 0
    assert capsys.readouterr().out.startswith("--- a/train.py\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["patch", "gone.py"], "cannot read 'gone.py': No such file or directory"),
        (["patch", "train.py", "--from", "gone.json"], "cannot read 'gone.json'"),
        (["patch", "train.py", "--from", "bare.json"], "bare.json holds no prescription"),
        (["patch", "/etc/hostname"], "'/etc/hostname' does not lie below this folder"),
    ],
)
def test_patch_errors(folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bare.json").write_text(codec.encode(Case()))
    assert run(words) == 2
    assert capsys.readouterr().err.startswith(f"gpudoctor: {message}")


def test_patch_without_a_prescription(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["patch", "train.py"]) == 2
    assert "run `gpudoctor tune` first" in capsys.readouterr().err


def test_a_change_that_no_longer_fits_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("x = 1\n\n\n")
    assert run(["patch", "train.py", "--apply"]) == 2
    assert "train.py:3: loader-arguments cannot be applied" in capsys.readouterr().err
    assert Path("train.py").read_text() == "x = 1\n\n\n"


def test_hostile_source_does_not_act_on_a_terminal(folder: Path) -> None:
    from gpudoctor.cli.patch import _shown
    from gpudoctor.report.text import Style

    diff = "--- a/x\n+++ b/x\n+\tprint('\x1b[31m')\n"
    assert _shown(diff, Style(width=80)) == "--- a/x\n+++ b/x\n+\tprint('\\x1b[31m')\n"
    assert _shown(diff, Style()) == diff  # git apply gets every byte


def test_launch_prints_a_script_for_the_recorded_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("machine.json").write_text(codec.encode(samples.switch_machine()))
    assert run(["launch", "--from", "machine.json", "--", "python", "train.py", "--name", "a b"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "python train.py --name 'a b'" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert run(["launch", "--from", "machine.json", "--json", "--", "python", "train.py"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prescription"]["launch"]["command"] == ["python", "train.py"]


def test_launch_exits_with_findings_only_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.json").write_text(codec.encode(samples.faulty_machine()))
    assert run(["launch", "--from", "bad.json", "--", "python", "train.py"]) == 0
    assert run(["launch", "--from", "bad.json", "--fail-on", "error", "--", "python", "train.py"]) == 1
    assert capsys.readouterr().out.count("#!/usr/bin/env bash") == 2


def test_launch_of_what_tune_wrote(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(launch=LaunchConfig(command=("python", "train.py", "--tuned")))
    assert run(["launch", "--from", "gpudoctor-out/case.json"]) == 0
    assert "python train.py --tuned" in capsys.readouterr().out


def test_capture_is_redacted_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = dataclasses.replace(
        samples.faulty_machine(), host=Host(hostname="secret-host.example.com", gpus_on_bus=8), watched=None
    )
    source, target = tmp_path / "case.json", tmp_path / "captured.json"
    source.write_text(codec.encode(secret))
    assert run(["capture", "--from", str(source)]) == 0
    out = capsys.readouterr().out
    assert "secret-host" not in out
    assert "5a1f3c2e" not in out
    assert json.loads(out)["command"] == "capture"
    assert run(["capture", "--from", str(source), "-o", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert "secret-host" not in target.read_text()
    assert run(["checkup", "--from", str(target)]) == 1
    assert " FAIL PCI001  gpu:2" in capsys.readouterr().out


def test_capture_is_json_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "-o", str(tmp_path / "x.md")]) == 2
    assert "a capture is JSON" in capsys.readouterr().err
