"""Some workers get nothing to do.

What it means
    An iterable dataset shares its work out by shards: with fewer shards than workers, some of them end at once. Others
    do everything.
Why it costs
    Memory and start-up for nothing, and the rate of one worker: 2400 and 0 rows became 1227 and 1173 in one report
    (https://github.com/huggingface/datasets/issues/8669).
How we know
    tune-loader counts the batches of each worker: at least one made none while the others made many.
Fix
    At most as many workers as shards; or more, smaller shards.
When to ignore
    The stream was only begun, and the idle worker's first row takes very long.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, LoaderTrial, Remedy, Rule, WorkerCounts
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, real, trial

RULE = Rule(code="LDR007", name="fewer-active-workers-than-asked", severity="warning", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    if not study.loader.iterable_dataset:
        return
    found = [item for item in real(study) if _idle(item) and max(_made(item)) >= case.threshold(RULE.code, "batches")]
    if not found:
        return
    worst = max(found, key=_idle)
    made = ", ".join(str(count) for count in _made(worst))
    busy = worst.workers - _idle(worst)
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"of {worst.workers} workers {_idle(worst)} made no batch (batches by worker: {made})",
        evidence=(evidence(case, "loader.trials", f"{made} batches", "about equal"),),
        remedies=(
            Remedy(kind="code", text=f"num_workers={busy}, or as many shards as workers"),
            Remedy(kind="code", text="split the rows by get_worker_info() in __iter__"),
        ),
        confidence="likely",
    )


def _made(item: LoaderTrial) -> list[int]:
    """Batches of each worker that was counted; those that never began stand as one 0."""
    made = [counts.batches for counts in item.per_worker]
    return [*made, 0] if item.workers > len(made) else made


def _idle(item: LoaderTrial) -> int:
    idle = sum(counts.batches == 0 for counts in item.per_worker) + max(0, item.workers - len(item.per_worker))
    return idle if item.workers > 1 else 0


def _trial(*batches: int) -> LoaderTrial:
    counts = tuple(
        WorkerCounts(worker=number, batches=count, samples=10 * count) for number, count in enumerate(batches)
    )
    return trial(len(batches), per_worker=counts)


EXAMPLES = (
    Example(
        name="one shard, three workers",
        kind="fires",
        case=case_of(loader={"iterable_dataset": True}, trials=(_trial(40, 0, 0),)),
        subjects=("data.py:12",),
    ),
    Example(
        name="equal shares", kind="quiet", case=case_of(loader={"iterable_dataset": True}, trials=(_trial(20, 20),))
    ),
    Example(name="just begun", kind="quiet", case=case_of(loader={"iterable_dataset": True}, trials=(_trial(1, 0),))),
    Example(name="rows by index", kind="quiet", case=case_of(trials=(_trial(40, 0, 0),))),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
