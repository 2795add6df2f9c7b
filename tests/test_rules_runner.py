"""The runner: discovery, selection, facts that lack, broken rules, ranking; and Cases that mean harm."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from gpudoctor import codec, profiles, rules
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import (
    Case,
    Conflict,
    Finding,
    Gain,
    Gap,
    Gpu,
    Host,
    Limits,
    LoaderChoice,
    PcieLink,
    Profile,
    Rule,
    RuleModule,
    Severity,
    Unchecked,
)
from gpudoctor.rules import studies
from gpudoctor.rules.loader import workers_zero

NASTY = "a\n[red]b\x1b[31m'\";$(rm -rf /)`|<&>\x00\u202e"


def module(code: str, check: Any, **declared: Any) -> RuleModule:
    made: Any = types.SimpleNamespace()
    made.RULE = Rule(
        **{"code": code, "name": code.lower(), "severity": "error", "needs": (), "since": "0.1", **declared}
    )
    made.check, made.EXAMPLES = check, ()
    return typing.cast("RuleModule", made)


def finding(code: str, severity: Severity = "error", **fields: Any) -> Finding:
    return Finding(**{"rule": code, "name": code, "severity": severity, "subject": "host", "message": "m", **fields})


def with_rules(monkeypatch: pytest.MonkeyPatch, *modules: RuleModule) -> None:
    monkeypatch.setattr(rules, "all_rules", lambda: modules)


def test_an_empty_case_is_not_clean() -> None:
    report = rules.run_rules(Case())
    assert report.findings == ()
    assert report.errors == ()
    # No conflict among no facts is all that can be said.
    assert report.clean == ("SWV010",)
    assert {entry.rule for entry in report.not_checked} == {m.RULE.code for m in rules.all_rules()} - {"SWV010"}


def test_reasons_come_from_the_gaps() -> None:
    gaps = (
        Gap(path="limits", reason="no permission"),
        Gap(path="gpus[0000:01:00.0].pcie.width", reason="not supported"),
        Gap(path="gpus[0000:02:00.0].pcie", reason="not in this artifact"),
        Gap(path="host.gpus_on_bus", reason="not present", detail="no /sys/bus/pci"),
    )
    gpus = (Gpu(index=0, bdf="0000:01:00.0", pcie=PcieLink()), Gpu(index=1, bdf="0000:02:00.0"))
    reasons = {entry.rule: entry.reason for entry in rules.run_rules(Case(gpus=gpus, gaps=gaps)).not_checked}
    assert reasons["CTR001"] == "limits.shm_bytes: no permission"
    assert reasons["PCI001"] == "gpus.pcie.width: not in this artifact or not supported"
    assert reasons["SWV005"] == "host.gpus_on_bus: not present (no /sys/bus/pci)"
    assert "no training command was watched" in reasons["LDR001"]
    assert {entry.reason for entry in rules.run_rules(Case()).not_checked if entry.rule == "PCI001"} == {
        "no GPU is known"
    }
    nothing = rules.run_rules(Case(host=Host(gpus_on_bus=0)), select=["NUM001"])
    assert [entry.reason for entry in nothing.not_checked] == ["there is no NVIDIA GPU on the PCI bus"]


def test_lost_gpus_are_never_a_silent_pass() -> None:
    fine = Gpu(index=0, pcie=PcieLink(width=16, max_width=16, state="load"))
    gone = Gpu(index=1, pcie=PcieLink(width=16, max_width=16), lost=True, lost_reason="GPU is\nlost")
    report = rules.run_rules(Case(gpus=(fine, gone)), select=["PCI001"])
    assert [entry.reason for entry in report.not_checked] == ["gpu:1: lost (GPU is lost)"]
    assert report.clean == ()
    report = rules.run_rules(Case(gpus=(gone,)))
    assert report.clean == ("SWV010",)
    assert "no GPU answers (GPU is lost)" in {entry.reason for entry in report.not_checked}


def test_unchecked_subjects_are_grouped_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(case: Case) -> Iterator[Finding | Unchecked]:
        yield Unchecked(reason="unreadable", subject="gpu:0")
        yield finding("AAA001", subject="gpu:1")
        yield Unchecked(reason="unreadable", subject="gpu:2")
        yield Unchecked(reason="hidden")

    with_rules(monkeypatch, module("AAA001", check))
    report = rules.run_rules(Case())
    assert [entry.reason for entry in report.not_checked] == ["gpu:0, gpu:2: unreadable", "hidden"]
    assert [found.subject for found in report.findings] == ["gpu:1"]
    assert report.clean == ()


def test_a_rule_that_raises_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Case) -> Iterator[Finding]:
        yield finding("AAA001")
        raise ValueError("two\nlines")

    def fine(case: Case) -> Iterator[Finding]:
        yield finding("BBB001")

    with_rules(
        monkeypatch, module("AAA001", broken), module("BBB001", fine), module("CCC001", fine, needs=("nonsense",))
    )
    report = rules.run_rules(Case())
    assert [found.rule for found in report.findings] == ["BBB001"]
    assert report.errors[0] == "rule AAA001 failed: ValueError: two lines"
    assert report.errors[1].startswith("rule CCC001 failed: AttributeError")
    assert report.clean == ()


def test_ranking_by_severity_then_gain_then_confidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def gain(high: float, unit: str) -> Gain:
        return Gain(low=1, high=high, unit=unit, basis="estimate", source="test")

    found = [
        finding("AAA001", "unknown", gain=gain(9, "x")),
        finding("BBB001", "error", gain=gain(20, "%")),
        finding("CCC001", "error", gain=gain(1.5, "x")),
        finding("DDD001", "error", confidence="possible"),
        finding("EEE001", "error", confidence="certain", gain=gain(40, "GB/s")),
        finding("FFF001", "critical"),
    ]
    with_rules(monkeypatch, module("AAA001", lambda case: iter(found)))
    order = [result.rule for result in rules.run_rules(Case()).findings]
    assert order == ["FFF001", "CCC001", "BBB001", "EEE001", "DDD001", "AAA001"]


def test_a_symptom_belongs_to_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    some = Gain(low=1, high=2, unit="x", basis="estimate", source="test")
    found = [
        finding("AAA001", "warning", symptoms=("s1",), gain=some),
        finding("BBB001", "error", symptoms=("s1", "s2"), gain=some),
        finding("CCC001", "warning", symptoms=("s1", "s3"), gain=some),
        finding("DDD001", "info", gain=some),
    ]
    with_rules(monkeypatch, module("AAA001", lambda case: iter(found)))
    result = {f.rule: (f.symptoms, f.gain is not None) for f in rules.run_rules(Case()).findings}
    assert result == {
        "BBB001": (("s1", "s2"), True),
        "CCC001": (("s3",), True),
        "AAA001": (("the same cost as in BBB001 at host",), False),
        "DDD001": ((), True),
    }


def test_selection_by_code_family_and_name() -> None:
    def checked(**chosen: list[str]) -> set[str]:
        report = rules.run_rules(Case(), **chosen)
        return {entry.rule for entry in report.not_checked} | set(report.clean)

    everything = {m.RULE.code for m in rules.all_rules()}
    assert checked() == everything
    family = {code for code in everything if code.startswith("PCI")}
    assert {"PCI001", "PCI002", "PCI003"} <= family
    assert checked(select=["pci"]) == family
    assert checked(select=["PCI", "workers-zero"], ignore=["PCI002"]) == family - {"PCI002"} | {"LDR001"}
    assert checked(ignore=["NUM", "P2P"]) == {code for code in everything if code[:3] not in ("NUM", "P2P")}


@pytest.mark.parametrize(
    ("text", "hint"),
    [("PCI01", "PCI001"), ("PCJ", "PCI"), ("worker-zero", "workers-zero"), ("qqqqqq", "`gpudoctor rules` lists them")],
)
def test_unknown_selection_names_close_matches(text: str, hint: str) -> None:
    for chosen in ({"select": [text]}, {"ignore": [text]}):
        with pytest.raises(GpudoctorError) as raised:
            rules.run_rules(Case(), **chosen)
        assert repr(text) in raised.value.message
        assert hint in (raised.value.hint or "")


def test_find_rule() -> None:
    assert rules.find_rule(" pci001 ").RULE.name == "link-width-below-max"
    assert rules.find_rule("sources-disagree").RULE.code == "SWV010"
    with pytest.raises(GpudoctorError, match="'PCI999'") as raised:
        rules.find_rule("PCI999")
    assert "did you mean PCI00" in (raised.value.hint or "")


def test_limits_of_the_case_come_first() -> None:
    case = Case(gpus=(Gpu(index=0),), limits=Limits(shm_bytes=100 * 2**20))
    own = Profile(thresholds={"CTR001": {"default_shm_bytes": 200.0 * 2**20}})
    assert rules.run_rules(case, select=["CTR001"]).findings == ()
    found = rules.run_rules(dataclasses.replace(case, profile=own), select=["CTR001"]).findings
    assert [f.subject for f in found] == ["host"]


def poison(value: Any, text: str, numbers: Callable[[], int]) -> Any:
    """The same model with every free text and every integer replaced; literals and paths keep their grammar."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        changed = {}
        for field in dataclasses.fields(value):
            if hints[field.name] in (str, str | None) and field.name not in ("path", "a", "b", "metric"):
                changed[field.name] = text
            elif hints[field.name] in (int, int | None) and field.name != "version":
                changed[field.name] = numbers()
            else:
                changed[field.name] = poison(getattr(value, field.name), text, numbers)
        return dataclasses.replace(value, **changed)
    return tuple(poison(item, text, numbers) for item in value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("seed", range(20))
def test_hostile_cases_crash_no_rule(seed: int) -> None:
    random = Random(seed)
    for rule in rules.all_rules():
        for example in rule.EXAMPLES:
            case = poison(example.case, NASTY, lambda: random.choice((-1, 0, 1, 2, 8, 16, 2**63)))
            report = rules.run_rules(case)
            assert report.errors == (), f"{rule.RULE.code}: {example.name}"
            codec.encode(report.findings)  # refuses numbers that are not finite


def test_hostile_paths_of_conflicts() -> None:
    paths = ["", "[", "gpus[", "gpus[]", "gpus[a]b]c", NASTY, f"gpus[{NASTY}].x", "pairs[,,,]"]
    case = Case(host=Host(hostname=NASTY), conflicts=tuple(Conflict(path=path, values=()) for path in paths))
    report = rules.run_rules(case, select=["SWV010"])
    assert len(report.findings) == len(paths)
    assert report.errors == ()


@pytest.mark.parametrize(
    ("limits", "study", "text"),
    [
        (Limits(), None, "num_workers=2 to 4, at most (allowed CPUs or quota) / ranks"),
        (Limits(allowed_cpus=(0, 1)), None, "num_workers=1 to begin with: 2 CPUs may be used"),
        (Limits(allowed_cpus=tuple(range(4))), None, "num_workers=2 to 3 to begin with: 4 CPUs may be used"),
        (Limits(allowed_cpus=tuple(range(64)), cpu_quota=6.0), None,
         "num_workers=2 to 4 to begin with: 6 CPUs may be used"),
        (Limits(allowed_cpus=(0, 1)), {"verdict": "change"},
         "num_workers=6: the best of what was tried on this dataset"),
        (Limits(allowed_cpus=(0, 1)), {"verdict": "no verdict"}, "num_workers=1 to begin with: 2 CPUs may be used"),
    ],
)  # fmt: skip
def test_the_number_of_workers_that_is_advised(limits: Limits, study: dict[str, Any] | None, text: str) -> None:
    case = dataclasses.replace(workers_zero.EXAMPLES[0].case, limits=limits)
    if study is not None:
        choice = LoaderChoice(arguments={"num_workers": 6})
        known = studies.case_of(loader={"site": "train.py:45"}, choice=choice, **study).loader
        case = dataclasses.replace(case, loader=known)
    profiled = dataclasses.replace(case, profile=Profile(thresholds=profiles.thresholds()))
    (found,) = workers_zero.check(profiled)
    assert isinstance(found, Finding)
    assert found.remedies[0].text == text
