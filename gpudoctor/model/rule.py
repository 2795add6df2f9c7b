"""What a rule file declares. One rule, one file: docstring, RULE, check, EXAMPLES."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from gpudoctor.model.case import Case
from gpudoctor.model.finding import Finding, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`needs` names the facts without which the rule is *not checked*: fact prefixes such as "gpus",
    "gpus.pcie.width", "limits.shm_bytes", "watched", "measurements.h2d"."""

    code: str
    name: str
    severity: Severity
    needs: tuple[str, ...]
    since: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """Yielded by a check in place of a finding when the facts of one subject are gaps."""

    reason: str
    subject: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A Case and what the rule must say about it. `subjects` are the subjects that must fire."""

    name: str
    kind: Literal["fires", "quiet", "lacks"]
    case: Case
    subjects: tuple[str, ...] = ()
    severity: Severity | None = None  # when it differs from the catalogue's


class RuleModule(Protocol):
    RULE: Rule
    EXAMPLES: tuple[Example, ...]
    __doc__: str | None

    @staticmethod
    def check(case: Case) -> Iterator[Finding | Unchecked]: ...
