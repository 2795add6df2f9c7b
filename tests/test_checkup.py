"""The pipeline: status and exit code, --require-gpu, several hosts."""

from __future__ import annotations

import dataclasses

import pytest
import report_samples as samples

from gpudoctor import checkup
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Case, Envelope, Finding, Severity


def finding(severity: Severity) -> Finding:
    return dataclasses.replace(samples.findings()[0], severity=severity)


@pytest.mark.parametrize(
    ("severities", "errors", "fail_on", "expected"),
    [
        ([], [], "error", ("clean", 0)),
        (["unknown"], [], "info", ("clean", 0)),
        (["info"], [], "error", ("findings", 0)),
        (["info"], [], "info", ("findings", 1)),
        (["warning"], [], "error", ("findings", 0)),
        (["warning", "error"], [], "error", ("findings", 1)),
        (["error"], [], "critical", ("findings", 0)),
        (["critical"], [], "never", ("findings", 0)),
        ([], ["cannot read x"], "error", ("failed", 2)),
        (["critical"], ["cannot read x"], "error", ("failed", 2)),
        ([], ["require-gpu: 0 GPUs answer, 1 required"], "never", ("failed", 1)),
        ([], ["require-gpu: 0 GPUs answer, 1 required", "cannot read x"], "error", ("failed", 2)),
    ],
)
def test_status_and_exit_code(
    severities: list[Severity], errors: list[str], fail_on: str, expected: tuple[str, int]
) -> None:
    assert checkup.outcome([finding(severity) for severity in severities], errors, fail_on) == expected


def examine(case: Case, **more: object) -> Envelope:
    return checkup.examine(case, command="checkup", **more)  # type: ignore[arg-type]


def test_faulty_machine_fails() -> None:
    envelope = examine(samples.faulty_machine())
    assert (envelope.status, envelope.exit_code) == ("findings", 1)
    assert {("PCI001", "gpu:2")} <= {(item.rule, item.subject) for item in envelope.findings}
    assert envelope.case is not None
    assert envelope.case.profile.thresholds  # rules read no files: the limits were put into the Case


def test_rules_can_be_chosen() -> None:
    assert {item.rule for item in examine(samples.faulty_machine(), select=["PCI001"]).findings} == {"PCI001"}
    assert "PCI001" not in {item.rule for item in examine(samples.faulty_machine(), ignore=["PCI"]).findings}
    with pytest.raises(GpudoctorError, match="NOPE"):
        examine(samples.faulty_machine(), select=["NOPE"])


def test_unknown_severity_is_a_usage_error() -> None:
    with pytest.raises(GpudoctorError, match="'fatal'"):
        examine(Case(), fail_on="fatal")


def test_no_gpu_is_a_note() -> None:
    envelope = examine(Case())
    assert (envelope.exit_code, envelope.errors) == (0, ())
    assert "no NVIDIA GPU found; rules about GPUs were not checked" in envelope.notes


def test_required_gpus_are_those_that_answer() -> None:
    case = samples.faulty_machine()  # 8 on the bus, one lost
    met = examine(case, require_gpu=7, fail_on="never")
    assert met.exit_code == 0
    assert "require-gpu: 7 GPUs answer, 7 required" in met.notes
    assert any(note.startswith("gpu:5 (0000:68:00.0) does not answer: GPU is lost") for note in met.notes)
    unmet = examine(case, require_gpu=8, fail_on="never")
    assert unmet.errors == ("require-gpu: 7 GPUs answer, 8 required (8 on the bus)",)
    assert (unmet.status, unmet.exit_code) == ("failed", 1)
    assert examine(Case(), require_gpu=1).exit_code == 1
    assert checkup.examine_all((), command="read", require_gpu=1).exit_code == 1


def test_measurements_reach_the_rules_and_stand_once() -> None:
    extra = samples.measurements()
    case = dataclasses.replace(samples.switch_machine(), measurements=extra[:2])
    envelope = examine(case, measurements=extra)
    assert envelope.measurements == extra
    assert envelope.case is not None
    assert envelope.case.measurements == extra


def test_several_hosts_are_told_apart() -> None:
    bad = samples.faulty_machine()
    good = dataclasses.replace(samples.switch_machine(), host=dataclasses.replace(bad.host, hostname="node-b"))
    envelope = checkup.examine_all((good, bad), command="read")
    assert envelope.case is None
    assert len(envelope.cases) == 2
    named = [item.message for item in envelope.findings if item.rule == "PCI001"]
    assert all(message.startswith("node-a: ") for message in named)
    assert named
    assert "PCI001" not in envelope.clean
    severities = [checkup.severity_rank(item.severity) for item in envelope.findings]
    assert severities == sorted(severities, reverse=True)
