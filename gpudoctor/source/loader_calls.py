"""DataLoader calls in a file: which one loads what a given callable makes, and with which literal settings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

# The positional order of torch.utils.data.DataLoader.
_POSITIONAL = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")
_NUMBERS = ("batch_size", "num_workers", "prefetch_factor")
_SWITCHES = ("shuffle", "drop_last", "pin_memory", "persistent_workers", "in_order")
_FUNCTIONS = ("collate_fn", "worker_init_fn")
_METHODS = {"fork", "spawn", "forkserver"}

Literal = int | bool | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCall:
    """One call. `arguments`: those that are literals, and functions by their name. `workers_known`: num_workers is a
    literal, or is not given at all."""

    line: int
    arguments: dict[str, Literal] = field(default_factory=dict)
    workers_known: bool = True


def loader_of(text: str, maker: str) -> LoaderCall | None:
    """The first DataLoader call whose dataset is `maker()`, or a name that was set to it; None when there is none, or
    the text is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    made = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _calls(node.value, maker)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _name(node.func) != "DataLoader":
            continue
        arguments = dict(_bound(node))
        dataset = arguments.get("dataset")
        if dataset is not None and (_calls(dataset, maker) or (isinstance(dataset, ast.Name) and dataset.id in made)):
            found.append(node)
    if not found:
        return None
    first = min(found, key=lambda node: node.lineno)
    bound = dict(_bound(first))
    known = all(keyword.arg is not None for keyword in first.keywords)
    workers = bound.get("num_workers")
    literal = workers is None or isinstance(workers, ast.Constant)
    return LoaderCall(line=first.lineno, arguments=_literals(bound), workers_known=known and literal)


def _bound(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(_POSITIONAL, call.args, strict=False)
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None)


def _literals(bound: dict[str, ast.expr]) -> dict[str, Literal]:
    result: dict[str, Literal] = {}
    for name, value in bound.items():
        constant = value.value if isinstance(value, ast.Constant) else ...
        number = isinstance(constant, int) and not isinstance(constant, bool)
        if (
            (name in _NUMBERS and (number or constant is None))
            or (name in _SWITCHES and isinstance(constant, bool))
            or (name == "multiprocessing_context" and constant in _METHODS)
        ):
            result[name] = constant  # type: ignore[assignment]
        elif name in _FUNCTIONS and isinstance(value, ast.Name):
            result[name] = value.id
    return result


def _calls(node: ast.expr, maker: str) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) == maker.rpartition(".")[2]


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
