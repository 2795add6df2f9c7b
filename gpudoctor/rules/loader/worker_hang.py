"""A worker hangs or dies, and the training loop waits for its batch.

What it means
    With timeout=0, the default, the DataLoader waits for ever. A worker that sleeps in user code, or was killed, gives
    no batch and maybe no message.
Why it costs
    The job stands still until somebody looks (https://github.com/RolnickLab/ami-data-companion/issues/140).
How we know
    In tune-loader a worker stayed at one row for a long multiple of what rows take, or ended; its stack was read then.
Fix
    timeout=N on the loader turns a hang into an error; the stack below shows where it stands. Look at the named row.
When to ignore
    One row really takes so long.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, LoaderFault, Remedy, Rule
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, faults, trial, where

RULE = Rule(code="LDR016", name="worker-hang", severity="error", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    # the last one: after a first hang each row is followed, so that it names the row
    for fault in [item for item in faults(study) if item.kind in ("hang", "killed")][-1:]:
        ended = fault.kind == "killed"
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=fault.site or study.site,
            message=f"{fault.text}{where(fault)}",
            evidence=(
                evidence(
                    case, "loader.trials", "ended" if ended else f"sleeps in {fault.waits_in or 'user code'}", "a batch"
                ),
            ),
            remedies=(
                Remedy(kind="code", text="timeout=60 on the loader: an error in place of waiting for ever"),
                Remedy(kind="code", text=f"look at row {fault.index}" if fault.index is not None else "see the stack"),
                Remedy(
                    kind="measure", text="the kernel log tells of killed processes (dmesg, oom_kill in memory.events)"
                ),
            )[: 3 if ended else 2],
            confidence="certain",
            symptoms=fault.stack[:5],
        )


EXAMPLES = (
    Example(
        name="at one row for 9 s",
        kind="fires",
        case=case_of(
            trials=(trial(2, None, fault=LoaderFault(kind="hang", text="worker 0 hangs", site="data.py:7", index=20)),)
        ),
        subjects=("data.py:7",),
    ),
    Example(
        name="ended without a word",
        kind="fires",
        case=case_of(trials=(trial(2, None, fault=LoaderFault(kind="killed", text="worker exited unexpectedly")),)),
        subjects=("data.py:12",),
    ),
    Example(
        name="an ordinary error",
        kind="quiet",
        case=case_of(trials=(trial(2, None, fault=LoaderFault(kind="exception", text="ValueError")),)),
    ),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
