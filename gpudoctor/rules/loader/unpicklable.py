"""The dataset cannot be sent to a spawned worker.

What it means
    With spawn and forkserver the dataset, the collate function and worker_init_fn are pickled. Lambdas, functions
    inside functions, open files and locks cannot be.
Why it costs
    num_workers above 0 fails at once. On Linux fork hides it, until the default start method changes (Python 3.14) or
    the code runs on another system (https://github.com/mehta-lab/VisCy/issues/417).
How we know
    tune-loader pickled them in a child and threw the bytes away; or a worker failed with Python's message.
Fix
    Functions at module level, functools.partial in place of lambdas, __getstate__ that leaves handles out.
When to ignore
    The start method stays fork: then this is an info line.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, faults

RULE = Rule(code="LDR015", name="unpicklable-under-spawn", severity="error", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    failed = [fault.text for fault in faults(study) if fault.kind == "pickle"]
    reason = failed[0] if failed else study.preflight.pickle_error
    if reason is None:
        return
    forked = study.start_method == "fork" and not failed
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity="info" if forked else RULE.severity,
        subject=study.site,
        message=f"the dataset cannot be pickled: {reason}" + ("; with fork that does no harm" if forked else ""),
        evidence=(evidence(case, "loader.preflight.pickle_error", reason, "none"),),
        remedies=(
            Remedy(kind="code", text="functions at module level or functools.partial in place of lambdas"),
            Remedy(kind="code", text="__getstate__ that leaves open files and locks out"),
        ),
        confidence="certain",
    )


EXAMPLES = (
    Example(
        name="a lambda under spawn",
        kind="fires",
        case=case_of(start_method="spawn", preflight={"pickle_error": "Can't pickle local object"}),
        subjects=("data.py:12",),
    ),
    Example(
        name="a lambda under fork",
        kind="fires",
        case=case_of(preflight={"pickle_error": "Can't pickle local object"}),
        subjects=("data.py:12",),
        severity="info",
    ),
    Example(name="it can", kind="quiet", case=case_of(preflight={"pickle_bytes": 1000})),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
