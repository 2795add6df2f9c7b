"""Batches go to the GPU from memory that is not pinned.

What it means
    The GPU can fetch only from pinned (page-locked) memory by itself. From other memory the driver copies each batch
    into a pinned buffer of its own first, and the training process waits. pin_memory=True lets the loader pin in a
    thread of its own; the same thread also unpickles what the workers send.
Why it costs
    +8.6 % throughput in one report, twice where the link is shared with offloading
    (https://github.com/pytorch/pytorch/issues/24984). Sometimes nothing: it hides a wait, it does not shorten work.
How we know
    The command was watched on a GPU: batches of this loader were copied from memory that was not pinned, and the
    share of the step spent waiting for these copies is above the limit below. Or the source was read: the loader does
    not pin, and the loop copies its batches to a GPU.
Fix
    pin_memory=True in the DataLoader, with num_workers above 0 (without workers the training process pins, which
    gains nothing), and non_blocking=True at the copy.
When to ignore
    Scripts on the CPU. When pinning was tried and the step did not get faster.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import (
    Case,
    CopySite,
    Example,
    Finding,
    Remedy,
    Rule,
    Step,
    Unchecked,
    Watched,
    WatchedLoader,
    WatchRecord,
)
from gpudoctor.rules import sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound, copy_symptom, cost, records, worst

RULE = Rule(code="LDR003", name="pin-memory-off", severity="warning", needs=sources.NEEDS, since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.watched is not None and not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
        return
    found = []
    for record in records(case):
        copies = unpinned(record)
        price = cost(record, sum(copy.waited_ms for copy in copies))
        if copies and price.share >= case.threshold(RULE.code, "wait_share"):
            found += [(loader, price) for loader in record.feeding if not loader.pin_memory]
    for loader, price in worst(found):
        yield _finding(case, loader, price, len({other.site for other, _ in found}))
    for known in sources.loaders(case):
        if known.pin_memory is False and known.moved is not None:
            yield sources.loader_finding(
                RULE,
                known,
                f"the batches of this loader are not pinned and go to the GPU in each step ({known.moved})",
                (
                    Remedy(
                        kind="code",
                        text="pin_memory=True in this DataLoader, with num_workers above 0",
                        undo="pin_memory=False",
                    ),
                    Remedy(kind="code", text="non_blocking=True at the copy, once the batch is pinned"),
                ),
            )


def unpinned(record: WatchRecord) -> list[CopySite]:
    """The copies of loader batches to a GPU, made during the steps, of which not all came from pinned memory."""
    return [
        copy
        for copy in record.copies
        if copy.kind == "h2d" and copy.from_loader and copy.calls_in_steps and copy.pinned < copy.calls
    ]


def _finding(case: Case, loader: WatchedLoader, price: Cost, loaders: int) -> Finding:
    sites = unpinned(price.record)
    where = ", ".join(copy.site for copy in sites)
    workers = loader.num_workers > 0
    together = "" if workers else ", together with num_workers above 0"
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=loader.site,
        message=f"batches reach the GPU from memory that is not pinned ({where}): copying waits {a_step(price)}",
        evidence=tuple(
            evidence(case, "watched", f"{copy.site}: {copy.pinned} of {copy.calls} copies from pinned memory", "all")
            for copy in sites
        ),
        remedies=(
            Remedy(kind="code", text=f"pin_memory=True in this DataLoader{together}", undo="pin_memory=False"),
            Remedy(kind="code", text="non_blocking=True at the copy, once the batch is pinned"),
        ),
        gain=bound(price.share, "waiting for copies", most=2.0),
        confidence="likely" if loaders == 1 else "possible",
        symptoms=tuple(copy_symptom(price.record, copy) for copy in sites),
    )


def _case(
    *, pinned: int = 0, waited_ms: float = 2.0, pin_memory: bool = False, kind: str = "h2d", steps: int = 10
) -> Case:
    loader = WatchedLoader(
        site="train.py:45",
        ordinal=0,
        role="train",
        loader_class="DataLoader",
        dataset_class="Images",
        iterable_dataset=False,
        num_workers=4,
        pin_memory=pin_memory,
        batches=10,
    )
    copy = CopySite(
        site="train.py:51",
        function="to",
        kind="h2d" if kind == "h2d" else "none",
        calls=10,
        bytes=10 * 2**20,
        pinned=pinned,
        waited_ms=waited_ms * 10,
        calls_in_steps=10,
        from_loader=True,
    )
    record = WatchRecord(
        pid=1, cuda=kind == "h2d", steps=(Step(wall_ms=20),) * steps, loaders=(loader,), copies=(copy,)
    )
    return Case(watched=Watched(command=("python", "train.py"), cwd="", records=(record,)))


EXAMPLES = (
    Example(name="2 of 20 ms a step", kind="fires", case=_case(), subjects=("train.py:45",)),
    Example(name="hidden behind the step", kind="quiet", case=_case(waited_ms=0.1)),
    Example(name="pinned", kind="quiet", case=_case(pinned=10, pin_memory=True)),
    Example(name="CPU script", kind="quiet", case=_case(kind="none")),
    Example(
        name="in the source",
        kind="fires",
        case=sources.example_case(loaders=(sources.example_loader(),)),
        subjects=("train.py:12",),
    ),
    Example(
        name="in the source, pinned or not known",
        kind="quiet",
        case=sources.example_case(
            loaders=(sources.example_loader(pin_memory=True), sources.example_loader(pin_memory=None))
        ),
    ),
    Example(
        name="in the source, batches stay on the CPU",
        kind="quiet",
        case=sources.example_case(loaders=(sources.example_loader(moved=None),)),
    ),
    Example(name="nothing watched", kind="lacks", case=Case()),
    Example(name="no step seen", kind="lacks", case=_case(steps=0)),
)
