"""Renderers: what people read at 60 to 200 columns, in ASCII, without colour; and that nothing from outside acts."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from xml.etree import ElementTree as ET

import pytest
import report_samples as samples

from gpudoctor import codec
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Case, Envelope, Finding, NotChecked
from gpudoctor.report import Form, form_of, render, render_topo, write_files
from gpudoctor.report.human import finding_lines
from gpudoctor.report.markdown import code, text
from gpudoctor.report.text import Style, columns, number, printable, ranges, size

WIDTHS = (60, 80, 120, 200)
FORMS: tuple[Form, ...] = ("human", "json", "markdown", "junit")
# Control characters beside newline, bidi overrides, zero-width characters, surrogates.
ACTING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def human(envelope: Envelope, **style: typing.Any) -> str:
    return render(envelope, "human", **style)


def test_printable_shows_what_would_act() -> None:
    assert printable("a\nb\x1b[31m\u202e\u200b") == "a\\nb\\x1b[31m\\u202e\\u200b"
    assert printable("naïve 日本") == "naïve 日本"
    assert printable("naïve \U0001f600", unicode=False) == "na\\xefve \\U0001f600"


def test_columns_counts_wide_and_combining_characters() -> None:
    assert columns("abc") == 3
    assert columns("日本") == 4
    assert columns("e\u0301") == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (0.1234, "0.123"), (5.0, "5.00"), (55.43, "55.4"), (99.97, "100"), (1240.4, "1240")],
)
def test_numbers_have_three_digits(value: float, expected: str) -> None:
    assert number(value) == expected


def test_sizes_and_ranges() -> None:
    assert size(126 << 30) == "126 GiB"
    assert size(512) == "512 B"
    assert size(3 << 40) == "3 TiB"
    assert ranges((3, 1, 2, 28, 7, 8)) == "1-3,7-8,28"
    assert ranges(()) == ""


@pytest.mark.parametrize("width", WIDTHS)
def test_human_text_fits_the_terminal(width: int) -> None:
    for line in human(samples.envelope(), width=width).splitlines():
        assert columns(line) <= width, line


def test_human_text_is_never_folded_when_piped() -> None:
    told = human(samples.envelope(), width=None)
    assert "the link runs at x4, card and slot allow x16" in told
    assert "no training command was watched (LDR001 SYN001); limits.shm_bytes: not probed (CTR001)" in told
    assert "\x1b" not in told


def test_human_text_has_all_that_counts() -> None:
    told = human(samples.envelope())
    for part in (
        "node-a · 7x A100-PCIE-40GB · 1x lost GPU · driver 570.86.10 · CUDA 12.8",
        " FAIL PCI001  gpu:2  the link runs at x4",
        "      seen   gpus[0000:38:00.0].pcie.width = 4, expected 16 (sysfs)",
        "      fix    reseat the card or replace the riser",
        "             undo: set it back to x4x4x4x4",
        "      gain   2.5\u20133.9x (profile: profiles/gpus.toml)",
        " WARN P2P005  gpu:0-gpu:4",
        " ASK  PCI003  link-speed-unknown-at-idle  2 times",
        "      ask    gpudoctor bench-pcie",
        "kept     LDR001 train.py:45  num_workers=4, pin_memory=True  1.7\u20131.9x",
        "not kept SYN001 train.py:88  sum the loss on the device: adds 0.3 %, less than the noise",
        "advice   CPY001 train.py:71  non_blocking=True: the source is not pinned",
        "tune.speedup 2.92x, interval 2.85\u20132.99x",
        "steps/s                   5.02   14.6",
        "proof    identical: parameters after 20 steps, 40 batches",
        "gpudoctor-out/train.patch",
        "waiting for the loader   120 ms/step  60 %",
        "train.py:88  item()           30.0 ms/step  1x a step",
        "gpu:2 · NVIDIA A100-PCIE-40GB · PCIe 4.0 x4 under load",
        "4 of 24 copies were slow: other load?",
        " OK 2 rules",
        "1 critical, 1 error, 1 warning, 1 info, 2 open questions.",
    ):
        assert part in told, part


def test_ascii_text_has_only_ascii() -> None:
    envelope = samples.envelope()
    assert human(envelope, unicode=False).isascii()
    for matrix in (False, True):
        case = samples.faulty_machine()
        assert render_topo(case, matrix=matrix, width=60, unicode=False, color=False).isascii()


def test_colour_only_repeats_the_words() -> None:
    plain = human(samples.envelope(), width=100)
    coloured = human(samples.envelope(), width=100, color=True)
    assert "\x1b[31;1mFAIL\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_findings_of_one_rule_share_a_block_only_with_the_same_remedies() -> None:
    first, second = samples.findings()[-2:]
    assert sum("ask  " in line for line in finding_lines([first, second], Style())) == 1
    other = dataclasses.replace(second, remedies=())
    assert len(finding_lines([first, other], Style())) > len(finding_lines([first], Style()))


def test_evidence_is_cut_unless_verbose() -> None:
    base = samples.findings()[0]
    finding = dataclasses.replace(base, evidence=base.evidence * 6)
    assert "and 2 more (-v)" in "\n".join(finding_lines([finding], Style()))
    assert "more" not in "\n".join(finding_lines([finding], Style(verbose=1)))


def test_reasons_name_gpus_in_short() -> None:
    envelope = samples.envelope(not_checked=(NotChecked(rule="PCI002", reason="gpu:0, gpu:1, gpu:2, gpu:5: idle"),))
    assert "NOT CHECKED 1: gpu:0-2,5: idle (PCI002)" in human(envelope)


def test_nothing_found_says_so() -> None:
    envelope = Envelope(
        version="0", command="checkup", status="clean", exit_code=0, case=samples.switch_machine(), clean=("PCI001",)
    )
    told = human(envelope)
    assert "nothing found." in told
    assert "next: gpudoctor bench-pcie" in told


def test_case_without_gpu_says_so() -> None:
    envelope = Envelope(version="0", command="checkup", status="clean", exit_code=0, case=Case())
    assert human(envelope) == "no NVIDIA GPU found\n"


# junit


def suite_of(document: str) -> ET.Element:
    """The suite, after the rules of the widely used schema of Jenkins (junit-10.xsd) that concern us."""
    root = ET.fromstring(document)
    assert root.tag == "testsuites"
    (suite,) = root
    assert suite.tag == "testsuite"
    assert suite.attrib["name"]
    children = [child.tag for child in suite]
    assert set(children) <= {"properties", "testcase"}
    cases = suite.findall("testcase")
    for number_of, tag in (("tests", None), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        found = cases if tag is None else [case for case in cases if case.find(tag) is not None]
        assert int(suite.attrib[number_of]) == len(found), number_of
        if number_of != "skipped":
            assert int(root.attrib[number_of]) == len(found)
    names = [(case.attrib["classname"], case.attrib["name"]) for case in cases]
    assert len(names) == len(set(names))
    for case in cases:
        assert float(case.attrib["time"]) >= 0
        assert [child.tag for child in case] in ([], ["failure"], ["error"], ["skipped"], ["system-out"])
    return suite


def outcomes(suite: ET.Element) -> dict[str, str]:
    return {case.attrib["name"]: case[0].tag if len(case) else "passed" for case in suite.findall("testcase")}


def test_junit_has_a_case_per_rule_and_subject() -> None:
    suite = suite_of(render(samples.envelope(), "junit"))
    found = outcomes(suite)
    assert found["PCI001 link-width-below-max gpu:2"] == "failure"
    assert found["SWV005 driver-not-loaded host"] == "failure"
    assert found["P2P005 p2p-slower-than-staged gpu:0-gpu:4"] == "system-out"
    assert found["PCI003 link-speed-unknown-at-idle gpu:6"] == "system-out"
    assert found["LDR001 not checked"] == "skipped"
    assert found["PCI002"] == "passed"
    assert suite.attrib["hostname"] == "node-a"


@pytest.mark.parametrize(
    ("fail_on", "failures"), [("info", 4), ("warning", 3), ("error", 2), ("critical", 1), ("never", 0)]
)
def test_junit_fails_from_the_wanted_severity_on(fail_on: str, failures: int) -> None:
    assert suite_of(render(samples.envelope(), "junit", fail_on=fail_on)).attrib["failures"] == str(failures)


def test_junit_tells_crashed_rules_unreadable_inputs_and_missing_gpus() -> None:
    errors = ("rule NUM005 failed: KeyError: 'x'", "cannot read a.txt", "require-gpu: 0 GPUs answer, 1 required")
    found = outcomes(suite_of(render(samples.envelope(errors=errors), "junit")))
    assert found["NUM005 crashed"] == "error"
    assert found["input or tool"] == "error"
    assert found["require-gpu"] == "failure"
    met = samples.envelope(notes=("require-gpu: 8 GPUs answer, 1 required",))
    assert outcomes(suite_of(render(met, "junit")))["require-gpu"] == "system-out"


def test_junit_names_stay_apart() -> None:
    twice = samples.envelope(
        findings=samples.findings()[:1] * 2,
        not_checked=(NotChecked(rule="LDR001", reason="a"), NotChecked(rule="LDR001", reason="b")),
        errors=("cannot read a", "cannot read b"),
    )
    suite_of(render(twice, "junit"))


# markdown


def test_markdown_report_has_its_sections() -> None:
    told = render(samples.envelope(), "markdown")
    for part in (
        "# gpudoctor checkup: findings",
        "## Result",
        "## Findings",
        "## Measurements",
        "## Topology",
        "## Checked",
    ):
        assert part in told
    assert "| FAIL | PCI001 | gpu:2 | the link runs at x4, card and slot allow x16 |" in told
    assert "`numactl --cpunodebind=1 --membind=1 python train.py`" in told


def test_markdown_escapes_markup() -> None:
    assert text("a|b<i>`x`[y](z) @me #1") == "a\\|b&lt;i&gt;\\`x\\`\\[y\\]\\(z\\) \\@me \\#1"
    assert code("a`b|c") == "`` a`b|c ``"


def table_rows(told: str) -> list[str]:
    return [line for line in told.splitlines() if line.startswith("| ")]


# hostile cases


def hostile_envelope() -> Envelope:
    envelope: Envelope = samples.hostile(Envelope)
    finding: Finding = samples.hostile(Finding)
    # references that resolve, so that every renderer walks its whole way
    case = dataclasses.replace(
        envelope.case or Case(),
        pairs=tuple(
            dataclasses.replace(pair, a="gpu:3", b="nic:" + samples.HOSTILE) for pair in (envelope.case or Case()).pairs
        ),
    )
    gpu_finding = dataclasses.replace(finding, subject="gpu:3")
    return dataclasses.replace(
        envelope,
        case=case,
        cases=(),
        findings=(finding, gpu_finding),
        errors=(samples.HOSTILE, f"require-gpu: {samples.HOSTILE}"),
    )


@pytest.mark.parametrize("form", ["human", "markdown", "junit"])
@pytest.mark.parametrize("several", [False, True])
def test_hostile_strings_harm_no_renderer(form: Form, several: bool) -> None:
    envelope = hostile_envelope()
    if several:
        envelope = dataclasses.replace(envelope, cases=(envelope.case, envelope.case), case=None)
    told = render(envelope, form, width=80, verbose=1)
    assert not ACTING.search(told)
    if form == "junit":
        suite_of(told)
    if form == "markdown":
        outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", told, flags=re.DOTALL | re.MULTILINE)
        outside = re.sub(r"(?<![\\`])(`+) .*? \1(?!`)", "", outside)  # code spans
        assert "<script>" not in outside
        assert "[bold]" not in outside.replace("\\[bold\\]", "")
        for row in table_rows(told):
            assert len(re.findall(r"(?<!\\)\|", row)) in (3, 6), row


def test_hostile_strings_stay_on_their_line() -> None:
    calm = hostile_envelope()
    lines = human(calm).count("\n")
    plain = typing.cast("Envelope", samples.hostile(Envelope, "x"))
    finding = typing.cast("Finding", samples.hostile(Finding, "x"))
    plain = dataclasses.replace(
        plain,
        cases=(),
        findings=(finding, dataclasses.replace(finding, subject="gpu:3")),
        errors=("x", "require-gpu: x"),
    )
    assert abs(human(plain).count("\n") - lines) <= 2


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("unicode", [False, True])
def test_hostile_topology_harms_no_terminal(matrix: bool, unicode: bool) -> None:
    envelope = hostile_envelope()
    assert envelope.case is not None
    told = render_topo(envelope.case, matrix=matrix, width=60, unicode=unicode, color=False, findings=envelope.findings)
    assert told
    assert not ACTING.search(told)


def test_hostile_case_survives_json() -> None:
    # a lone surrogate is no text: JSON cannot carry it, and no reader produces it
    tame = samples.HOSTILE.replace("\ud800", "")
    envelope = dataclasses.replace(samples.hostile(Envelope, tame), cases=())
    document = json.loads(render(envelope, "json"))
    assert document["findings"][0]["message"] == tame
    assert codec.decode(render(envelope, "json"), Envelope).findings == envelope.findings


# files


def test_files_take_their_format_from_the_suffix(tmp_path: typing.Any) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.xml", "c.md", "D.JSON")]
    write_files(samples.envelope(), paths)
    assert json.loads((tmp_path / "a.json").read_text())["schema"] == "gpudoctor/1"
    suite_of((tmp_path / "b.xml").read_text())
    assert (tmp_path / "c.md").read_text().startswith("# gpudoctor")
    assert (tmp_path / "D.JSON").read_text() == (tmp_path / "a.json").read_text()


def test_unknown_suffix_and_unwritable_file_are_clear_errors(tmp_path: typing.Any) -> None:
    with pytest.raises(GpudoctorError, match=r"no format has the suffix '\.html'") as caught:
        form_of("x.html")
    assert caught.value.hint == "known suffixes: .json .md .sarif .xml"
    with pytest.raises(GpudoctorError, match="No such file or directory"):
        write_files(samples.envelope(), [str(tmp_path / "no" / "a.json")])
