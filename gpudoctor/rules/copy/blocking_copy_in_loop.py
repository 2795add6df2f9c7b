"""Each step waits for a copy to the GPU.

What it means
    A copy without non_blocking=True makes the host wait until it is done, and so does any copy from memory that is
    not pinned. Meanwhile the host queues no kernels.
Why it costs
    8-10 % in one report (https://github.com/ostris/ai-toolkit/pull/813). Nothing where the copy is hidden behind
    computation that is queued already.
How we know
    The command was watched on a GPU: this line copies from host to device in about every step, blocking or from
    unpinned memory, and the share of the step spent in it is above the limit below. Or the source was read: a batch is
    moved in each step without non_blocking=True.
    Or a profiler trace: copies from pageable memory in each step, during and after which nothing is computed.
Fix
    Pinned memory on the host side (pin_memory=True in the loader) and non_blocking=True at the copy; either of them
    alone gains nothing. Never pin by hand in the loop: that can take twice as long as the plain copy.
When to ignore
    Scripts on the CPU, copies outside the loop, copies of a few numbers.
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
    SourceSite,
    Step,
    TraceCopies,
    TraceFacts,
    TraceStep,
    TraceWait,
    Unchecked,
    Watched,
    WatchRecord,
)
from gpudoctor.rules import sources, traces
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound_of_waits, copy_symptom, per_step, records, spent, worst, worth

RULE = Rule(
    code="CPY001",
    name="blocking-copy-in-loop",
    severity="warning",
    needs=("watched|source|traces.window_ms",),
    since="0.1",
)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.watched is not None and not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
        return
    if traces.without_steps(case):
        yield Unchecked(reason="no step is marked in the trace")
        return
    often = case.threshold(RULE.code, "calls_per_step")
    found = [
        (copy, spent(record, copy))
        for record in records(case)
        for copy in record.copies
        if copy.kind == "h2d" and _waits(copy) and per_step(record, copy.calls_in_steps) >= often
    ]
    for copy, price in worst(found):
        if price.share >= case.threshold(RULE.code, "wait_share"):
            yield _finding(case, copy, price)
    yield from _in_traces(case)
    for site in sources.sites(case, "copy-to-device"):
        if site.non_blocking is False:
            yield _from_source(site)


def _in_traces(case: Case) -> Iterator[Finding]:
    """The time in which nothing is computed: during copies from pageable memory, and after the host waited for them."""
    often = case.threshold(RULE.code, "calls_per_step")
    found = []
    for facts in traces.alone(case):
        waits = [wait for wait in traces.waits(facts, often) if wait.copy == "h2d"]
        copies = [item for item in facts.copies if item.kind == "h2d" and item.memory == "pageable"]
        alone = sum(item.exposed_ms for item in copies) + sum(wait.idle_after_ms for wait in waits)
        item = traces.of_window(facts, alone)
        if waits and copies and item.share >= case.threshold(RULE.code, "wait_share"):
            found.append(item)
    for item, others in traces.worst(found):
        waits = [wait for wait in traces.waits(item.facts, often) if wait.copy == "h2d"]
        lines = list(dict.fromkeys(wait.site for wait in waits if wait.site))
        rate = sum(wait.calls_per_step or 0.0 for wait in waits)
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=lines[0] if len(lines) == 1 else traces.subject(item.facts),
            message=(
                f"{rate:.3g} copies a step go to the GPU from memory that is not pinned;"
                f" nothing is computed in {item.words()} because of them{others}"
            ),
            evidence=tuple(
                traces.evidence(
                    item.facts,
                    "copies",
                    f"{copy.calls} pageable calls, {copy.gb_s or 0:.3g} GB/s",
                    "pinned and non_blocking",
                )
                for copy in item.facts.copies
                if copy.kind == "h2d" and copy.memory == "pageable"
            ),
            remedies=(
                Remedy(kind="code", text="pin_memory=True in the DataLoader, and non_blocking=True at the copy"),
            ),
            gain=traces.bound(item, "copying from pageable memory"),
            confidence="likely",
        )


def _waits(copy: CopySite) -> bool:
    return copy.non_blocking < copy.calls or copy.pinned < copy.calls


def _finding(case: Case, copy: CopySite, price: Cost) -> Finding:
    blocking, unpinned = copy.non_blocking < copy.calls, copy.pinned < copy.calls
    how = " and ".join(["blocking"] * blocking + ["from memory that is not pinned"] * unpinned)
    size = copy.bytes / max(1, copy.calls) / 1e6
    remedies = []
    if unpinned:
        by_loader = "pin_memory=True in the DataLoader" if copy.from_loader else "a pinned source buffer, made once"
        remedies.append(Remedy(kind="code", text=f"{by_loader}; do not call .pin_memory() in the loop"))
    if blocking:
        remedies.append(Remedy(kind="code", text="non_blocking=True at this copy, once its source is pinned"))
    severity, but = worth(case, price, RULE.severity, case.threshold(RULE.code, "wait_share"))
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=severity,
        subject=copy.site,
        message=f"the copy to the GPU ({how}, {size:.1f} MB a call) waits {a_step(price)}{but}",
        evidence=(
            evidence(
                case,
                "watched",
                f"{copy.calls} calls, {copy.pinned} pinned, {copy.non_blocking} non_blocking",
                "pinned and non_blocking",
            ),
        ),
        remedies=tuple(remedies),
        gain=bound_of_waits(case, price),
        confidence="likely",
        symptoms=(copy_symptom(price.record, copy),),
    )


def _from_source(site: SourceSite) -> Finding:
    pinned = site.pinned is True
    remedies = [
        Remedy(kind="code", text="non_blocking=True at this copy" + ("" if pinned else ", once its source is pinned"))
    ]
    if not pinned:
        by_loader = f"pin_memory=True in the DataLoader ({site.from_loader})" if site.from_loader else "a pinned source"
        remedies.insert(0, Remedy(kind="code", text=f"{by_loader}; do not call .pin_memory() in the loop"))
    state = (
        "from pinned memory" if pinned else "from memory that is not pinned" if site.pinned is False else "of the batch"
    )
    return sources.source_finding(RULE, site, f"blocking copy to the GPU in each step ({state})", remedies, waits=False)


def _case(
    *,
    kind: str = "h2d",
    pinned: int = 0,
    non_blocking: int = 0,
    waited_ms: float = 2.0,
    in_steps: int = 100,
    steps: int = 100,
) -> Case:
    copy = CopySite(
        site="train.py:51",
        function="to",
        kind="h2d" if kind == "h2d" else "none",
        calls=100,
        bytes=100 * 2**20,
        pinned=pinned,
        non_blocking=non_blocking,
        waited_ms=waited_ms * 100,
        calls_in_steps=in_steps,
    )
    record = WatchRecord(pid=1, cuda=kind == "h2d", steps=(Step(wall_ms=20),) * steps, copies=(copy,))
    return Case(watched=Watched(command=("python", "train.py"), cwd="", records=(record,)))


def _trace(*, exposed_ms: float = 2.0, memory: str = "pageable", per_step: float = 2.0, steps: int = 4) -> Case:
    copies = TraceCopies(
        kind="h2d",
        memory="pinned" if memory == "pinned" else "pageable",
        calls=8,
        bytes=8 << 20,
        ms=exposed_ms * 4,
        gb_s=4.0,
        exposed_ms=exposed_ms * 4,
    )
    wait = TraceWait(
        call="cudaMemcpyAsync", origin="aten::to", copy="h2d", calls=8, calls_per_step=per_step, waited_ms=9
    )
    facts = TraceFacts(
        file="trace.json",
        format="kineto",
        rank=0,
        whole_steps=steps,
        window_ms=80,
        idle_pct=30,
        steps=tuple(TraceStep(name=f"ProfilerStep#{n}", wall_ms=20) for n in range(steps)),
        copies=(copies,),
        waits=(wait,),
    )
    return Case(traces=(facts,))


EXAMPLES = (
    Example(name="blocking and unpinned", kind="fires", case=_case(), subjects=("train.py:51",)),
    Example(name="pinned but blocking", kind="fires", case=_case(pinned=100), subjects=("train.py:51",)),
    Example(
        name="unpinned, non_blocking all the same",
        kind="fires",
        case=_case(non_blocking=100),
        subjects=("train.py:51",),
    ),
    Example(name="pinned and non_blocking", kind="quiet", case=_case(pinned=100, non_blocking=100)),
    Example(name="hidden", kind="quiet", case=_case(waited_ms=0.1)),
    Example(name="model moved once", kind="quiet", case=_case(in_steps=0)),
    Example(name="CPU script", kind="quiet", case=_case(kind="none")),
    Example(
        name="in the source",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "copy-to-device", "to", "x.to(device)", non_blocking=False, pinned=False, edit="non-blocking"
            ),
            sources.example_site("copy-to-device", "cuda", "y.cuda()", line=22, non_blocking=False, pinned=True),
        ),
        subjects=("train.py:21", "train.py:22"),
    ),
    Example(
        name="non_blocking in the source is CPY002",
        kind="quiet",
        case=sources.example_case(
            sources.example_site(
                "copy-to-device", "to", "x.to(device, non_blocking=True)", non_blocking=True, pinned=False
            )
        ),
    ),
    Example(name="nothing watched", kind="lacks", case=Case()),
    Example(name="no step seen", kind="lacks", case=_case(steps=0)),
    Example(name="a trace computes nothing for 2 of 20 ms", kind="fires", case=_trace(), subjects=("rank:0",)),
    Example(name="pinned in the trace", kind="quiet", case=_trace(memory="pinned")),
    Example(name="hidden in the trace", kind="quiet", case=_trace(exposed_ms=0.1)),
    Example(name="once in the trace", kind="quiet", case=_trace(per_step=0.2)),
    Example(name="a trace without steps", kind="lacks", case=_trace(steps=0)),
)
