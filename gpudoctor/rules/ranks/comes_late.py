"""The other ranks wait for one rank in collectives.

What it means
    A collective ends when the last rank has come to it. Ranks that come earlier spend the time inside its kernel, so
    their GPUs look busy while they only wait. The rank with the least time in communication is the one that the others
    wait for.
Why it costs
    The whole job runs at the pace of its slowest rank
    (https://github.com/facebookresearch/HolisticTraceAnalysis looks for stragglers for the same reason).
How we know
    Profiler traces of several ranks of one job: the time in communication kernels differs between ranks by more than
    the share of a step below. It is waiting that differs, for the amount of data is the same on all of them or nearly.
Fix
    Look at the late rank: uneven batches or embedding shards, its loader, work that only one rank does (logging,
    checkpoints, evaluation), a slower or hotter GPU, a worse CPU binding.
When to ignore
    A single step: another rank may be late in the next. Pipelines, where ranks differ by design.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Remedy, Rule, TraceFacts, Unchecked
from gpudoctor.rules.traces import evidence, on_device, subject

RULE = Rule(
    code="BND013",
    name="rank-late-to-collectives",
    severity="warning",
    needs=("traces.waits_for_peers_ms",),
    since="0.1",
)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    job = [facts for facts in on_device(case) if facts.waits_for_peers_ms is not None]
    slow = sorted((facts for facts in job if facts.pace == "slow"), key=lambda facts: facts.waits_for_peers_ms or 0.0)
    if not slow:
        return
    waits = sorted(facts.waits_for_peers_ms or 0.0 for facts in job)
    step = max(facts.median_step_ms or facts.window_ms or 0.0 for facts in job)
    if step and waits[-1] >= case.threshold(RULE.code, "wait_share") * step:
        yield _finding(slow, job, waits[-1], step)


def _finding(slow: list[TraceFacts], job: list[TraceFacts], most: float, step: float) -> Finding:
    late = slow[0]
    fast = [facts.rank for facts in job if facts.pace == "fast"]
    also = f" (ranks {', '.join(str(facts.rank) for facts in slow[1:])} come late too)" if len(slow) > 1 else ""
    share = most / step
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject(late),
        message=(
            f"rank {late.rank} comes last to the collectives{also}: rank{'s' if len(fast) > 1 else ''}"
            f" {', '.join(map(str, fast))} wait{'s' if len(fast) == 1 else ''} up to {most:.3g} of {step:.3g} ms a step"
            f" ({100 * share:.0f} %) longer than it does"
        ),
        evidence=tuple(
            evidence(facts, "communication_ms", f"{facts.communication_ms:.4g} ms", "about the same on all ranks")
            for facts in sorted(job, key=lambda facts: facts.waits_for_peers_ms or 0.0)
        ),
        remedies=(
            Remedy(kind="measure", text=f"compare rank {late.rank} with a fast one: gpudoctor read A B --compare"),
            Remedy(kind="code", text="even out batches and shards; move work of one rank out of the step"),
        ),
        gain=Gain(
            low=1.0,
            high=round(1 / max(0.1, 1 - share), 3),
            unit="x",
            basis="measured",
            source="upper bound: the longest wait for other ranks in the trace",
        ),
        confidence="likely" if late.whole_steps > 1 else "possible",
    )


def _case(*waits_ms: float | None, paces: str = "sef") -> Case:
    words = {"s": "slow", "e": "even", "f": "fast"}
    return Case(
        traces=tuple(
            TraceFacts(
                file=f"rank{rank}.json",
                format="kineto",
                rank=rank,
                whole_steps=3,
                median_step_ms=20.0,
                window_ms=60.0,
                communication_ms=None if wait is None else 3 * (1.0 + wait),
                waits_for_peers_ms=wait,
                pace=None if wait is None else words[paces[rank]],  # type: ignore[arg-type]
            )
            for rank, wait in enumerate(waits_ms)
        )
    )


EXAMPLES = (
    Example(name="rank 0 is waited for", kind="fires", case=_case(0.0, 4.0, 8.0), subjects=("rank:0",)),
    Example(name="all alike", kind="quiet", case=_case(0.0, 0.1, 0.2, paces="eee")),
    Example(name="below a tenth of the step", kind="quiet", case=_case(0.0, 0.7, 1.2)),
    Example(name="one rank", kind="lacks", case=_case(None)),
    Example(name="no trace", kind="lacks", case=Case()),
)
