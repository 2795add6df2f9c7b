"""Which lines run in every step: the loops and guards around them, through all calls, judged at the end.

While the interpreter walks, loops, hooks and guards are pushed as frames, and what happens inside is noted on them. A
line is hot when the nearest loop that is a step loop is reached from it without crossing a guard.
"""

from __future__ import annotations

import ast
from typing import Any

from gpudoctor.source.project import Function, Module

# Kinds of frames.
STEP = "step"  # a loop over numbers, a loader, batches, or a while loop
COLLECTION = "collection"  # a loop over what is at hand: a list, a dict, parameters, layers
HOOK = "hook"  # a method that a framework calls in each step
ONE_STEP = "one-step"  # a function that may be one training step; it is one when backward() and step() are in it
GUARD = "guard"  # what is below runs rarely
SOFT_GUARD = "soft-guard"  # what is below depends on the data: prints and checkpoints there are meant to be rare
SCOPE = "scope"  # no_grad and evaluation

TRAINING, EVALUATING = "training", "evaluating"


class Frame:
    __slots__ = (
        "backward",
        "below",
        "calls",
        "clock",
        "copies",
        "elements",
        "evaluating",
        "iterates_loader",
        "kind",
        "line",
        "models",
        "module",
        "name",
        "optimizes",
        "text",
        "times",
        "work",
    )

    def __init__(self, kind: str, module: Module, line: int, text: str) -> None:
        self.kind, self.module, self.line, self.text = kind, module, line, text
        self.calls = 0  # how many calls were open when it was pushed
        self.name = ""
        self.elements: str | None = None  # COLLECTION: parameters, modules or comprehension
        self.iterates_loader = False
        self.evaluating: str | None = None  # why this is no training
        self.backward = self.optimizes = False
        self.work = self.models = self.copies = 0  # operations, model calls and copies to a GPU seen inside
        self.clock = 0  # readings of a clock
        self.below = False  # a training or loader loop stands inside
        self.times: int | None = None  # how often it runs, where that is a constant

    @property
    def trains(self) -> bool:
        return self.backward or self.optimizes

    @property
    def is_loop(self) -> bool:
        return self.kind in (STEP, COLLECTION)

    @property
    def counts_steps(self) -> bool:
        return self.kind in (STEP, COLLECTION, HOOK, ONE_STEP)


class Call:
    """An open call of a function of the project."""

    __slots__ = ("caller", "function", "line")

    def __init__(self, function: Function, caller: Module, line: int) -> None:
        self.function, self.caller, self.line = function, caller, line


class Candidate:
    """A line that would be a site if it is hot. Which loops are hot is known only when everything was walked."""

    __slots__ = (
        "calls",
        "detail",
        "extra",
        "frames",
        "function",
        "kind",
        "line",
        "module",
        "node",
        "operation",
        "statement",
        "sure",
        "value",
    )

    def __init__(self, kind: str, module: Module, node: ast.AST, line: int) -> None:
        self.kind, self.module, self.node, self.line = kind, module, node, line
        self.operation = ""
        self.value: Any = None
        self.frames: tuple[Frame, ...] = ()
        self.calls: tuple[Call, ...] = ()
        self.function: str | None = None
        self.statement = (line, line)
        self.extra: dict[str, Any] = {}


class Heat:
    """Decides with what was seen in the whole walk: `trains` is whether any training was."""

    def __init__(self, *, trains: bool) -> None:
        self.trains = trains

    def step_loop(self, frames: tuple[Frame, ...], kind: str) -> Frame | None:
        """The frame that makes a line hot, or None."""
        for index in range(len(frames) - 1, -1, -1):
            frame = frames[index]
            if frame.kind == GUARD or (frame.kind == SOFT_GUARD and kind in ("checkpoint", "print")):
                return None
            if self.is_hot(frame):
                return frame if self._is_reached(frames[:index], frame) else None
        return None

    def is_hot(self, frame: Frame) -> bool:
        if frame.kind == HOOK:
            return True
        if frame.kind == ONE_STEP:
            return frame.backward and frame.optimizes
        if not frame.is_loop or self._harness(frame):
            return False
        if frame.trains:
            return True
        if frame.evaluating and self.trains:
            return False
        if frame.iterates_loader:
            return True
        if frame.below:
            return False  # a loop over epochs
        if frame.kind == STEP:
            return frame.work > 0
        if frame.elements is not None:
            return frame.elements == "comprehension" and frame.models > 0
        return frame.models > 0 or (frame.name == "batches" and frame.copies > 0 and frame.work > 0)

    def _harness(self, frame: Frame) -> bool:
        """A loop that only measures: it reads a clock and trains nothing."""
        return frame.clock > 1 and not frame.trains and not frame.iterates_loader

    def _is_reached(self, outer: tuple[Frame, ...], frame: Frame) -> bool:
        """A loop under a guard of an outer step loop runs at intervals: an evaluation, a report."""
        if frame.trains and frame.is_loop:
            return not any(f.kind == GUARD and f.name in ("cached", "timing", "evaluation") for f in outer)
        guarded = False
        for other in reversed(outer):
            if other.kind == GUARD:
                guarded = True
                if other.name in ("cached", "timing", "evaluation", "warm-up"):
                    return False
            elif guarded and self.is_hot(other):
                return False
        return True
