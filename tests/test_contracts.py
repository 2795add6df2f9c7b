"""What scripts rely on: the JSON envelope and its schema. A change here is a new schema version."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest
import report_samples as samples

from gpudoctor import codec
from gpudoctor.cli.app import run
from gpudoctor.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EXIT_USAGE
from gpudoctor.model import SCHEMA, Case, Envelope
from gpudoctor.report import render

ENVELOPE = [
    "schema",
    "version",
    "command",
    "status",
    "exit_code",
    "case",
    "cases",
    "artifacts",
    "measurements",
    "findings",
    "not_checked",
    "clean",
    "prescription",
    "errors",
    "notes",
]
PARTS = {
    "artifacts": ["file", "kind", "lines", "lines_not_understood", "truncated"],
    "measurements": [
        "metric",
        "subject",
        "value",
        "unit",
        "spread",
        "samples",
        "settings",
        "expected",
        "verdict",
        "notes",
    ],
    "findings": [
        "rule",
        "name",
        "severity",
        "subject",
        "message",
        "evidence",
        "remedies",
        "gain",
        "confidence",
        "symptoms",
    ],
    "not_checked": ["rule", "reason"],
}
PRESCRIPTION = [
    "launch",
    "loader",
    "changes",
    "trials",
    "basis",
    "proof",
    "scaling",
    "plan",
    "patch",
    "files",
    "verdict",
]
CHANGE = [
    "id",
    "rule",
    "site",
    "mechanism",
    "title",
    "change_class",
    "edits",
    "kept",
    "gain",
    "reason",
    "needs",
    "environment",
]
LAUNCH = ["command", "env", "ranks", "because"]
RANK = ["rank", "gpu", "cpus", "numa_node", "nic"]
LOADER = ["site", "arguments", "change_class", "gain", "confidence"]


def full() -> Envelope:
    """An envelope with something in every list."""
    return samples.hostile(Envelope, "text")  # type: ignore[no-any-return]


def test_envelope_keys_are_pinned() -> None:
    document = json.loads(render(full(), "json"))
    assert list(document) == ENVELOPE
    for part, keys in PARTS.items():
        assert list(document[part][0]) == keys, part
    prescription = document["prescription"]
    assert list(prescription) == PRESCRIPTION
    assert list(prescription["changes"][0]) == CHANGE
    assert list(prescription["launch"]) == LAUNCH
    assert list(prescription["launch"]["ranks"][0]) == RANK
    assert list(prescription["loader"][0]) == LOADER
    assert SCHEMA == "gpudoctor/1"


def test_exit_codes_are_pinned() -> None:
    assert (EXIT_OK, EXIT_FINDINGS, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED) == (0, 1, 2, 130, 143)


def test_schema_command_prints_what_the_output_obeys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    case = tmp_path / "case.json"
    case.write_text(codec.encode(samples.faulty_machine()))
    for words in (
        ["checkup", "--from", str(case), "--json"],
        ["topo", "--from", str(case), "--json"],
        ["read", str(case), "--json"],
        ["read", str(case), "/no/such/file", "--json"],
        ["explain", "PCI001", "--json"],
        ["bench-pcie", "--from", str(case), "--json"],
        ["patch", "/no/such/script.py", "--json"],
    ):
        code = run(words)
        document = json.loads(capsys.readouterr().out)
        validator.validate(document)
        assert document["exit_code"] == code, words
        assert document["command"] == words[0]
    for envelope in (full(), samples.envelope()):
        validator.validate(json.loads(render(envelope, "json")))


def test_an_envelope_is_read_back_as_its_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """case.json is the envelope, and every command takes it in place of the live machine."""
    first = tmp_path / "first.json"
    case = dataclasses.replace(samples.faulty_machine(), measurements=samples.measurements())
    first.write_text(codec.encode(case))
    second = tmp_path / "second.json"
    assert run(["checkup", "--from", str(first), "-o", str(second)]) == 1
    assert run(["checkup", "--from", str(second), "--json"]) == 1
    again = codec.decode(capsys.readouterr().out.partition("{")[1] + second.read_text()[1:], Envelope)
    assert isinstance(again.case, Case)
    assert again.case.measurements == ()  # they stand once, at the envelope
    assert again.measurements == samples.measurements()


def test_human_text_is_the_same_from_an_envelope(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(codec.encode(samples.faulty_machine()))
    run(["checkup", "--from", str(first), "-o", str(second)])
    told = capsys.readouterr().out
    run(["checkup", "--from", str(second)])
    again = capsys.readouterr().out
    assert again == told
