"""DataLoader calls: their arguments, what they read, and where their batches go."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from gpudoctor.source import frames as heat
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import COSTLY_DATASETS
from gpudoctor.source.values import ANY, INSTANCE, LOADER, NO_CONST, OBJECT, SEQUENCE, Value, sequence

if TYPE_CHECKING:
    from gpudoctor.source.calls import Arguments
    from gpudoctor.source.frames import Frame
    from gpudoctor.source.project import Class, Module

POSITIONS = {
    "dataset": 0,
    "batch_size": 1,
    "shuffle": 2,
    "sampler": 3,
    "batch_sampler": 4,
    "num_workers": 5,
    "collate_fn": 6,
    "pin_memory": 7,
}


class Loader:
    """One call of DataLoader."""

    def __init__(self, module: Module, node: ast.Call, statement: tuple[int, int], site: str, name: str) -> None:
        self.module, self.node, self.statement, self.site, self.name = module, node, statement, site, name
        self.arguments: dict[str, Value] = {}
        self.open = False  # **kwargs: what is not seen may be set
        self.dataset: Value = ANY
        self.loops: list[tuple[Frame, ...]] = []  # the frames of each loop over it, its own last
        self.moves: list[tuple[str, Value, tuple[Frame, ...]]] = []
        self.standalone: tuple[str, str] | None = None
        self.prepared = False  # accelerate, Fabric or Lightning moves its batches

    def iterated(self, frames: tuple[Frame, ...]) -> None:
        if len(self.loops) < 20:
            self.loops.append(frames)

    def known(self, name: str, default: Any) -> Any:
        """The constant given for an argument, its default when it is not given; None when it is not a constant."""
        value = self.arguments.get(name)
        if value is None:
            return None if self.open else default
        return None if value.const is NO_CONST else value.const

    @property
    def num_workers(self) -> int | None:
        value = self.known("num_workers", 0)
        return value if isinstance(value, int) else None

    @property
    def pin_memory(self) -> bool | None:
        value = self.known("pin_memory", False)
        return bool(value) if value is not None else None

    @property
    def persistent_workers(self) -> bool | None:
        value = self.known("persistent_workers", False)
        return bool(value) if value is not None else None


def make(it: Interpreter, given: Arguments, node: ast.Call, name: str) -> Value:
    key = (it.module.source.path, node.lineno, node.col_offset)
    loader = it.loaders.get(key)
    if loader is None:
        loader = it.loaders[key] = Loader(it.module, node, it.statement, it.site(node), name)
        loader.standalone = it.standalone
    for argument, position in POSITIONS.items():
        value = given.get(position, argument)
        if value is not None:
            loader.arguments[argument] = value
    for argument, value in given.named.items():
        loader.arguments[argument] = value
    loader.open = given.rest is not None
    loader.dataset = loader.arguments.get("dataset", ANY)
    value = Value(LOADER, name=name)
    value.ref = loader
    return value


def subset(given: Arguments, name: str) -> Value:
    """A part of a dataset costs what the dataset costs."""
    first = given.values[0] if given.values else ANY
    if first.kind == SEQUENCE:
        from gpudoctor.source.values import element

        first = element(first)
    return sequence(first) if name == "random_split" else first


def dataset_class(value: Value) -> tuple[Class, Any] | None:
    if value.kind == INSTANCE and value.ref.cls is not None:
        found: tuple[Class, Any] = value.ref.cls
        return found
    return None


def costly(it: Interpreter, value: Value) -> str | None:
    """Why a sample is costly: its __getitem__ calls something besides indexing, or it decodes files."""
    from gpudoctor.source import classes

    found = dataset_class(value)
    if found is not None:
        method = classes.find_method(it, *found, "__getitem__")
        if method is None:
            return None
        for node in ast.walk(method[0].node):
            if isinstance(node, ast.Call) and not _cheap(node):
                return f"{found[0].name}.__getitem__ calls {method[0].module.text_of(node.func)}() for each sample"
        return None
    if value.kind == OBJECT and value.name and COSTLY_DATASETS.search(value.name):
        return f"{value.name.rpartition('.')[2]} decodes a file for each sample"
    return None


def _cheap(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in {
        "len",
        "int",
        "float",
        "item",
        "range",
        "tuple",
        "list",
        "dict",
        "super",
        "isinstance",
        "get",
        "long",
        "clone",
    }


def epochs_around(frames: tuple[Frame, ...]) -> Frame | None:
    """The loop outside of the loop over the loader that starts it again, if it does so more than once."""
    for frame in reversed(frames[:-1]):
        if frame.kind == heat.STEP and not frame.iterates_loader and frame.times != 1:
            return frame
        if frame.kind == heat.COLLECTION and not frame.elements and frame.times != 1:
            return frame
    return None
