"""torch.cuda.empty_cache() is called in every step.

What it means
    The call gives cached memory back to the driver, and the next step asks for it again. Both wait for the GPU.
    The cache costs nothing: its memory is used again for the next tensors.
Why it costs
    Freeing and allocating again takes milliseconds a step and drains the queue of kernels
    (https://github.com/huggingface/transformers/pull/31530).
How we know
    The command was watched: the line is reached in about every step, and the share of the step spent in it is above
    the limit below. What the next allocations cost comes on top and is not counted. Or the source was read: the call
    stands in a loop that runs once a step, or in what such a loop calls.
Fix
    Remove the call from the loop. Against fragmentation set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
When to ignore
    Between phases (training and evaluation), or when another process needs the memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Step, SyncSite, Unchecked, Watched, WatchRecord
from gpudoctor.rules import sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound_of_waits, per_step, records, synced, worst, worth

RULE = Rule(code="SYN006", name="empty-cache-per-step", severity="warning", needs=sources.NEEDS, since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.watched is not None and not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
        return
    found = synced(case, ("empty_cache",), case.threshold(RULE.code, "calls_per_step"))
    for sync, price in worst(found):
        if price.share >= case.threshold(RULE.code, "wait_share"):
            yield _finding(case, sync, price)
    for site in sources.sites(case, "empty-cache"):
        yield sources.source_finding(
            RULE,
            site,
            f"{site.operation}() gives the cached memory back in each step: the next step waits to get it again",
            (
                Remedy(kind="code", text="remove the call from the loop"),
                Remedy(
                    kind="env",
                    text="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, if memory is fragmented",
                    undo="unset it",
                ),
            ),
        )


def _finding(case: Case, sync: SyncSite, price: Cost) -> Finding:
    rate = per_step(price.record, sync.calls_in_steps)
    severity, but = worth(case, price, RULE.severity, case.threshold(RULE.code, "wait_share"))
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=severity,
        subject=sync.site,
        message=f"empty_cache() is called {rate:.1f} times a step and takes {a_step(price)}{but}",
        evidence=(evidence(case, "watched", f"empty_cache: {sync.calls} calls", "none in the loop"),),
        remedies=(
            Remedy(kind="code", text="remove the call from the loop", undo="the call"),
            Remedy(
                kind="env",
                text="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, if memory is fragmented",
                undo="unset it",
            ),
        ),
        gain=bound_of_waits(case, price),
        confidence="likely",
        symptoms=(f"{sync.site}: waits {a_step(price)}",),
    )


def _case(*, function: str = "empty_cache", in_steps: int = 100, waited_ms: float = 5.0, steps: int = 100) -> Case:
    sync = SyncSite(
        site="train.py:90",
        function=function,
        calls=100,
        on_device=100,
        waited_ms=waited_ms * 100,
        calls_in_steps=in_steps,
    )
    record = WatchRecord(pid=1, cuda=True, steps=(Step(wall_ms=20),) * steps, syncs=(sync,))
    return Case(watched=Watched(command=("python", "train.py"), cwd="", records=(record,)))


EXAMPLES = (
    Example(name="in each step", kind="fires", case=_case(), subjects=("train.py:90",)),
    Example(name="full name", kind="fires", case=_case(function="torch.cuda.empty_cache"), subjects=("train.py:90",)),
    Example(name="between phases", kind="quiet", case=_case(in_steps=2)),
    Example(name="no wait", kind="quiet", case=_case(waited_ms=0.05)),
    Example(name="item() is another rule", kind="quiet", case=_case(function="item")),
    Example(
        name="in the source",
        kind="fires",
        case=sources.example_case(
            sources.example_site("empty-cache", "torch.cuda.empty_cache", "torch.cuda.empty_cache()", edit="drop-call")
        ),
        subjects=("train.py:21",),
    ),
    Example(name="source without the call", kind="quiet", case=sources.example_case()),
    Example(name="nothing watched", kind="lacks", case=Case()),
    Example(name="no step seen", kind="lacks", case=_case(steps=0)),
)
