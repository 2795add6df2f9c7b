"""Shares of a step from profiler traces; shared by the rules that traces can decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpudoctor.model import Case, Evidence, Gain, TraceFacts, TraceIdle, TraceWait


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Milliseconds a step, out of a step's (or of the window's, where no steps are marked)."""

    facts: TraceFacts
    part_ms: float
    whole_ms: float

    @property
    def share(self) -> float:
        return min(1.0, max(0.0, self.part_ms / self.whole_ms)) if self.whole_ms > 0 else 0.0

    def words(self) -> str:
        """Such as "12.1 of 30.4 ms a step (40 %)"."""
        unit = "ms a step" if self.facts.whole_steps else "ms"
        return f"{self.part_ms:.3g} of {self.whole_ms:.3g} {unit} ({self.share * 100:.0f} %)"


def alone(case: Case) -> tuple[TraceFacts, ...]:
    """The traces that are not the profiler window of a watched command, whose lines tell more."""
    return () if case.watched is not None and any(record.steps for record in case.watched.records) else case.traces


def on_device(case: Case) -> tuple[TraceFacts, ...]:
    """The ranks whose trace shows device work."""
    return tuple(facts for facts in case.traces if facts.window_ms)


def without_steps(case: Case) -> bool:
    """Whether traces are all that there is to judge by, and none of them marks steps."""
    alone = case.watched is None and case.source is None
    return alone and bool(case.traces) and not any(facts.steps for facts in case.traces)


def of_step(facts: TraceFacts, total_ms: float) -> Share:
    """A sum over the whole steps, as a part of one step."""
    count = max(1, len(facts.steps))
    wall = sum(step.wall_ms for step in facts.steps)
    return Share(facts=facts, part_ms=total_ms / count, whole_ms=wall / count)


def subject(facts: TraceFacts) -> str:
    return f"rank:{facts.rank}"


def loader_share(facts: TraceFacts) -> Share | None:
    """The wait for the loader in whole steps. The longest is left out of four and more steps: a first batch or a
    checkpoint is no habit. None when the trace shows no loader or no steps."""
    steps = [step for step in facts.steps if step.loader_wait_ms is not None]
    if not steps:
        return None
    if len(steps) > 3:
        steps.remove(max(steps, key=lambda step: step.loader_wait_ms or 0.0))
    waited = sum(step.loader_wait_ms or 0.0 for step in steps)
    return Share(facts=facts, part_ms=waited / len(steps), whole_ms=sum(step.wall_ms for step in steps) / len(steps))


def of_window(facts: TraceFacts, part_ms: float) -> Share:
    """A part of the window, a step where steps are marked."""
    steps = max(1, facts.whole_steps)
    return Share(facts=facts, part_ms=part_ms / steps, whole_ms=(facts.window_ms or 0.0) / steps)


def waits(facts: TraceFacts, often: float) -> tuple[TraceWait, ...]:
    """Waits for the device that belong to the step."""
    return tuple(wait for wait in facts.waits if wait.calls_per_step is not None and wait.calls_per_step >= often)


def idle(facts: TraceFacts) -> TraceIdle:
    return facts.idle or TraceIdle()


def bound(item: Share, what: str) -> Gain:
    """The rate can rise at most by the share, which must be time in which the device computes nothing."""
    return Gain(
        low=1.0,
        high=round(1.0 / max(0.01, 1.0 - item.share), 3),
        unit="x",
        basis="measured",
        source=f"upper bound: {what} takes {item.share:.0%} of the time in the trace",
    )


def loader_gain(item: Share) -> Gain:
    """Loading ahead can win the time that the device idled while the host waited for the loader, and no more."""
    loader = item.facts.loader
    wall = sum(step.wall_ms for step in item.facts.steps)
    idled = loader.idle_ms if loader is not None else None
    share = item.share if idled is None or wall <= 0 else min(item.share, max(0.001, idled / wall))
    return Gain(
        low=1.0,
        high=round(1.0 / max(0.01, 1.0 - share), 3),
        unit="x",
        basis="measured",
        source=f"upper bound: idling while the host waits for the loader takes {share:.0%} of the steps in the trace",
    )


def worst(found: Sequence[Share]) -> Iterator[tuple[Share, str]]:
    """Ranks run the same lines: only the rank where it costs the largest share, and words for the others."""
    if found:
        best = max(found, key=lambda item: item.share)
        others = len(found) - 1
        yield best, f"; {others} other ranks too" if others > 1 else "; one other rank too" if others else ""


def evidence(facts: TraceFacts, fact: str, value: str, expected: str | None = None) -> Evidence:
    return Evidence(fact=f"traces[{facts.rank}].{fact}", value=value, expected=expected, source=facts.file)
