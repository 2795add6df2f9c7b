"""Between search and confirmation: what the search settled on must be proven, and run past the end of its loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Change, ChangeClass, ProofPlan, ProofResult
from gpudoctor.tune.proof import Run, prove, proven_alone, rewrites, training_records
from gpudoctor.tune.runner import GRACE_S, PATIENCE, CommandRunner, failure

# Loaders end after this many batches when only the code after the loop is to be reached.
SHORT_LOOP = 2


class Book(Protocol):
    """Where the result of the proof is kept."""

    proof: ProofResult | None


class Vetting:
    """Proves a set of changes; when the whole set fails, each mechanism on its own."""

    def __init__(self, runner: CommandRunner, book: Book) -> None:
        self.runner = runner
        self.book = book
        self.baseline: Run | None = None
        self.whole: bool | None = None  # the proof runs go on until the command ends by itself

    def vet(self, changes: tuple[Change, ...]) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        """Those that may be emitted, and those that may not, with the reason."""
        if self.whole is None:  # runs of one kind only can be compared
            self.whole = self.runner.proves_whole(changes)
        result, finished = self._prove(changes)
        problem = _problem(result)
        if problem is None and not finished and any(map(rewrites, changes)):
            problem, unknown = self._past_the_loop(changes)
            if problem is not None and unknown:
                # It would be unknown for each of them. What rewrites no code is left, and needs no such run.
                refused = _refused(filter(rewrites, changes), problem)
                rest = tuple(change for change in changes if not rewrites(change))
                passed, more = self.vet(rest) if rest else ((), ())
                return passed, (*refused, *more)
        if problem is None:
            self.book.proof = result
            return changes, ()
        return self._each_mechanism(changes, problem)

    def _each_mechanism(
        self, changes: tuple[Change, ...], problem: str
    ) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        """As `vet`, where the changes all together are not right."""
        mechanisms = list(dict.fromkeys(change.mechanism for change in changes))
        refused: list[Change] = []
        passed: list[Change] = []
        for mechanism in mechanisms:
            part = tuple(change for change in changes if change.mechanism == mechanism)
            why = problem
            if len(mechanisms) > 1:
                alone, not_alone = self.vet(part)
                if alone:
                    passed += alone
                    refused += not_alone
                    continue
            refused += _refused(part, why)
        return tuple(passed), tuple(refused)

    def _prove(self, changes: Sequence[Change]) -> tuple[ProofResult, bool]:
        """The proof, and whether the changed command ended by itself (so the code after its loop ran)."""
        change_class = _class(changes)
        if self.baseline is None:
            self.baseline = self._run(())
        candidate = self._run(changes)
        if self.baseline is None or candidate is None:
            return ProofResult(verdict="not provable", reason="the time budget did not hold the proof runs"), False
        result = prove(
            self.baseline,
            candidate,
            lambda: self._run(()),
            change_class=change_class,
            epochs_crossed=_crossed(candidate),
        )
        strong = proven_alone(changes)
        if strong and result.verdict != "different":
            alone = self._run(strong)
            if alone is not None:
                part = prove(
                    self.baseline,
                    alone,
                    lambda: self._run(()),
                    change_class=_class(strong),
                    epochs_crossed=_crossed(alone),
                )
                if part.verdict == "different":
                    return part, False
        return result, _ended(candidate) and candidate.watched.exit_code == 0

    def _run(self, changes: Sequence[Change]) -> Run | None:
        left = self.runner.left_s()
        expected = self.runner.proof_run_s(whole=bool(self.whole))
        if left < expected / 2:
            return None
        self.runner.on_trial(f"proof: {'changed' if changes else 'unchanged'}")
        steps = None if self.whole else self.runner.steps
        plan = self.runner.plan(changes, steps=steps, watch_calls=False, proof=ProofPlan(seed=0))
        patience = min(left + GRACE_S, PATIENCE * expected + GRACE_S)
        files = None
        if self.whole:  # files of a command that is stopped midway are cut where its buffers happen to end
            watched, output, files = self.runner.watch_to_its_end(plan, deadline_s=patience)
        else:
            watched, output = self.runner.watch(plan, deadline_s=patience)
        return None if watched.stopped == "deadline" else Run(watched=watched, output=output, files=files)

    def _past_the_loop(self, changes: Sequence[Change]) -> tuple[str | None, bool]:
        """(None, False) when the changed command runs to its end; else why not, and whether that is merely unknown.

        In a command that was not seen to end by itself, loaders end and the loops of training are left early.
        """
        begun = time.monotonic()
        whole_s = self.runner.whole_s
        short = None if whole_s is not None else SHORT_LOOP
        deadline = max(10.0, min(self.runner.left_s() / 3, PATIENCE * (whole_s or self.runner.baseline_s)))
        self.runner.on_trial("proof: past the end of the loop")
        plan = self.runner.plan(changes, steps=None, watch_calls=False, end_loop_after=short)
        watched, _ = self.runner.watch(plan, deadline_s=deadline)
        if watched.stopped == "deadline":
            seconds = time.monotonic() - begun
            return f"not proven past the end of its loop: the command was still running after {seconds:.0f} s", True
        problem = failure(watched)
        return (None if problem is None else f"the changed command failed after its loop: {problem}"), False


def _refused(changes: Iterable[Change], reason: str) -> tuple[Change, ...]:
    return tuple(dataclasses.replace(change, kept=False, reason=reason) for change in changes)


def _class(changes: Sequence[Change]) -> ChangeClass:
    order: tuple[ChangeClass, ...] = ("numerics", "stochastic", "logging", "exact")
    for name in order:
        if any(change.change_class == name for change in changes):
            return name
    raise GpudoctorError("there is nothing to prove: no change was given")


def _problem(result: ProofResult) -> str | None:
    return f"the proof failed: {result.reason}" if result.verdict == "different" else None


def _ended(run: Run) -> bool:
    """Whether the command ended by itself, so that the code after its loop ran."""
    return all(record.ended == "exit" for record in training_records(run.watched))


def _crossed(run: Run) -> bool:
    """Whether a second epoch was begun, or the command has no more than was run."""
    most = max((loader.iterators for record in run.watched.records for loader in record.loaders), default=0)
    return most > 1 or _ended(run)
