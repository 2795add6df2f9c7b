"""The state of one walk through a program, and what is noted on the way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpudoctor.source import frames as heat
from gpudoctor.source.frames import Call, Candidate, Frame
from gpudoctor.source.project import Function, Module, Project
from gpudoctor.source.values import CPU, GPU, MAYBE, TENSOR, Thing, Value, Why

MAX_CALLS = 2000  # calls of functions that one walk follows from the code of the file itself
ALONE_CALLS = 150  # and from a function that nobody was seen to call
MAX_STATEMENTS = 30_000  # statements that one walk passes, repeated ones counted
MAX_MODULES = 60  # modules of the project that a walk looks into from a script
LIBRARY_MODULES = 10  # and from a file that only defines things
MAX_DEPTH = 14  # open calls
MAX_CANDIDATES = 5000


# Only a tensor can be asked for these; of what may be a model nothing else counts as a read.
EXPLICIT = frozenset(["item", "tolist", "float", "int", "cpu", "numpy"])


class Scope:
    """Names of one function or module; `outer` is where a name is looked up next."""

    __slots__ = ("function", "globals", "module", "names", "outer", "returns", "stars", "this", "yields")

    def __init__(self, module: Module, outer: Scope | None = None) -> None:
        self.module, self.outer = module, outer
        self.names: dict[str, Value] = {}
        self.returns: list[Value] = []
        self.yields: list[Value] = []
        self.globals: set[str] = set()
        self.stars: list[tuple[str, int]] = []  # from module import *: looked up last
        self.function: Function | None = None
        self.this: Value | None = None

    def forget(self) -> None:
        """Break the cycles between scopes, functions and values, so that memory is freed without a collection."""
        self.names.clear()
        self.returns.clear()
        self.yields.clear()
        self.outer = self.this = self.function = None

    def find(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            value = scope.names.get(name)
            if value is not None:
                return value
            scope = scope.outer
        return None


class Interpreter:
    """Walks a program with values in place of data. Nothing is imported or run."""

    def __init__(self, project: Project, module: Module) -> None:
        self.project = project
        self.module = module  # that of the code which is being walked
        self.opened: list[Scope] = []
        self.scope = Scope(module)
        self.frames: list[Frame] = []
        self.calls: list[Call] = []
        self.function: str | None = None
        self.statement: tuple[int, int] = (0, 0)
        self.candidates: list[Candidate] = []
        self.reached: set[tuple[str, str]] = set()  # (path, function) that were walked with known arguments
        self.scopes: dict[str, Scope] = {}  # of the modules, by path
        self.things: dict[tuple[str, int], Thing] = {}  # instances by the line that makes them
        self.loaders: dict[tuple[str, int, int], Any] = {}
        self.memo: dict[Any, Value] = {}
        self.count = 0
        self.most = MAX_CALLS
        self.most_modules = MAX_MODULES
        self.steps = MAX_STATEMENTS + len(module.lines)  # statements that may still be walked
        self.no_grad = 0
        self.default_device: Value | None = None
        self.synchronised = 0  # how many waits were seen so far
        self.trains = False
        self.uses_gpu: Why | None = None
        self.distributed = False
        self.indices: set[str] = set()  # cuda:0, cuda:1 written out
        self.all_frames: list[Frame] = []
        self.standalone: tuple[str, str] | None = None  # the function that is walked although nobody calls it
        self.in_worker: list[tuple[ast.AST, Function | None]] | None = None  # uses of a GPU below a dataset
        self.reached_elsewhere: set[tuple[str, str]] = set()  # in another file than the one that was asked for

    def close(self) -> None:
        """Nothing of the walk is needed any more."""
        for scope in self.opened:
            scope.forget()
        for scope in self.scopes.values():
            scope.forget()
        for thing in self.things.values():
            thing.attributes.clear()
            thing.late = None
        for part in (self.memo, self.scopes, self.things, self.candidates, self.all_frames, self.frames, self.loaders):
            part.clear()

    # where we are

    def site(self, node: ast.AST) -> str:
        return f"{self.module.subject}:{self.module.line_of(getattr(node, 'lineno', 1))}"

    def why(self, node: ast.AST, text: str | None = None) -> Why:
        return Why(text or self.module.text_of(node), self.site(node))

    def loop(self) -> Frame | None:
        """The innermost loop, or method that a framework calls in each step."""
        for frame in reversed(self.frames):
            if frame.counts_steps:
                return frame
        return None

    @contextmanager
    def frame(self, kind: str, node: ast.AST, text: str, *, name: str = "") -> Iterator[Frame]:
        frame = Frame(kind, self.module, getattr(node, "lineno", 1), text)
        frame.calls, frame.name = len(self.calls), name
        if self.no_grad:
            frame.evaluating = "no gradients are kept"
        self.frames.append(frame)
        if frame.counts_steps:
            self.all_frames.append(frame)
        try:
            yield frame
        finally:
            self.frames.pop()
            if frame.is_loop:
                self.leave_loop(frame)

    def leave_loop(self, frame: Frame) -> None:
        """``for opt in optimizers: opt.step()`` is no step loop: the step belongs to the loop around it."""
        outer = next((f for f in reversed(self.frames) if f.counts_steps), None)
        if outer is None:
            return
        only_steps = frame.optimizes and not (frame.backward or frame.models or frame.copies or frame.work)
        if frame.kind == heat.COLLECTION and only_steps:
            frame.optimizes = False
            outer.optimizes = True
        if frame.trains or frame.iterates_loader or frame.below:
            for other in self.frames:
                other.below = True
        outer.work += frame.work
        if frame.kind == heat.COLLECTION:
            outer.models += frame.models
            outer.copies += frame.copies

    # what happens

    def step_event(self, what: str) -> None:
        """backward() or an optimizer's step()."""
        self.trains = True
        for frame in reversed(self.frames):
            if frame.counts_steps:
                if what == "backward":
                    frame.backward = True
                else:
                    frame.optimizes = True
                return

    def work(self, *, models: int = 0, copies: int = 0) -> None:
        """An operation is queued on the GPU."""
        for frame in reversed(self.frames):
            if frame.counts_steps:
                frame.work += 1
                frame.models += models
                frame.copies += copies
                return

    def clock(self) -> None:
        for frame in reversed(self.frames):
            if frame.is_loop:
                frame.clock += 1
                return

    def saw_gpu(self, value: Value) -> None:
        if value.device in (GPU, MAYBE) and self.uses_gpu is None:
            self.uses_gpu = value.why

    def note(
        self,
        kind: str,
        node: ast.AST,
        operation: str,
        value: Value | None = None,
        *,
        line: int | None = None,
        **extra: Any,
    ) -> Candidate | None:
        """A line that may be a site. With a value only when that value is on a GPU."""
        if value is not None and value.device not in (GPU, MAYBE):
            return None
        if len(self.candidates) >= MAX_CANDIDATES:
            return None
        candidate = Candidate(kind, self.module, node, line if line is not None else getattr(node, "lineno", 1))
        candidate.operation, candidate.value, candidate.extra = operation, value, extra
        candidate.frames, candidate.calls = tuple(self.frames), tuple(self.calls)
        candidate.function = self.function
        if self.standalone is not None:
            extra["standalone"] = self.standalone
        first, last = self.statement
        candidate.statement = (min(first, candidate.line) or candidate.line, max(last, candidate.line))
        self.candidates.append(candidate)
        return candidate

    def read(
        self, node: ast.AST, operation: str, value: Value, *, kind: str = "host-read", line: int | None = None
    ) -> None:
        """The host takes the value: it waits for a GPU tensor, and finds nonsense in a copy that is still running."""
        if value.tag == "either" and operation not in EXPLICIT:
            return
        if value.kind == TENSOR and value.device == CPU:
            self.touch(node, value)
        elif value.kind == TENSOR:
            self.note(kind, node, operation, value, line=line)

    def touch(self, node: ast.AST, value: Value) -> None:
        """The data of a CPU tensor is used: a copy that fills it must be done."""
        if value.pending is not None and value.pending[1] == self.synchronised:
            self.note(
                "read-before-copy-done", node, "non_blocking", None, copied=value.pending[0], why=value.pending[2]
            )
