"""Rules: one rule, one file in a family folder; found by pkgutil, so that a new rule touches no other file.

A rule is pure: Case in, findings out. What the runner adds: the facts a rule needs are looked up first, a rule
that raises costs only itself, and findings are ranked by what they cost the user.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from gpudoctor import profiles
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Case, Finding, NotChecked, Profile, RuleModule, Unchecked, severity_rank
from gpudoctor.rules import needs

_CONFIDENCE = {"certain": 2, "likely": 1, "possible": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesReport:
    """What all rules said about one Case. `clean` are the codes that were checked and found nothing."""

    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    clean: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


@functools.cache
def all_rules() -> tuple[RuleModule, ...]:
    """Every rule module of the family folders, sorted by code."""
    modules: list[RuleModule] = []
    for family in pkgutil.iter_modules(__path__, f"{__name__}."):
        if family.ispkg:
            package = importlib.import_module(family.name)
            names = [found.name for found in pkgutil.iter_modules(package.__path__, f"{family.name}.")]
            modules += [cast("RuleModule", importlib.import_module(name)) for name in names]
    return tuple(sorted(modules, key=lambda module: module.RULE.code))


def find_rule(code_or_name: str) -> RuleModule:
    """The rule with this code or name, in any case; GpudoctorError with close matches when there is none."""
    wanted = code_or_name.strip().lower()
    for module in all_rules():
        if wanted in (module.RULE.code.lower(), module.RULE.name):
            return module
    known = [module.RULE.code for module in all_rules()] + [module.RULE.name for module in all_rules()]
    raise GpudoctorError(f"there is no rule {code_or_name!r}", _suggest(wanted, known))


def run_rules(case: Case, *, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> RulesReport:
    """Run the rules on a Case, all of them or the selected ones.

    `select` and `ignore` take a code, a family such as PCI, or a name; GpudoctorError for an unknown one. Limits
    that the Case's Profile does not carry are taken from profiles/thresholds.toml.
    """
    case = replace(case, profile=_complete(case.profile))
    findings: list[Finding] = []
    not_checked: list[NotChecked] = []
    clean: list[str] = []
    errors: list[str] = []
    for module in _chosen(select, ignore):
        code = module.RULE.code
        try:
            missing = needs.missing(case, module.RULE.needs)
            results = [] if missing else [*module.check(case), *needs.lost(case, module.RULE.needs)]
        except Exception as error:  # noqa: BLE001 - one broken rule must not cost the others
            reason = " ".join(str(error).split())
            errors.append(f"rule {code} failed: {type(error).__name__}: {reason}")
            continue
        unchecked = [result for result in results if isinstance(result, Unchecked)]
        found = [result for result in results if isinstance(result, Finding)]
        findings += found
        not_checked += [NotChecked(rule=code, reason=reason) for reason in [*missing, *_by_reason(unchecked)]]
        if not (missing or results):
            clean.append(code)
    return RulesReport(
        findings=_rank(_settle_claims(_rank(findings))),
        not_checked=tuple(not_checked),
        clean=tuple(clean),
        errors=tuple(errors),
    )


def rule_documentation(module: RuleModule) -> str:
    """The text that `explain` prints: code, name, severity, the docstring of the rule, and its limits with sources."""
    rule = module.RULE
    lines = [f"{rule.code} {rule.name} ({rule.severity})", "", inspect.cleandoc(module.__doc__ or "")]
    limits = profiles.threshold_sources().get(rule.code, {})
    if limits:
        lines += ["", "Limits", *(f"    {name}: {text}" for name, text in limits.items())]
    return "\n".join(lines)


def _complete(profile: Profile) -> Profile:
    own = profile.thresholds
    merged = {code: {**limits, **own.get(code, {})} for code, limits in profiles.thresholds().items()}
    return replace(profile, thresholds={**own, **merged})


def leaves(code: str, *, select: Sequence[str], ignore: Sequence[str]) -> bool:
    """Whether `select` and `ignore`, as `run_rules` takes them, leave what is done for the rule `code`."""
    if select and not any(code in _matching(text) for text in select):
        return False
    return not any(code in _matching(text) for text in ignore)


def _chosen(select: Sequence[str], ignore: Sequence[str]) -> list[RuleModule]:
    return [module for module in all_rules() if leaves(module.RULE.code, select=select, ignore=ignore)]


def _matching(text: str) -> set[str]:
    wanted = text.strip().lower()
    found = {
        module.RULE.code
        for module in all_rules()
        if wanted in (module.RULE.code.lower(), family(module.RULE.code).lower(), module.RULE.name)
    }
    if not found:
        rules = [module.RULE for module in all_rules()]
        families = sorted({family(rule.code) for rule in rules})
        known = [*(rule.code for rule in rules), *families, *(rule.name for rule in rules)]
        raise GpudoctorError(f"there is no rule, family or name {text!r}", _suggest(wanted, known))
    return found


def family(code: str) -> str:
    """The family of a rule code: PCI for PCI001."""
    return code.rstrip("0123456789")


def _suggest(wanted: str, known: Sequence[str]) -> str:
    spelling = {name.lower(): name for name in known}
    close = difflib.get_close_matches(wanted, spelling, n=3, cutoff=0.5)
    return f"did you mean {', '.join(spelling[name] for name in close)}?" if close else "`gpudoctor rules` lists them"


def _by_reason(unchecked: Sequence[Unchecked]) -> list[str]:
    """One reason a line, with the subjects that share it in front."""
    subjects: dict[str, list[str]] = {}
    for result in unchecked:
        subjects.setdefault(result.reason, []).extend([result.subject] if result.subject else [])
    return [f"{', '.join(names)}: {reason}" if names else reason for reason, names in subjects.items()]


def _rank(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """By what they cost: severity, then the most that can be gained, then confidence, then code and subject."""

    def cost(finding: Finding) -> tuple[int, float, int, str, str]:
        gain = finding.gain
        factor = 1.0 if gain is None or gain.unit not in ("x", "%") else gain.high
        if gain is not None and gain.unit == "%":
            factor = 1.0 + gain.high / 100
        return (
            -severity_rank(finding.severity),
            -factor,
            -_CONFIDENCE[finding.confidence],
            finding.rule,
            finding.subject,
        )

    return tuple(sorted(findings, key=cost))


def _settle_claims(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Let each symptom belong to one finding only: the first that names it (findings come ranked).

    A finding that loses all its symptoms explains the same cost again. It stays, for its remedy differs, but its gain
    would count twice and is dropped.
    """
    owner: dict[str, Finding] = {}
    settled = []
    for finding in findings:
        mine = tuple(symptom for symptom in finding.symptoms if symptom not in owner)
        if finding.symptoms and not mine:
            first = owner[finding.symptoms[0]]
            shared = f"the same cost as in {first.rule} at {first.subject}"
            finding = replace(finding, symptoms=(shared,), gain=None)
        else:
            finding = replace(finding, symptoms=mine)
        owner.update(dict.fromkeys(mine, finding))
        settled.append(finding)
    return tuple(settled)


__all__ = ["RulesReport", "all_rules", "family", "find_rule", "rule_documentation", "run_rules"]
