"""Two sources give different values for one fact.

What it means
    NVML and the kernel, or two pasted texts, do not agree. Both values are kept, and no other rule relies on the
    fact: one of them is wrong, was taken at another time, or means something else.
Why it costs
    Nothing by itself. But a decision that rests on the wrong one is wrong: with power management of the link off,
    one driver printed width x1 where the link had x8.
How we know
    The readers join facts by bus id or UUID and keep every value with its source. A fact that is unknown in one
    source (numa_node of -1, "N/A") disagrees with nothing.
Fix
    Read the fact again with both sources at the same moment, under load where it depends on load. When they still
    differ, trust the kernel for topology and the driver for the state of the GPU, and report it.
When to ignore
    The texts were taken at different times, or before and after a change.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Conflict, ConflictValue, Evidence, Example, Finding, Gpu, Remedy, Rule, Unchecked
from gpudoctor.rules.evidence import subject_of_path

RULE = Rule(code="SWV010", name="sources-disagree", severity="unknown", needs=(), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for conflict in case.conflicts:
        said = "; ".join(f"{value.value} ({_origin(value)})" for value in conflict.values)
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=subject_of_path(case, conflict.path),
            message=f"sources disagree about {conflict.path}: {said}",
            evidence=tuple(
                Evidence(fact=conflict.path, value=value.value, source=_origin(value)) for value in conflict.values
            ),
            remedies=(Remedy(kind="measure", text="read the fact again with both sources at the same moment"),),
            confidence="certain",
        )


def _origin(value: ConflictValue) -> str:
    return value.origin if value.line is None else f"{value.origin}:{value.line}"


EXAMPLES = (
    Example(
        name="width by NVML and by sysfs",
        kind="fires",
        case=Case(
            gpus=(Gpu(index=3, bdf="0000:3b:00.0"),),
            conflicts=(
                Conflict(
                    path="gpus[0000:3b:00.0].pcie.width",
                    values=(ConflictValue(value="1", origin="nvml"), ConflictValue(value="8", origin="sysfs")),
                ),
            ),
        ),
        subjects=("gpu:3",),
    ),
    Example(
        name="a pair in two pastes",
        kind="fires",
        case=Case(
            conflicts=(
                Conflict(
                    path="pairs[gpu:0,gpu:1].path",
                    values=(
                        ConflictValue(value="PIX", origin="a.txt", line=2),
                        ConflictValue(value="SYS", origin="b.txt", line=2),
                    ),
                ),
            ),
        ),
        subjects=("gpu:0-gpu:1",),
    ),
    Example(name="no disagreement", kind="quiet", case=Case(gpus=(Gpu(index=0),))),
)
