"""A dataset that could hand out a whole batch at once is asked for single rows.

What it means
    The DataLoader calls dataset[i] for each row of a batch and collates the results. A table in memory, an array or
    a memory map can be indexed with the list of all rows instead: one call, no collating.
Why it costs
    The cost of each call and of collating is paid per row: 3 to 6 times the time on in-memory tables (measured on
    two machines; not on data that is decoded per sample).
How we know
    While the command was watched, a few batches were fetched both ways in a forked child: the results were equal,
    and the whole batch was faster by the factor below. The gain is bounded by the time waited for this loader.
Fix
    sampler=BatchSampler(RandomSampler(dataset), batch_size, drop_last) with batch_size=None, or a __getitems__
    method on the dataset. The order of the sampler, and so the batches, stay the same.
When to ignore
    The dataset draws random numbers once per call, a collate function needs single samples, or decoding dominates
    (then both ways take the same time and the rule is quiet).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import (
    Case,
    Example,
    FetchProbe,
    Finding,
    LoaderChoice,
    LoaderStudy,
    Remedy,
    Rule,
    Step,
    Unchecked,
    Watched,
    WatchedLoader,
    WatchRecord,
)
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound, cost, records, worst
from gpudoctor.rules.studies import at_most, case_of

RULE = Rule(code="LDR023", name="per-row-fetching", severity="warning", needs=("watched|loader",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.loader is not None:
        yield from _studied(case, case.loader)
    if case.watched is None:
        return
    if not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
        return
    found: list[tuple[WatchedLoader, Cost]] = []
    for record in records(case):
        for loader in record.feeding:
            probe = loader.fetch_probe
            if loader.iterable_dataset or loader.custom_collate or loader.batch_size is None:
                continue
            if probe is None or probe.error is not None:
                why = "was not compared" if probe is None else "could not be compared"
                yield Unchecked(reason=f"fetching rows against whole batches {why}", subject=loader.site)
            elif probe.equal and probe.repeatable and _factor(probe) >= case.threshold(RULE.code, "factor"):
                found.append((loader, cost(record, loader.wait_ms)))
    for loader, price in worst(found):
        if price.share >= case.threshold(RULE.code, "wait_share") and loader.fetch_probe is not None:
            yield _finding(case, loader, price, loader.fetch_probe)


def _studied(case: Case, study: LoaderStudy) -> Iterator[Finding]:
    """A study measures the whole loader both ways, so its gain is measured and not only bounded."""
    probe, loader = study.fetch_probe, study.loader
    if probe is None or probe.error is not None or not (probe.equal and probe.repeatable) or loader.batch_size is None:
        return
    chosen = study.choice is not None and study.choice.whole_batch and study.verdict == "change"
    if _factor(probe) < case.threshold(RULE.code, "factor") or not chosen:
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"{probe.rows} rows take {probe.row_by_row_ms:.1f} ms one by one and {probe.whole_batch_ms:.1f} ms as "
        "one batch, with equal results; the loader that fetches whole batches was the fastest of all tried",
        evidence=(
            evidence(case, "loader", f"{probe.row_by_row_ms:.2f} ms", f"{probe.whole_batch_ms:.2f} ms as a whole"),
        ),
        remedies=(
            Remedy(
                kind="code",
                text="sampler=BatchSampler(RandomSampler(dataset), batch_size, drop_last), batch_size=None",
                undo="the former sampler and batch_size",
            ),
            Remedy(kind="code", text="or a __getitems__ method on the dataset that returns the list of rows"),
        ),
        gain=at_most(study.gain),
        confidence="certain",
    )


def _factor(probe: FetchProbe) -> float:
    """How much faster the whole batch is; a clock that shows nothing counts as a microsecond."""
    return probe.row_by_row_ms / max(probe.whole_batch_ms, 1e-3)


def _finding(case: Case, loader: WatchedLoader, price: Cost, probe: FetchProbe) -> Finding:
    factor = _factor(probe)
    remaining = 1 - price.share * (1 - 1 / factor)
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=loader.site,
        message=f"{probe.rows} rows take {probe.row_by_row_ms:.1f} ms one by one and {probe.whole_batch_ms:.1f} ms as "
        f"one batch, with equal results; the step waits {a_step(price)} for this loader",
        evidence=(
            evidence(case, "watched", f"{probe.row_by_row_ms:.2f} ms", f"{probe.whole_batch_ms:.2f} ms as a whole"),
        ),
        remedies=(
            Remedy(
                kind="code",
                text="sampler=BatchSampler(RandomSampler(dataset), batch_size, drop_last), batch_size=None",
                risk="a dataset that draws one random number per call then draws once a batch"
                if probe.draws_random
                else None,
                undo="the former sampler and batch_size",
            ),
            Remedy(kind="code", text="or a __getitems__ method on the dataset that returns the list of rows"),
        ),
        gain=bound(1 - remaining, "what whole batches save of the wait"),
        confidence="likely" if not probe.draws_random else "possible",
        symptoms=(f"{loader.site}: waits {a_step(price)}",),
    )


def _case(
    probe: FetchProbe | None, *, wait_ms: float = 12.0, custom_collate: bool = False, iterable: bool = False
) -> Case:
    loader = WatchedLoader(
        site="train.py:45",
        ordinal=0,
        role="train",
        loader_class="DataLoader",
        dataset_class="Table",
        iterable_dataset=iterable,
        batch_size=512,
        custom_collate=custom_collate,
        batches=10,
        wait_ms=wait_ms * 10,
        fetch_probe=probe,
    )
    steps = tuple(Step(wall_ms=20, loader_wait_ms=wait_ms) for _ in range(10))
    record = WatchRecord(pid=1, steps=steps, loaders=(loader,))
    return Case(watched=Watched(command=("python", "train.py"), cwd="", records=(record,)))


def _probe(whole_ms: float = 2.0, *, equal: bool = True) -> FetchProbe:
    return FetchProbe(
        rows=512, row_by_row_ms=12.0, whole_batch_ms=whole_ms, equal=equal, draws_random=False, repeatable=True
    )


EXAMPLES = (
    Example(name="table in memory, six times", kind="fires", case=_case(_probe()), subjects=("train.py:45",)),
    Example(name="decoding dominates", kind="quiet", case=_case(_probe(11.0))),
    Example(name="not equal", kind="quiet", case=_case(_probe(equal=False))),
    Example(name="no wait", kind="quiet", case=_case(_probe(), wait_ms=0.1)),
    Example(name="collate needs single samples", kind="quiet", case=_case(None, custom_collate=True)),
    Example(name="iterable dataset", kind="quiet", case=_case(None, iterable=True)),
    Example(
        name="studied, and the fastest",
        kind="fires",
        case=case_of(
            fetch_probe=_probe(),
            verdict="change",
            choice=LoaderChoice(arguments={"num_workers": 0}, whole_batch=True),
        ),
        subjects=("data.py:12",),
    ),
    Example(name="studied, and workers do as well", kind="quiet", case=case_of(fetch_probe=_probe())),
    Example(name="not compared", kind="lacks", case=_case(None)),
    Example(name="nothing watched", kind="lacks", case=Case()),
)
