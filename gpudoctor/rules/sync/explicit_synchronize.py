"""torch.cuda.synchronize() is called in every step.

What it means
    The host waits until the GPU has done all queued work, and queues nothing meanwhile. Training needs no such
    barrier: work on one stream runs in order, and reading a value waits by itself.
Why it costs
    The GPU runs empty after each barrier until new kernels are queued: 25 % in one report
    (https://github.com/HuguesTHOMAS/KPConv-PyTorch/issues/22). In rare cases a loop got faster with it: try.
How we know
    The command was watched: the line synchronises in about every step, and the share of the step spent in it is
    above the limit below. The wait includes GPU work that has to be done anyway, so the gain may be smaller. Or the
    source was read: the call stands in a step loop; loops that only measure time (a benchmark) are left alone.
Fix
    Remove the call. To time a step, record CUDA events and read them once an epoch.
When to ignore
    The script measures time on purpose, or waits for a stream of its own before it reuses a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Step, SyncSite, Unchecked, Watched, WatchRecord
from gpudoctor.rules import sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound_of_waits, per_step, records, synced, worst, worth

RULE = Rule(code="SYN005", name="explicit-synchronize-per-step", severity="warning", needs=sources.NEEDS, since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.watched is not None and not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
        return
    found = synced(case, ("synchronize",), case.threshold(RULE.code, "calls_per_step"))
    for sync, price in worst(found):
        if price.share >= case.threshold(RULE.code, "wait_share"):
            yield _finding(case, sync, price)
    for site in sources.sites(case, "synchronize"):
        yield sources.source_finding(
            RULE,
            site,
            f"{site.operation}() synchronises in each step: the host waits until the GPU has done all queued work",
            (
                Remedy(
                    kind="code",
                    text="remove the call; time with CUDA events that are read once an epoch",
                    risk="times printed each step then no longer show the GPU's work",
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
        message=f"synchronize() is called {rate:.1f} times a step and takes {a_step(price)}{but}",
        evidence=(evidence(case, "watched", f"synchronize: {sync.calls} calls", "none in the loop"),),
        remedies=(
            Remedy(
                kind="code",
                text="remove the call; time with CUDA events that are read once an epoch",
                risk="times printed each step then no longer show the GPU's work",
                undo="the call",
            ),
        ),
        gain=bound_of_waits(case, price),
        confidence="likely",
        symptoms=(f"{sync.site}: waits {a_step(price)}",),
    )


def _case(*, function: str = "synchronize", in_steps: int = 100, waited_ms: float = 5.0, steps: int = 100) -> Case:
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
    Example(name="full name", kind="fires", case=_case(function="torch.cuda.synchronize"), subjects=("train.py:90",)),
    Example(name="around an evaluation", kind="quiet", case=_case(in_steps=2)),
    Example(name="no wait", kind="quiet", case=_case(waited_ms=0.05)),
    Example(name="item() is another rule", kind="quiet", case=_case(function="item")),
    Example(
        name="in the source",
        kind="fires",
        case=sources.example_case(
            sources.example_site("synchronize", "torch.cuda.synchronize", "torch.cuda.synchronize()", edit="drop-call")
        ),
        subjects=("train.py:21",),
    ),
    Example(name="source without the call", kind="quiet", case=sources.example_case()),
    Example(name="nothing watched", kind="lacks", case=Case()),
    Example(name="no step seen", kind="lacks", case=_case(steps=0)),
)
