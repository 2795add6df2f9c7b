"""The training process loads its batches itself (num_workers=0), and waits for them.

What it means
    Without workers the DataLoader fetches, decodes and collates each batch in the training process, between two
    steps. Nothing else happens meanwhile; a GPU stands still.
Why it costs
    The whole loading time is added to each step: 3 to 13 it/s after adding workers in one report
    (https://github.com/open-edge-platform/geti/pull/5958). With cheap samples workers are slower instead.
How we know
    The command was watched: the loader at this line has num_workers=0, and the share of the step spent waiting for
    it is above the limit below. The gain is bounded by that share; only a trial shows what workers bring.
    Or the source was read: num_workers is 0, the loop uses a GPU, and __getitem__ decodes or computes. Or a profiler
    trace shows waits for a loader of one process above the same limits.
Fix
    num_workers=2 to 4 to begin with, never more than (allowed CPUs or quota) / ranks; `gpudoctor tune` tries and
    proves it. Put the creation of the loader under `if __name__ == "__main__":` where workers are spawned.
When to ignore
    Data that lies in memory and is cheap to index, where handing a batch over costs more than making it. Without a
    GPU the model and the workers share the CPUs: the rule then reports at info.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import (
    Case,
    Example,
    Finding,
    Remedy,
    Rule,
    Step,
    TraceFacts,
    TraceLoader,
    TraceStep,
    Unchecked,
    Watched,
    WatchedLoader,
    WatchRecord,
)
from gpudoctor.rules import sources, traces
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound, fed, records, worst

RULE = Rule(
    code="LDR001", name="workers-zero", severity="warning", needs=("watched|source|traces.loader",), since="0.1"
)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.watched is not None and not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
        return
    if traces.without_steps(case):
        yield Unchecked(reason="no step is marked in the trace")
        return
    found = [
        (loader, fed(record, loader, loader.wait_ms))
        for record in records(case)
        for loader in record.feeding
        if loader.num_workers == 0 and not loader.overridden
    ]
    for loader, price in worst(found):
        enough = price.waited_ms >= case.threshold(RULE.code, "wait_ms")
        if enough and price.share >= case.threshold(RULE.code, "wait_share"):
            yield _finding(case, loader, price)
    yield from _in_traces(case)
    for told in sources.loaders(case):
        if told.num_workers == 0 and told.costly is not None:
            yield sources.loader_finding(
                RULE,
                told,
                f"num_workers=0: the training process makes each batch itself; {told.costly}",
                (
                    Remedy(
                        kind="code",
                        text="num_workers=2 to 4 to begin with, at most (allowed CPUs or quota) / ranks",
                        risk="random augmentation draws other numbers in workers",
                        undo="num_workers=0",
                    ),
                ),
            )


def _in_traces(case: Case) -> Iterator[Finding]:
    found = [
        item
        for facts in traces.alone(case)
        if facts.loader is not None and facts.loader.workers is False
        if (item := traces.loader_share(facts)) is not None
        if item.part_ms >= case.threshold(RULE.code, "wait_ms")
        if item.share >= case.threshold(RULE.code, "wait_share")
    ]
    for item, others in traces.worst(found):
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=traces.subject(item.facts),
            message=f"num_workers=0: the training process waits {item.words()} for the loader{others}",
            evidence=(
                traces.evidence(
                    item.facts, "loader", f"num_workers=0, {item.part_ms:.3g} ms a step", "workers that load ahead"
                ),
            ),
            remedies=(
                Remedy(
                    kind="code",
                    text="num_workers=2 to 4, at most (allowed CPUs or quota) / ranks",
                    risk="random augmentation draws other numbers in workers",
                    undo="num_workers=0",
                ),
                Remedy(kind="measure", text="gpudoctor tune tries worker counts on the training command"),
            ),
            gain=traces.loader_gain(item),
            confidence="likely",
        )


def _workers(case: Case, site: str) -> str:
    """What was found by trials of this loader, else a range that the CPUs of the machine allow."""
    study = case.loader
    if study is not None and study.site == site and study.verdict == "change" and study.choice is not None:
        return f"num_workers={study.choice.arguments['num_workers']}: the best of what was tried on this dataset"
    cpus = case.limits.cpus
    if cpus is None:
        return "num_workers=2 to 4, at most (allowed CPUs or quota) / ranks"
    ranks = max(1, len(records(case)))
    most = max(1, int(cpus / ranks) - 1)
    tried = f"{min(2, most)} to {min(4, most)}" if most > 2 else str(most)
    beside = f" for {ranks} ranks" if ranks > 1 else ""
    return f"num_workers={tried} to begin with: {cpus:g} CPUs may be used{beside}"


def _finding(case: Case, loader: WatchedLoader, price: Cost) -> Finding:
    process = "the training process" if loader.role == "train" else "the process"
    message = f"num_workers=0: {process} waits {a_step(price)} for this loader"
    if not price.record.cuda:
        message += "; no GPU was used, so workers would share the CPUs with the model"
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity if price.record.cuda else "info",
        subject=loader.site,
        message=message,
        evidence=(
            evidence(case, "watched", f"num_workers=0, {price.waited_ms:.1f} ms a step", "workers that load ahead"),
        ),
        remedies=(
            Remedy(
                kind="code",
                text=_workers(case, loader.site),
                risk="random augmentation draws other numbers in workers",
                undo="num_workers=0",
            ),
            Remedy(kind="measure", text="gpudoctor tune tries worker counts on this command"),
        ),
        gain=bound(price.share, "waiting for the loader"),
        confidence="likely" if loader.role == "train" else "possible",
        symptoms=(f"{loader.site}: waits {a_step(price)}",),
    )


def _case(*, wait_ms: float, wall_ms: float = 20.0, workers: int = 0, cuda: bool = True, role: str = "train") -> Case:
    loader = WatchedLoader(
        site="train.py:45",
        ordinal=0,
        role="train" if role == "train" else "other",
        loader_class="DataLoader",
        dataset_class="Images",
        iterable_dataset=False,
        num_workers=workers,
        batches=10,
        wait_ms=wait_ms * 10,
    )
    steps = tuple(Step(wall_ms=wall_ms, loader_wait_ms=wait_ms) for _ in range(10))
    record = WatchRecord(pid=1, cuda=cuda, steps=steps, loaders=(loader,))
    return Case(watched=Watched(command=("python", "train.py"), cwd="", records=(record,)))


def _trace(*, wait_ms: float = 12.0, workers: bool = False, steps: int = 5) -> Case:
    facts = TraceFacts(
        file="trace.json",
        format="kineto",
        rank=0,
        whole_steps=steps,
        steps=tuple(TraceStep(name=f"ProfilerStep#{n}", wall_ms=20, loader_wait_ms=wait_ms) for n in range(steps)),
        loader=TraceLoader(name="loader", workers=workers, calls=5, waited_ms=wait_ms * 5),
    )
    return Case(traces=(facts,))


EXAMPLES = (
    Example(name="waits 12 of 20 ms", kind="fires", case=_case(wait_ms=12), subjects=("train.py:45",)),
    Example(
        name="the same on a CPU",
        kind="fires",
        case=_case(wait_ms=12, cuda=False),
        subjects=("train.py:45",),
        severity="info",
    ),
    Example(name="cheap samples", kind="quiet", case=_case(wait_ms=0.2, wall_ms=1)),
    Example(name="small share", kind="quiet", case=_case(wait_ms=1.5)),
    Example(name="workers are there", kind="quiet", case=_case(wait_ms=12, workers=2)),
    Example(name="only a validation loader", kind="quiet", case=_case(wait_ms=12, role="other")),
    Example(
        name="in the source, samples are made by calls",
        kind="fires",
        case=sources.example_case(
            loaders=(
                sources.example_loader(num_workers=0, costly="Images.__getitem__ calls Image.open() for each sample"),
            )
        ),
        subjects=("train.py:12",),
    ),
    Example(
        name="in the source, a table in memory",
        kind="quiet",
        case=sources.example_case(loaders=(sources.example_loader(num_workers=0),)),
    ),
    Example(name="nothing watched", kind="lacks", case=Case()),
    Example(
        name="no step seen",
        kind="lacks",
        case=Case(watched=Watched(command=("python",), cwd="", records=(WatchRecord(pid=1),))),
    ),
    Example(name="a trace waits 12 of 20 ms", kind="fires", case=_trace(), subjects=("rank:0",)),
    Example(name="a trace with workers is LDR021", kind="quiet", case=_trace(workers=True)),
    Example(name="small share in a trace", kind="quiet", case=_trace(wait_ms=1.5)),
    Example(name="a trace without steps", kind="lacks", case=_trace(steps=0)),
)
