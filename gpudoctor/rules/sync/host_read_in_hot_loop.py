"""A value is read from the GPU in every step.

What it means
    item(), float(), int() or tolist() of a tensor on the GPU waits until the GPU has done all work queued before
    it. The host cannot queue the next kernels meanwhile, so that the GPU runs empty afterwards.
Why it costs
    4 % to a factor of 2, at most the smaller of host and device time of a step
    (https://github.com/Nerogar/OneTrainer/pull/1608). Nothing where the GPU is busy all the time anyway.
How we know
    The command was watched: the line reads a tensor on a GPU in about every step and waits. Or the source was read:
    the value comes from something that was moved to or made on a GPU, and the line stands in a loop (or is called from
    one) that runs once a step. One remaining read per step keeps the whole wait, so that all must go to gain anything.
    Or a profiler trace: the GPU idles after reads (aten::item, aten::is_nonzero) that come in about every step.
Fix
    Sum on the device (`total += loss.detach()`) and read every N steps, also for progress bars and loggers.
When to ignore
    The value decides what happens next (an agent's action, a line search). Reads that are limited already (step % N)
    and tensors on the CPU keep the rule quiet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpudoctor.model import (
    Case,
    Example,
    Finding,
    Remedy,
    Rule,
    SourceSite,
    Step,
    SyncSite,
    TraceFacts,
    TraceStep,
    TraceWait,
    Unchecked,
    Watched,
    WatchRecord,
)
from gpudoctor.rules import sources, traces
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound_of_waits, function_of, per_step, records, synced, worst, worth

RULE = Rule(
    code="SYN001",
    name="host-read-in-hot-loop",
    severity="warning",
    needs=("watched|source|traces.window_ms",),
    since="0.1",
)

READS = ("item", "float", "int", "tolist")
_OPERATORS = {"aten::item", "aten::is_nonzero", "aten::_local_scalar_dense"}


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.watched is not None and not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
        return
    if traces.without_steps(case):
        yield Unchecked(reason="no step is marked in the trace")
        return
    found = synced(case, READS, case.threshold(RULE.code, "calls_per_step"))
    for sync, price in worst([item for item in found if item[0].via is None]):  # inside of a library it is SYN007
        if price.share >= case.threshold(RULE.code, "wait_share"):
            yield _finding(case, sync, price)
    for group in sources.by_line(sources.sites(case, "host-read")):
        yield _from_source(group)
    found_in_traces = [
        traces.of_step(facts, sum(wait.idle_after_ms for wait in _reads(case, facts))) for facts in traces.alone(case)
    ]
    limit = case.threshold(RULE.code, "wait_share")
    for item, others in traces.worst([item for item in found_in_traces if item.share >= limit]):
        yield _in_trace(item, _reads(case, item.facts), others)


def _reads(case: Case, facts: TraceFacts) -> list[TraceWait]:
    often = case.threshold(RULE.code, "calls_per_step")
    return [wait for wait in traces.waits(facts, often) if _OPERATORS & {wait.origin, wait.inner}]


def _in_trace(item: traces.Share, reads: Sequence[TraceWait], others: str) -> Finding:
    lines = list(dict.fromkeys(wait.site for wait in reads if wait.site))
    rate = sum(wait.calls_per_step or 0.0 for wait in reads)
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=lines[0] if len(lines) == 1 else traces.subject(item.facts),
        message=f"a tensor is read from the GPU {rate:.1f} times a step, then it idles {item.words()}{others}",
        evidence=tuple(
            traces.evidence(
                item.facts,
                "waits",
                f"{wait.origin or wait.call}: {wait.calls_per_step:.3g} a step"
                + (f" at {wait.site}" if wait.site else ""),
                "one every N steps",
            )
            for wait in reads
        ),
        remedies=(
            Remedy(
                kind="code",
                text="keep the value on the device (detach, add up) and read it every N steps",
                risk="values are logged later or less often",
            ),
            *(() if lines else (Remedy(kind="measure", text="record with with_stack=True to see the lines"),)),
        ),
        gain=traces.bound(item, "idling after reads"),
        confidence="likely",
    )


def _finding(case: Case, sync: SyncSite, price: Cost) -> Finding:
    function = function_of(sync)
    rate = per_step(price.record, sync.calls_in_steps)
    severity, but = worth(case, price, RULE.severity, case.threshold(RULE.code, "wait_share"))
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=severity,
        subject=sync.site,
        message=f"{function}() reads a tensor from the GPU {rate:.1f} times a step and waits {a_step(price)}{but}",
        evidence=(evidence(case, "watched", f"{function}: {sync.on_device} calls on the device", "one every N steps"),),
        remedies=(
            Remedy(
                kind="code",
                text="keep the value on the device (detach, add up) and read it every N steps",
                risk="values are logged later or less often",
            ),
        ),
        gain=bound_of_waits(case, price),
        confidence="likely",
        symptoms=(f"{sync.site}: waits {a_step(price)}",),
    )


_OTHER_READS = {
    "index": "uses a tensor on the GPU as a list index",
    "slice bound": "uses a tensor on the GPU as the bound of a slice",
    "range": "uses a tensor on the GPU as the bound of range()",
    "logger": "gives a tensor on the GPU to a logger, which reads it",
    "progress bar": "gives a tensor on the GPU to a progress bar, which reads it",
}


def _from_source(group: tuple[SourceSite, ...]) -> Finding:
    site = group[0]
    told = _OTHER_READS.get(site.operation, f"{site.operation}() reads a tensor from the GPU")
    if len(group) > 1:
        told += f" ({len(group)} reads on this line)"
    if site.operation in ("index", "slice bound", "range"):
        remedies = [
            Remedy(kind="code", text="take the number from the host (a shape, a length), or index with tensors")
        ]
    else:
        remedies = [
            Remedy(
                kind="code",
                text="keep it on the device (`total += loss.detach()`), read every N steps or after the loop",
                risk="values are logged later or less often",
            )
        ]
    return sources.source_finding(RULE, site, f"{told} in each step, and the host waits", remedies)


def _case(
    *, function: str = "item", on_device: int = 100, in_steps: int = 100, waited_ms: float = 5.0, steps: int = 100
) -> Case:
    sync = SyncSite(
        site="train.py:88",
        function=function,
        calls=100,
        on_device=on_device,
        waited_ms=waited_ms * 100,
        calls_in_steps=in_steps,
    )
    record = WatchRecord(pid=1, cuda=on_device > 0, steps=(Step(wall_ms=20),) * steps, syncs=(sync,))
    return Case(watched=Watched(command=("python", "train.py"), cwd="", records=(record,)))


def _trace(*, origin: str = "aten::item", idle_ms: float = 2.0, per_step: float = 1.0, steps: int = 4) -> Case:
    wait = TraceWait(
        call="cudaStreamSynchronize",
        origin=origin,
        site="train.py:88",
        calls=4,
        calls_per_step=per_step,
        waited_ms=4,
        idle_after_ms=idle_ms * 4,
    )
    facts = TraceFacts(
        file="trace.json",
        format="kineto",
        rank=0,
        window_ms=80,
        idle_pct=30,
        steps=tuple(TraceStep(name=f"ProfilerStep#{n}", wall_ms=20) for n in range(steps)),
        waits=(wait,),
    )
    return Case(traces=(facts,))


EXAMPLES = (
    Example(name="loss.item() in each step", kind="fires", case=_case(), subjects=("train.py:88",)),
    Example(name="float(loss)", kind="fires", case=_case(function="__float__"), subjects=("train.py:88",)),
    Example(name="every tenth step", kind="quiet", case=_case(in_steps=10)),
    Example(name="tensor on the CPU", kind="quiet", case=_case(on_device=0)),
    Example(name="no wait", kind="quiet", case=_case(waited_ms=0.05)),
    Example(name="synchronize() is another rule", kind="quiet", case=_case(function="synchronize")),
    Example(
        name="in the source",
        kind="fires",
        case=sources.example_case(
            sources.example_site("host-read", "item", "loss.item()"),
            sources.example_site("host-read", "float", "float(loss)"),
            sources.example_site("host-read", "range", "range(n)", line=24, sure=False),
            sources.example_site(
                "host-read", "logger", "wandb.log({'loss': loss})", line=25, edit="device-accumulator"
            ),
        ),
        subjects=("train.py:21", "train.py:24", "train.py:25"),
    ),
    Example(name="source without a read", kind="quiet", case=sources.example_case()),
    Example(name="nothing watched", kind="lacks", case=Case()),
    Example(name="no step seen", kind="lacks", case=_case(steps=0)),
    Example(name="a trace idles 2 of 20 ms after item()", kind="fires", case=_trace(), subjects=("train.py:88",)),
    Example(name="a trace that idles after a copy", kind="quiet", case=_trace(origin="aten::to")),
    Example(name="a trace without idle time after reads", kind="quiet", case=_trace(idle_ms=0.1)),
    Example(name="one read in the trace", kind="quiet", case=_trace(per_step=0.2)),
    Example(name="a trace without steps", kind="lacks", case=_trace(steps=0)),
)
