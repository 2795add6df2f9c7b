"""gpudoctor sync: what is printed, exit codes, suppressions, --diff, SARIF and GitHub annotations."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpudoctor import codec
from gpudoctor.cli.app import run
from gpudoctor.model import Envelope, Finding
from gpudoctor.report import render

SCRIPT = """import torch
from torch import nn

device = torch.device("cuda")
model = nn.Linear(8, 1).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0.0
for step in range(100):
    loss = model(torch.randn(4, 8, device=device)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.item()
print(total)
"""
# The published schema (see tests/sarif/README.md), and what it leaves open but code scanning relies on.
SARIF: dict[str, Any] = json.loads((Path(__file__).parent / "sarif" / "sarif-2.1.0-rtm.5.json").read_text())
RELIED_ON = ("ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints")


def valid(document: dict[str, Any]) -> dict[str, Any]:
    jsonschema.Draft4Validator(SARIF).validate(document)
    for result in document["runs"][0]["results"]:
        assert [name for name in RELIED_ON if name not in result] == []
        assert document["runs"][0]["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    return document


def test_the_schema_refuses_what_is_no_sarif() -> None:
    for wrong in ({"version": "2.1.0"}, {"version": "2.0.0", "runs": []}, {"version": "2.1.0", "runs": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft4Validator(SARIF).validate(wrong)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_lines_of_the_same_file_are_told_by_number(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["sync", str(script)])
    told = capsys.readouterr().out
    assert "`for step in range(100)` is a training loop  (line 8)" in told
    assert told.count(script.name) == 1  # the heading


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert run(["sync", *words, "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def subjects(document: dict[str, Any]) -> list[str]:
    return [f"{finding['rule']} {finding['subject']}" for finding in document["findings"]]


def test_each_finding_says_why(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, "train.py", "--torch", "2.4")
    (finding,) = document["findings"]
    assert (finding["rule"], finding["subject"], finding["gain"]) == ("SYN001", "train.py:13", None)
    facts = {item["fact"]: (item["value"], item["source"]) for item in finding["evidence"]}
    assert facts["runs in each step"][1] == "train.py:8"
    assert "on the GPU" in facts
    assert any("gpudoctor patch" in remedy["text"] for remedy in finding["remedies"])
    assert document["case"]["source"]["torch"] == "2.4"
    jsonschema.validate(document, codec.schema())


def test_exit_codes_and_human_text(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sync", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "WARN SYN001" in out
    assert "hot " in out
    assert "gpu " in out
    assert run(["sync", "train.py", "--fail-on", "warning"]) == 1
    assert run(["sync", "train.py", "--fail-on", "warning", "--ignore", "SYN001"]) == 0
    assert run(["sync", "train.py", "--torch", "new"]) == 2
    assert run(["sync", "missing.py"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_suppressions_and_unused_ones(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SCRIPT.replace("total += loss.item()", "total += loss.item()  # gpudoctor: ignore[SYN001]")
    script.write_text(text + "x = 1  # gpudoctor: ignore[SYN004]\ny = '# gpudoctor: ignore'\nz = 2  # noqa: SYN001\n")
    document = told(capsys, "train.py")
    assert document["findings"] == []
    assert [note for note in document["notes"] if "silences nothing" in note] == [
        "train.py:15: this comment silences nothing (SYN004)"
    ]
    script.write_text(SCRIPT.replace("total += loss.item()", "total += loss.item()  # gpudoctor: ignore[CPY001]"))
    assert subjects(told(capsys, "train.py")) == ["SYN001 train.py:13"]


def git(*words: str) -> None:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], check=True, capture_output=True, env=environment)


def test_diff_tells_only_changed_lines(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-q", "-m", "one")
    assert subjects(told(capsys, ".", "--diff", "HEAD")) == []
    script.write_text(SCRIPT.replace("    opt.step()\n", "    opt.step()\n    print(loss)\n"))
    (script.parent / "new file.py").write_text(SCRIPT)
    assert subjects(told(capsys, ".", "--diff", "HEAD")) == ["SYN001 new file.py:13", "SYN003 train.py:13"]
    assert run(["sync", ".", "--diff", "no-such-revision"]) == 2
    assert run(["sync", ".", "--diff", "--output=x"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_diff_without_a_repository(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(script.parent.parent))
    assert run(["sync", ".", "--diff", "HEAD"]) == 2
    assert "git" in capsys.readouterr().err


def sarif(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    run(["sync", *words, "--format", "sarif"])
    return valid(json.loads(capsys.readouterr().out))


def places(document: dict[str, Any]) -> list[tuple[str, int]]:
    found = [result["locations"][0]["physicalLocation"] for result in document["runs"][0]["results"]]
    return [(place["artifactLocation"]["uri"], place["region"]["startLine"]) for place in found]


def test_sarif_has_relative_paths_also_for_a_folder_elsewhere(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert places(sarif(capsys, ".")) == [("train.py", 13)]
    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    document = sarif(capsys, str(tmp_path))
    assert places(document) == [("train.py", 13)]
    assert document["runs"][0]["originalUriBaseIds"]["SRCROOT"]["uri"].endswith("/")


def test_sarif_fingerprints_stay_when_lines_move(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prints() -> list[str]:
        return [r["partialFingerprints"]["gpudoctor/v1"] for r in sarif(capsys, ".")["runs"][0]["results"]]

    before = prints()
    script.write_text("# a comment\n\n" + SCRIPT)
    assert prints() == before
    script.write_text(SCRIPT.replace("    total += loss.item()\n", "    total += loss.item()\n" * 2))
    twice = prints()
    assert len(set(twice)) == 2
    assert before[0] in twice


def test_github_annotations_are_capped(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f"    a{n} = loss.item()\n" for n in range(14))
    script.write_text(SCRIPT.replace("    total += loss.item()\n", lines))
    assert run(["sync", ".", "--format", "github"]) == 0
    out = capsys.readouterr().out.rstrip("\n").split("\n")
    assert len(out) == 11
    assert all(re.match(r"::warning file=train\.py,line=\d+,title=SYN001 [a-z-]+::", line) for line in out[:10])
    assert "14 warnings" in out[10]
    assert "4 beyond" in out[10]


def test_hostile_text_makes_no_second_annotation() -> None:
    finding = Finding(
        rule="SYN001", name="x", severity="error", subject="a,b:c%.py:3", message="one\n::error::two\r%0Athree \x1b[31m"
    )
    envelope = Envelope(version="1", command="sync", status="findings", exit_code=1, findings=(finding,))
    first, last, rest = render(envelope, "github").split("\n")
    assert first.startswith("::error file=a%2Cb%3Ac%25.py,line=3,")
    assert "%250A" in first
    assert "\x1b" not in first
    assert last.startswith("gpudoctor: ")
    assert rest == ""
    valid(json.loads(render(envelope, "sarif")))


def test_sarif_file_by_suffix(script: Path, tmp_path: Path) -> None:
    assert run(["sync", "train.py", "-o", str(tmp_path / "out.sarif")]) == 0
    valid(json.loads((tmp_path / "out.sarif").read_text()))


def test_ascii_without_unicode(script: Path) -> None:
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "gpudoctor", "sync", "train.py"]
    done = subprocess.run(command, capture_output=True, check=False, env=plain)
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert b"\x1b" not in done.stdout
