"""An epoch does not hold the rows that it should: some come several times, or it ends early.

What it means
    An iterable dataset is copied into each worker; without splitting by get_worker_info every row comes once a worker.
    A StopIteration that leaks from a row of a map dataset ends the epoch without an error.
Why it costs
    Wrong training. The rate of rows looks better with each worker, while new rows come no faster
    (https://github.com/huggingface/datasets/issues/3423).
How we know
    tune-loader counts distinct rows (by a fingerprint of each) against all rows, with and without workers; and batches
    against len() of the loader. Or the source was read: the class is an IterableDataset whose text asks for no worker
    and no shard, num_workers is above 1, and there is no worker_init_fn.
Fix
    Split in __iter__ by worker id and number (and by rank), or use a sharding library; catch StopIteration inside the
    dataset.
When to ignore
    The stream repeats rows on purpose, and differently in each worker.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, LoaderStudy, Remedy, Rule
from gpudoctor.rules import loader_sources, sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, trial

RULE = Rule(code="LDR017", name="sample-count-wrong", severity="error", needs=loader_sources.NEEDS, since="0.2")


def check(case: Case) -> Iterator[Finding]:
    yield from loader_sources.not_split(RULE, case)
    study = case.loader
    if study is None:
        return
    yield from _repeated(case, study)
    yield from _early(case, study)


def _repeated(case: Case, study: LoaderStudy) -> Iterator[Finding]:
    plain = [item.distinct / item.hashed for item in study.trials if item.workers < 2 and item.hashed and item.distinct]
    several = [item for item in study.trials if item.workers > 1 and item.hashed and item.distinct]
    if not plain or not several:
        return
    worst = min(several, key=lambda item: (item.distinct or 0) / item.hashed)
    share = (worst.distinct or 0) / worst.hashed
    if share > case.threshold(RULE.code, "distinct_share") * max(plain):
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"with {worst.workers} workers only {worst.distinct} of {worst.hashed} rows were distinct: each worker "
        "reads the same rows",
        evidence=(evidence(case, "loader.trials", f"{share:.0%} distinct", f"{max(plain):.0%} as without workers"),),
        remedies=(
            Remedy(
                kind="code",
                text="in __iter__: info = torch.utils.data.get_worker_info(), then every info.num_workers-th row from "
                "info.id on",
            ),
            Remedy(kind="code", text="num_workers=1 or 0 until then"),
        ),
        confidence="certain" if share < 0.75 else "likely",
    )


def _early(case: Case, study: LoaderStudy) -> Iterator[Finding]:
    at = study.preflight.ends_early_at
    stopped = [item.stopped_at for item in study.trials if item.stopped_at is not None]
    short = [
        item
        for item in study.trials
        if item.part == "real" and item.epoch_batches and item.expected_batches
        and item.epoch_batches < item.expected_batches
    ]  # fmt: skip
    row = at if at is not None else next(iter(stopped), None)
    if row is None and not short:
        return
    seen = f"{short[0].epoch_batches} of {short[0].expected_batches} batches" if short else "fewer batches than len()"
    reason = f": row {row} raises StopIteration" if row is not None else ""
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"an epoch ends early without an error, after {seen}{reason}",
        evidence=(evidence(case, "loader.trials", seen, "len() of the loader"),),
        remedies=(
            Remedy(kind="code", text="next(iterator, None) or `for` inside the dataset: no StopIteration may leave it"),
        ),
        confidence="certain",
    )


EXAMPLES = (
    Example(
        name="each row twice",
        kind="fires",
        case=case_of(
            loader={"iterable_dataset": True},
            trials=(trial(0, hashed=1000, distinct=1000), trial(2, hashed=2000, distinct=1000)),
        ),
        subjects=("data.py:12",),
    ),
    Example(
        name="ends at row 20",
        kind="fires",
        case=case_of(trials=(trial(0, stopped_at=20, epoch_batches=2, expected_batches=8),)),
        subjects=("data.py:12",),
    ),
    Example(
        name="rows repeat by themselves",
        kind="quiet",
        case=case_of(trials=(trial(0, hashed=1000, distinct=500), trial(2, hashed=1000, distinct=500))),
    ),
    Example(name="a whole epoch", kind="quiet", case=case_of(trials=(trial(2, epoch_batches=8, expected_batches=8),))),
    Example(
        name="in the source",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "iterable-not-split", "Lines.__iter__", "DataLoader(Lines())", hot=None, detail="num_workers=2"
            )
        ),
        subjects=("train.py:21",),
    ),
    Example(name="not in the source", kind="quiet", case=sources.example_case()),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
