"""Fewer workers, or none, load as fast.

What it means
    Beyond some number of workers the rate is flat or falls: they share the CPUs, the disk, or the hand-over of
    batches. For rows that cost next to nothing, handing a batch over costs more than making it.
Why it costs
    Epochs were 15 to 29 % slower with a worker for each CPU than with a few in one report, and 15 to 50 times slower
    for tiny rows (https://github.com/Lightning-AI/pytorch-lightning/issues/17410); each worker keeps its memory.
How we know
    tune-loader measured the rate over worker counts. Warning: a smaller count is clearly faster. Info: it is as good.
Fix
    The smallest count within the noise of the best; whole-batch fetching for tiny rows.
When to ignore
    The trial's rows are not typical of the data.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, LoaderChoice, LoaderStudy, Remedy, Rule
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import at_most, case_of, mib, trial

RULE = Rule(code="LDR006", name="too-many-workers", severity="warning", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    own = study.loader.num_workers
    if not study.present_known or not own or study.choice is None or study.choice.whole_batch:
        return  # whole batches (LDR023) gain by themselves
    better = study.choice.arguments.get("num_workers")
    if study.verdict == "change" and isinstance(better, int) and better < own and study.gain is not None:
        yield _finding(
            case, study, better, f"{better} workers load {study.gain.low:.2f} to {study.gain.high:.2f}x as fast"
        )
    elif study.verdict == "keep" and study.as_good_workers is not None and study.as_good_workers < own:
        saved = f" and save {mib(study.saves_bytes)}" if study.saves_bytes else ""
        yield _finding(case, study, study.as_good_workers, f"{study.as_good_workers} workers are as good{saved}")


def _finding(case: Case, study: LoaderStudy, fewer: int, what: str) -> Finding:
    changed = study.verdict == "change"
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity if changed else "info",
        subject=study.site,
        message=f"num_workers={study.loader.num_workers}: {what}",
        evidence=(evidence(case, "loader", f"{study.loader.num_workers} workers", f"{fewer}"),),
        remedies=(Remedy(kind="code", text=f"num_workers={fewer}", undo=f"num_workers={study.loader.num_workers}"),),
        gain=at_most(study.gain) if changed else None,
        confidence="likely",
    )


_GAIN = Gain(low=1.2, high=1.4, unit="x", basis="measured", source="trials")

EXAMPLES = (
    Example(
        name="two are faster than four",
        kind="fires",
        case=case_of(
            verdict="change",
            choice=LoaderChoice(arguments={"num_workers": 2}),
            gain=_GAIN,
            trials=(trial(2, 1300.0), trial(4, 1000.0)),
        ),
        subjects=("data.py:12",),
    ),
    Example(
        name="two are as good",
        kind="fires",
        case=case_of(as_good_workers=2, saves_bytes=2**28),
        subjects=("data.py:12",),
        severity="info",
    ),
    Example(
        name="more are better",
        kind="quiet",
        case=case_of(verdict="change", choice=LoaderChoice(arguments={"num_workers": 8}), gain=_GAIN),
    ),
    Example(name="the host was busy", kind="quiet", case=case_of(verdict="no verdict", as_good_workers=2)),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
