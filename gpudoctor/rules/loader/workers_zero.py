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
    Or the source was read: num_workers is 0, the loop uses a GPU, and __getitem__ decodes or computes.
Fix
    num_workers=2 to 4 to begin with, never more than (allowed CPUs or quota) / ranks; `gpudoctor tune` tries and
    proves it. Put the creation of the loader under `if __name__ == "__main__":` where workers are spawned.
When to ignore
    Data that lies in memory and is cheap to index, where handing a batch over costs more than making it. Without a
    GPU the model and the workers share the CPUs: the rule then reports at info.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Step, Unchecked, Watched, WatchedLoader, WatchRecord
from gpudoctor.rules import sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound, cost, feeding, records, worst

RULE = Rule(code="LDR001", name="workers-zero", severity="warning", needs=sources.NEEDS, since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.watched is not None and not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
        return
    found = [
        (loader, cost(record, loader.wait_ms))
        for record in records(case)
        for loader in feeding(record)
        if loader.num_workers == 0 and not loader.overridden
    ]
    for loader, price in worst(found):
        enough = price.waited_ms >= case.threshold(RULE.code, "wait_ms")
        if enough and price.share >= case.threshold(RULE.code, "wait_share"):
            yield _finding(case, loader, price)
    for found in sources.loaders(case):
        if found.num_workers == 0 and found.costly is not None:
            yield sources.loader_finding(
                RULE,
                found,
                f"num_workers=0: the training process makes each batch itself; {found.costly}",
                (
                    Remedy(
                        kind="code",
                        text="num_workers=2 to 4 to begin with, at most (allowed CPUs or quota) / ranks",
                        risk="random augmentation draws other numbers in workers",
                        undo="num_workers=0",
                    ),
                ),
            )


def _finding(case: Case, loader: WatchedLoader, price: Cost) -> Finding:
    message = f"num_workers=0: the training process waits {a_step(price)} for this loader"
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
                text="num_workers=2 to 4, at most (allowed CPUs or quota) / ranks",
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
)
