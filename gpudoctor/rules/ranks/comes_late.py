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
    Where the job was also watched and its ranks read results in each step, the many watched steps decide: ranks that
    wait for another one wait that much longer there too. A window of three steps alone may have met one uneven batch.
Fix
    Look at the late rank: uneven batches or embedding shards, its loader, work that only one rank does (logging,
    checkpoints, evaluation), a slower or hotter GPU, a worse CPU binding.
When to ignore
    A single step: another rank may be late in the next. Pipelines, where ranks differ by design.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from gpudoctor.model import (
    Case,
    Example,
    Finding,
    Gain,
    Remedy,
    Rule,
    Step,
    TraceFacts,
    Unchecked,
    Watched,
    WatchRecord,
)
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
    least = case.threshold(RULE.code, "wait_share")
    if not step or waits[-1] < least * step:
        return
    seen = _watched_share(case)
    if seen is None or seen >= least:
        yield _finding(slow, job, waits[-1], step)


def _watched_share(case: Case) -> float | None:
    """How much longer the rank that waits most waits for its GPU than the one that waits least, as a share of the
    watched step; None where no such steps were seen, or a rank never waits."""
    waits, walls = [], []
    for record in case.watched.records if case.watched is not None else ():
        if record.steps:
            waits.append(fmean(step.sync_wait_ms + step.copy_wait_ms for step in record.steady))
            walls.append(fmean(step.wall_ms for step in record.steady))
    if len(waits) < 2 or min(waits) <= 0:
        return None
    return (max(waits) - min(waits)) / max(walls)


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


def _watched(*waits_ms: float) -> Case:
    """The first example's traces, beside watched steps that wait so long."""
    records = tuple(
        WatchRecord(pid=1 + rank, rank=rank, steps=(Step(wall_ms=20.0, sync_wait_ms=wait),) * 4)
        for rank, wait in enumerate(waits_ms)
    )
    watched = Watched(command=("python", "train.py"), cwd="/job", records=records)
    return replace(_case(0.0, 4.0, 8.0), watched=watched)


EXAMPLES = (
    Example(name="rank 0 is waited for", kind="fires", case=_case(0.0, 4.0, 8.0), subjects=("rank:0",)),
    Example(name="all alike", kind="quiet", case=_case(0.0, 0.1, 0.2, paces="eee")),
    Example(name="below a tenth of the step", kind="quiet", case=_case(0.0, 0.7, 1.2)),
    Example(name="the watched steps say the same", kind="fires", case=_watched(1.0, 5.0, 9.0), subjects=("rank:0",)),
    Example(name="no read waits for it", kind="fires", case=_watched(0.0, 0.0, 0.0), subjects=("rank:0",)),
    # two ranks of a loader-bound job on two H200s: 140 of 319 ms in three profiled steps, 17 ms in the watched ones
    Example(name="one uneven batch in the window", kind="quiet", case=_watched(0.9, 1.5, 2.0)),
    Example(name="one rank", kind="lacks", case=_case(None)),
    Example(name="no trace", kind="lacks", case=Case()),
)
