"""Steps wait for the loader although it has workers.

What it means
    The workers do not deliver batches as fast as the model uses them: there are too few, each sample costs too much,
    or the storage is slow.
Why it costs
    The waiting share of the step is lost on the GPU, and it is the most that can be won back
    (https://github.com/open-edge-platform/geti/pull/5958).
How we know
    The command was watched: a loader with workers makes the steps wait for more than the share below. The first
    batch, which includes the start of the workers, is not counted. Or a profiler trace shows the ranges in which the
    host asked the DataLoader for a batch; of four and more steps the longest wait is not counted.
Fix
    Try worker counts (`gpudoctor tune` does, within the CPUs of this process), then look at the samples: whole-batch
    fetching for tables, uint8 instead of float32, faster decoding, data on a local disk.
When to ignore
    The window was so short that it saw little more than the start. A loader without workers is LDR001.
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
from gpudoctor.rules import traces
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound, fed, records, worst

RULE = Rule(
    code="LDR021", name="step-waits-for-loader", severity="warning", needs=("watched|traces.loader",), since="0.1"
)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    shares = [share for facts in traces.alone(case) if (share := traces.loader_share(facts)) is not None]
    if not records(case) and not shares:
        missing = "watched command" if case.watched else "trace"
        yield Unchecked(reason=f"no step was seen in the {missing}")
        return
    found = [
        (loader, fed(record, loader, loader.wait_ms - (loader.first_batch_ms or 0.0)))
        for record in records(case)
        for loader in record.feeding
        if loader.num_workers > 0
    ]
    for loader, price in worst(found):
        if price.share >= case.threshold(RULE.code, "wait_share"):
            yield _finding(case, loader, price)
    limit = case.threshold(RULE.code, "wait_share")
    waiting = [item for item in shares if item.share >= limit and not _without_workers(item.facts)]
    for item, others in traces.worst(waiting):
        yield _in_trace(item, others)


def _without_workers(facts: TraceFacts) -> bool:
    return facts.loader is not None and facts.loader.workers is False


def _in_trace(item: traces.Share, others: str) -> Finding:
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=traces.subject(item.facts),
        message=f"the steps wait {item.words()} for the loader, which has workers{others}",
        evidence=(traces.evidence(item.facts, "loader", f"{item.part_ms:.3g} ms a step", "next to none"),),
        remedies=(
            Remedy(kind="measure", text="gpudoctor tune tries worker counts on the training command"),
            Remedy(kind="code", text="cheaper samples: whole-batch fetching, uint8, faster decoding, a local disk"),
        ),
        gain=traces.loader_gain(item),
        confidence="likely",
    )


def _finding(case: Case, loader: WatchedLoader, price: Cost) -> Finding:
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=loader.site,
        message=f"the steps wait {a_step(price)} for this loader with {loader.num_workers} workers",
        evidence=(evidence(case, "watched", f"{price.waited_ms:.1f} ms a step", "next to none"),),
        remedies=(
            Remedy(kind="measure", text="gpudoctor tune tries worker counts on this command"),
            Remedy(kind="code", text="cheaper samples: whole-batch fetching, uint8, faster decoding, a local disk"),
        ),
        gain=bound(price.share, "waiting for the loader"),
        confidence="likely" if loader.role == "train" else "possible",
        symptoms=(f"{loader.site}: waits {a_step(price)}",),
    )


def _case(*, wait_ms: float = 12.0, first_ms: float = 0.0, workers: int = 2, steps: int = 10) -> Case:
    loader = WatchedLoader(
        site="train.py:45",
        ordinal=0,
        role="train",
        loader_class="DataLoader",
        dataset_class="Images",
        iterable_dataset=False,
        num_workers=workers,
        batches=10,
        wait_ms=wait_ms * 10 + first_ms,
        first_batch_ms=first_ms,
    )
    record = WatchRecord(pid=1, steps=(Step(wall_ms=20, loader_wait_ms=wait_ms),) * steps, loaders=(loader,))
    return Case(watched=Watched(command=("python", "train.py"), cwd="", records=(record,)))


def _trace(*, wait_ms: float = 12.0, workers: bool | None = True, steps: int = 5) -> Case:
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
    Example(name="waits 12 of 20 ms", kind="fires", case=_case(), subjects=("train.py:45",)),
    Example(name="only the first batch was slow", kind="quiet", case=_case(wait_ms=0.5, first_ms=150)),
    Example(name="small share", kind="quiet", case=_case(wait_ms=1)),
    Example(name="no workers is LDR001", kind="quiet", case=_case(workers=0)),
    Example(name="a trace waits 12 of 20 ms", kind="fires", case=_trace(), subjects=("rank:0",)),
    Example(name="a trace without workers is LDR001", kind="quiet", case=_trace(workers=False)),
    Example(name="small share in a trace", kind="quiet", case=_trace(wait_ms=1)),
    Example(name="a trace without steps", kind="lacks", case=_trace(steps=0)),
    Example(name="nothing watched", kind="lacks", case=Case()),
    Example(name="no step seen", kind="lacks", case=_case(steps=0)),
)
