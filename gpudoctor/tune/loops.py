"""Which loops of the user's files have to be left early for the code after the training loop to run."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def loops_around(texts: Mapping[str, str], lines: Mapping[str, Collection[int]]) -> dict[str, tuple[int, ...]]:
    """First lines of the loops in which training goes on, by file.

    texts: the source by file. lines: what counts as training where no file calls backward(). A function that holds
    such a line is followed to its calls, by its name alone: leaving a loop too many can only make the code fail.
    A file that does not parse has no loops.
    """
    trees = {}
    for file, text in texts.items():
        try:
            trees[file] = ast.parse(text.removeprefix("\ufeff"))
        except (SyntaxError, ValueError, RecursionError):
            continue
    pending = [(file, line) for file, tree in trees.items() for line in _calls(tree, "backward")]
    if not pending:
        pending = [(file, line) for file in trees for line in lines.get(file, ())]
    found: dict[str, set[int]] = {file: set() for file in trees}
    followed: set[str] = set()
    while pending:
        file, line = pending.pop()
        for node in ast.walk(trees[file]):
            if not isinstance(node, (*_LOOPS, *_FUNCTIONS)) or not node.lineno <= line <= (node.end_lineno or 0):
                continue
            if isinstance(node, _LOOPS):
                found[file].add(node.lineno)
            elif node.name not in followed:
                followed.add(node.name)
                pending += [(other, at) for other, tree in trees.items() for at in _calls(tree, node.name)]
    return {file: tuple(sorted(loops)) for file, loops in found.items() if loops}


def _calls(tree: ast.Module, name: str) -> Iterator[int]:
    """Lines of the calls of a function or method of this name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called == name:
                yield node.lineno
