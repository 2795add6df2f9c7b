"""The steps synchronise, but the GPU is busy nearly all the time: removing the waits gains little.

What it means
    The host waits for the GPU in each step. As the GPU has work all the time, the host waits for work that has to be
    done anyway.
Why it costs
    It costs at most what the GPU idles. Going from 164 to 15 waits a step gained 0.2 % in one report, and up to 4 % in
    others (https://github.com/roboflow/rf-detr/pull/1492).
How we know
    A profiler trace shows waits in each step that take a noticeable share of it, and a busy share of the device above
    the limit below.
Fix
    Look at the kernels first: mixed precision, compilation, fused operations. Remove waits later, and only for the
    idle time that is shown.
When to ignore
    Always safe to ignore: it promises nothing and only corrects expectations.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Remedy, Rule, TraceFacts, TraceStep, TraceWait, Unchecked
from gpudoctor.rules.traces import evidence, on_device, subject, waits

RULE = Rule(code="SYN010", name="sync-gain-capped", severity="info", needs=("traces.window_ms",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    often = case.threshold(RULE.code, "calls_per_step")
    for facts in on_device(case):
        wall = sum(step.wall_ms for step in facts.steps)
        waited = sum(wait.waited_ms for wait in waits(facts, often))
        if facts.idle_pct is None or not wall:
            continue
        busy = 1 - facts.idle_pct / 100
        enough = waited >= case.threshold(RULE.code, "wait_share") * wall
        if enough and busy >= case.threshold(RULE.code, "busy_share"):
            yield _finding(facts, waited / len(facts.steps), facts.idle_pct)


def _finding(facts: TraceFacts, waited_ms: float, idle_pct: float) -> Finding:
    most = 100 / (100 - idle_pct) - 1
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject(facts),
        message=(
            f"the host waits {waited_ms:.3g} ms a step for the device, busy {100 - idle_pct:.0f} % of the time:"
            f" removing the waits gains at most {100 * most:.1f} %"
        ),
        evidence=(
            evidence(facts, "idle_pct", f"{idle_pct:.1f} %"),
            evidence(facts, "waits", f"{waited_ms:.3g} ms a step"),
        ),
        remedies=(Remedy(kind="code", text="shorten the work on the device first (mixed precision, torch.compile)"),),
        gain=Gain(
            low=1.0,
            high=round(1 + most, 3),
            unit="x",
            basis="measured",
            source="upper bound: the device's idle time in the trace",
        ),
        confidence="certain",
    )


def _case(*, idle_pct: float = 10.0, waited_ms: float = 5.0, per_step: float = 2.0, device: bool = True) -> Case:
    facts = TraceFacts(
        file="trace.json",
        format="kineto",
        rank=0,
        whole_steps=4,
        steps=tuple(TraceStep(name=f"ProfilerStep#{n}", wall_ms=20) for n in range(4)),
        window_ms=80 if device else None,
        idle_pct=idle_pct if device else None,
        waits=(TraceWait(call="cudaStreamSynchronize", calls=8, calls_per_step=per_step, waited_ms=waited_ms * 4),),
    )
    return Case(traces=(facts,))


EXAMPLES = (
    Example(name="busy 90 %", kind="fires", case=_case(), subjects=("rank:0",)),
    Example(name="idle 40 %", kind="quiet", case=_case(idle_pct=40)),
    Example(name="no waits", kind="quiet", case=_case(waited_ms=0.01)),
    Example(name="once in the trace", kind="quiet", case=_case(per_step=0.2)),
    Example(name="no GPU events", kind="lacks", case=_case(device=False)),
    Example(name="no trace", kind="lacks", case=Case()),
)
