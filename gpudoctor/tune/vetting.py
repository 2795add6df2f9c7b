"""Between search and confirmation: what the search settled on must be proven, and run past the end of its loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Change, ChangeClass, ProofPlan, ProofResult, Watched
from gpudoctor.tune.proof import Run, prove, training_records
from gpudoctor.tune.runner import GRACE_S, PATIENCE, CommandRunner, failure

# Loaders end after this many batches when only the code after the loop is to be reached.
SHORT_LOOP = 2
REWRITES = ("device-accumulator", "collect-device", "defer-read", "drop-call", "log-every", "pin-copy", "whole-batch")


class Book(Protocol):
    """Where the result of the proof is kept."""

    proof: ProofResult | None


class Vetting:
    """Proves a set of changes; when the whole set fails, each mechanism on its own."""

    def __init__(self, runner: CommandRunner, book: Book) -> None:
        self.runner = runner
        self.book = book
        self.baseline: Run | None = None

    def vet(self, changes: tuple[Change, ...]) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        """Those that may be emitted, and those that may not, with the reason."""
        result, finished = self._prove(changes)
        problem = _problem(result)
        if problem is None and any(edit.kind in REWRITES for change in changes for edit in change.edits):
            problem = None if finished else self._past_the_loop(changes)
        if problem is None:
            self.book.proof = result
            return changes, ()
        mechanisms = list(dict.fromkeys(change.mechanism for change in changes))
        refused: list[Change] = []
        passed: list[Change] = []
        for mechanism in mechanisms:
            part = tuple(change for change in changes if change.mechanism == mechanism)
            why = problem
            if len(mechanisms) > 1:
                alone, _ = self.vet(part)
                if alone:
                    passed += part
                    continue
            refused += [dataclasses.replace(change, kept=False, reason=why) for change in part]
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
            epochs_crossed=_epochs(candidate.watched) > 1,
        )
        # What must not change any number is also proven alone, without the changes that draw others.
        strong = [change for change in changes if change.change_class in ("exact", "logging")]
        rewrites = any(edit.kind in REWRITES for change in strong for edit in change.edits)
        if change_class in ("stochastic", "numerics") and result.verdict != "different" and rewrites:
            alone = self._run(strong)
            if alone is not None:
                part = prove(
                    self.baseline,
                    alone,
                    lambda: self._run(()),
                    change_class=_class(strong),
                    epochs_crossed=_epochs(alone.watched) > 1,
                )
                if part.verdict == "different":
                    return part, False
        ended = all(record.ended == "exit" for record in training_records(candidate.watched))
        return result, ended and candidate.watched.exit_code == 0

    def _run(self, changes: Sequence[Change]) -> Run | None:
        left = self.runner.left_s()
        if left < self.runner.baseline_s / 2:
            return None
        self.runner.on_trial(f"proof: {'changed' if changes else 'unchanged'}")
        # The whole script where it was seen to be short: then the code after the loop is proven as well.
        natural = self.runner.natural_end
        plan = self.runner.plan(
            changes, steps=None if natural else self.runner.steps, watch_calls=False, proof=ProofPlan(seed=0)
        )
        patience = min(left + GRACE_S, PATIENCE * self.runner.baseline_s + GRACE_S)
        files = None
        if natural:  # files of a command that is stopped midway are cut where its buffers happen to end
            watched, output, files = self.runner.watch_to_its_end(plan, deadline_s=patience)
        else:
            watched, output = self.runner.watch(plan, deadline_s=patience)
        return None if watched.stopped == "deadline" else Run(watched=watched, output=output, files=files)

    def _past_the_loop(self, changes: Sequence[Change]) -> str | None:
        """None when the changed command runs to its end with shortened loaders; else why it is not known to."""
        begun = time.monotonic()
        deadline = max(10.0, min(self.runner.left_s() / 3, PATIENCE * self.runner.baseline_s))
        self.runner.on_trial("proof: past the end of the loop")
        plan = self.runner.plan(changes, steps=None, watch_calls=False, end_loop_after=SHORT_LOOP)
        watched, _ = self.runner.watch(plan, deadline_s=deadline)
        if watched.stopped == "deadline":
            seconds = time.monotonic() - begun
            return f"not proven past the end of its loop: the command was still running after {seconds:.0f} s"
        problem = failure(watched)
        return None if problem is None else f"the changed command failed after its loop: {problem}"


def _class(changes: Sequence[Change]) -> ChangeClass:
    order: tuple[ChangeClass, ...] = ("numerics", "stochastic", "logging", "exact")
    for name in order:
        if any(change.change_class == name for change in changes):
            return name
    raise GpudoctorError("there is nothing to prove: no change was given")


def _problem(result: ProofResult) -> str | None:
    return f"the proof failed: {result.reason}" if result.verdict == "different" else None


def _epochs(watched: Watched) -> int:
    return max((loader.iterators for record in watched.records for loader in record.loaders), default=0)
