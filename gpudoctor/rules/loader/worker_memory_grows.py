"""The private memory of each worker grows with the rows that it has read.

What it means
    Either the dataset keeps what it has read (a cache: each worker fills its own), or its many Python objects are
    shared by fork until they are touched: counting a reference writes to the page, and the page is copied.
Why it costs
    Memory times workers; the job is killed hours later. Arrays in place of Python objects took up to 40 times less
    (https://github.com/pytorch/pytorch/issues/13246). A cache is lost with its worker at the end of each epoch.
How we know
    tune-loader reads the memory of each worker while it fetches: it grew again and again, by more than the batches in
    flight explain.
Fix
    A cache in shared memory or a memory map that is filled before the workers start; numpy arrays or tensors in place
    of lists of Python objects; fewer workers.
When to ignore
    The growth ends after a while at a size that fits (workers times that size).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, LoaderStudy, LoaderTrial, Remedy, Rule, WorkerCounts
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, mib, trial

RULE = Rule(code="LDR010", name="worker-memory-grows", severity="warning", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    least = case.threshold(RULE.code, "grown_bytes")
    copied = case.threshold(RULE.code, "copied_bytes")
    steps = case.threshold(RULE.code, "steps")
    found = []
    for item in study.trials:
        for counts in item.per_worker if item.part == "real" and item.workers else ():
            if counts.grown_steps >= steps and counts.grown_bytes >= least + _in_flight(study, item):
                found.append((counts.grown_bytes, counts.grown_over, "allocated"))
            if counts.copied_steps >= steps and counts.copied_bytes >= copied:
                found.append((counts.copied_bytes, counts.copied_over, "copied from what fork had shared"))
    if not found:
        return
    size, over, how = max(found)
    each = size / max(1, over)
    if each < max(case.threshold(RULE.code, "row_bytes"), 0.8 * (study.preflight.row_bytes or 0)):
        return  # less than the rows themselves: that is how an allocator spreads, not what a dataset keeps
    rows = study.loader.dataset_len
    whole = f"; over all {rows} rows that would be {mib(each * rows)} a worker at most" if rows else ""
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"a worker grew by {mib(size)} over {over} rows, {how}{whole}",
        evidence=(evidence(case, "loader.trials", f"{each / 1024:.1f} KiB a row", "next to nothing"),),
        remedies=(
            Remedy(kind="code", text="fill a cache once, before the workers start, in shared arrays or a memory map"),
            Remedy(kind="code", text="numpy arrays or tensors in place of lists and dicts of Python objects"),
            Remedy(kind="code", text="fewer workers: each has its own copy"),
        ),
        confidence="likely",
    )


def _in_flight(study: LoaderStudy, item: LoaderTrial) -> int:
    """Bytes of batches that a worker may hold at once, made and handed over."""
    return 2 * (item.prefetch + 2) * (study.preflight.batch_bytes or 0)


def _case(grown: int, steps: int = 5, batch: int = 2**16, over: int = 90) -> Case:
    counts = (WorkerCounts(worker=0, batches=10, samples=100, grown_bytes=grown, grown_over=over, grown_steps=steps),)
    return case_of(trials=(trial(1, per_worker=counts),), preflight={"batch_bytes": batch})


def _copied(size: int) -> Case:
    counts = (WorkerCounts(worker=0, batches=10, samples=100, copied_bytes=size, copied_over=90, copied_steps=5),)
    return case_of(trials=(trial(1, per_worker=counts),))


EXAMPLES = (
    Example(name="a cache of 100 MiB", kind="fires", case=_case(100 * 2**20), subjects=("data.py:12",)),
    Example(name="Python objects after fork", kind="fires", case=_copied(90 * 2**20), subjects=("data.py:12",)),
    Example(name="the interpreter's own objects", kind="quiet", case=_copied(30 * 2**20)),
    Example(name="a little at the start", kind="quiet", case=_case(4 * 2**20)),
    Example(name="once, for an import", kind="quiet", case=_case(100 * 2**20, steps=1)),
    Example(name="a little for each of many rows", kind="quiet", case=_case(100 * 2**20, over=10**6)),
    Example(name="large batches in flight", kind="quiet", case=_case(100 * 2**20, batch=24 * 2**20)),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
