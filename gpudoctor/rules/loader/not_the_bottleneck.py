"""The loader keeps up: more workers would gain nothing.

What it means
    The step waits for a batch for next to no time. Frameworks hint at more workers by looking at the number of CPUs
    only (https://github.com/Lightning-AI/pytorch-lightning/issues/18723).
Why it costs
    It does not. Each further worker costs memory and start-up.
How we know
    A profiler trace shows the ranges in which the host asked the DataLoader for a batch, in at least three whole steps;
    they take a smaller share of the steps than the limit below. Or the command was watched on a GPU, with the same
    outcome for the loader that feeds its steps.
Fix
    Leave the workers alone.
When to ignore
    The steps in the trace are few or untypical: an epoch's first steps, data that were cached already.
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
from gpudoctor.rules import evidence as facts_of
from gpudoctor.rules.steps import a_step, fed, records
from gpudoctor.rules.traces import Share, alone, evidence, loader_share, subject

RULE = Rule(
    code="LDR020", name="loader-not-the-bottleneck", severity="info", needs=("watched|traces.loader",), since="0.1"
)

_FEWEST_STEPS = 3


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.watched is not None:
        yield from _in_watched(case)
        return
    shares = [loader_share(facts) for facts in alone(case)]
    if any(item is None for item in shares):
        yield Unchecked(reason="a trace without a DataLoader or without steps")
        return
    known = [item for item in shares if item is not None]
    most = max(known, key=lambda item: item.share)
    enough = min(item.facts.whole_steps for item in known) >= _FEWEST_STEPS
    if enough and most.share < case.threshold(RULE.code, "wait_share"):
        yield _finding(most)


def _in_watched(case: Case) -> Iterator[Finding | Unchecked]:
    seen = [
        (loader, fed(record, loader, loader.wait_ms - (loader.first_batch_ms or 0.0)))
        for record in records(case)
        if record.cuda and len(record.steps) > _FEWEST_STEPS
        for loader in record.feeding
    ]
    if not seen:
        yield Unchecked(reason="no loader was seen to feed steps on a GPU")
        return
    loader, price = max(seen, key=lambda item: item[1].share)
    if price.share < case.threshold(RULE.code, "wait_share"):
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=loader.site,
            message=f"the loader is not the bottleneck: the steps wait {a_step(price)} for a batch",
            evidence=(facts_of.evidence(case, "watched", f"{price.waited_ms:.3g} ms a step"),),
            remedies=(Remedy(kind="config", text="leave the number of workers as it is"),),
            confidence="likely",
        )


def _finding(item: Share) -> Finding:
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject(item.facts),
        message=f"the loader is not the bottleneck: the steps wait {item.words()} for a batch",
        evidence=(evidence(item.facts, "loader", f"{item.part_ms:.3g} ms a step"),),
        remedies=(Remedy(kind="config", text="leave the number of workers as it is"),),
        confidence="likely",
    )


def _case(*, wait_ms: float = 0.1, steps: int = 5, loader: bool = True) -> Case:
    facts = TraceFacts(
        file="trace.json",
        format="kineto",
        rank=0,
        whole_steps=steps,
        steps=tuple(
            TraceStep(name=f"ProfilerStep#{n}", wall_ms=20, loader_wait_ms=wait_ms if loader else None)
            for n in range(steps)
        ),
        loader=TraceLoader(name="DataLoader", workers=True, calls=steps, waited_ms=wait_ms * steps) if loader else None,
    )
    return Case(traces=(facts,))


def _watched(*, wait_ms: float = 0.1, cuda: bool = True, steps: int = 10) -> Case:
    loader = WatchedLoader(
        site="train.py:45",
        ordinal=0,
        role="train",
        loader_class="DataLoader",
        dataset_class="Images",
        iterable_dataset=False,
        num_workers=4,
        batches=steps,
        wait_ms=wait_ms * steps,
    )
    record = WatchRecord(pid=1, cuda=cuda, steps=(Step(wall_ms=20, loader_wait_ms=wait_ms),) * steps, loaders=(loader,))
    return Case(watched=Watched(command=("python", "train.py"), cwd="", records=(record,)))


EXAMPLES = (
    Example(name="watched: 0.1 of 20 ms", kind="fires", case=_watched(), subjects=("train.py:45",)),
    Example(name="watched: waits 2 of 20 ms", kind="quiet", case=_watched(wait_ms=2)),
    Example(name="watched: on the CPU", kind="lacks", case=_watched(cuda=False)),
    Example(name="watched: no steps", kind="lacks", case=_watched(steps=0)),
    Example(name="0.1 of 20 ms", kind="fires", case=_case(), subjects=("rank:0",)),
    Example(name="waits 2 of 20 ms", kind="quiet", case=_case(wait_ms=2)),
    Example(name="too few steps", kind="quiet", case=_case(steps=2)),
    Example(name="no loader in the trace", kind="lacks", case=_case(loader=False)),
    Example(name="no trace", kind="lacks", case=Case()),
)
