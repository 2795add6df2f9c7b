"""Names that a rewrite needs: taken from the imports that are there, or added beside the import of DataLoader."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpudoctor.prescribe.tree import LINE_LIMIT, CannotEditError, Tree, parse

if TYPE_CHECKING:
    import libcst as cst

_MODULE = "torch.utils.data"


@dataclass(frozen=True, slots=True)
class Imports:
    """`written`: how each name is written in the file. `missing`: (name, written) pairs to import from
    torch.utils.data, at the import statement whose text is `beside`, the `ordinal`-th one with that text."""

    written: dict[str, str]
    missing: tuple[tuple[str, str], ...]
    beside: str
    ordinal: int

    @classmethod
    def for_call(cls, tree: Tree, call: cst.Call, names: Sequence[str], taken: Collection[str]) -> Imports:
        """How `names` of torch.utils.data are written at the call. `taken`: identifiers of the file as it was.

        CannotEditError when no import of DataLoader is in sight of the call.
        """
        statement = _import_in_sight(tree, call)
        written, missing = {}, []
        star = _is_star(statement)
        present = _samplers_in_sight(tree, call)
        for name in names:
            if name in present:
                written[name] = present[name]
            elif star and name not in taken:
                written[name] = name
            else:
                alias = name if name not in taken else f"Torch{name}"
                if alias in taken:
                    raise CannotEditError(f"{name} and {alias} mean something else in this file")
                written[name] = alias
                missing.append((name, alias))
        text = tree.code(statement)
        same = [node for node in _from_imports(tree) if tree.code(node) == text]
        ordinal = [id(node) for node in same].index(id(statement))
        return cls(written=written, missing=tuple(missing), beside=text, ordinal=ordinal)


def add_imports(text: str, imports: Imports) -> str:
    """Add what is missing: in the statement where it fits on its line, else on a line after it."""
    tree = parse(text)
    same = [node for node in _from_imports(tree) if tree.code(node).startswith(imports.beside.rstrip(")"))]
    statement = same[min(imports.ordinal, len(same) - 1)]
    present = _imported(tree, statement)
    wanted = [
        name if name == alias else f"{name} as {alias}" for name, alias in imports.missing if present.get(name) != alias
    ]
    if not wanted:
        return text
    start, end = tree.span(statement)
    line_start, line_end = tree.line_start(start), tree.line_end(end)
    line = text[line_start:line_end]
    here = statement.module is not None and tree.code(statement.module) == _MODULE
    one_line = here and tree.lines(statement)[0] == tree.lines(statement)[1] and not text[start:end].endswith(")")
    joined = ", ".join(wanted)
    if one_line and not _is_star(statement) and len(line) + len(joined) + 2 <= LINE_LIMIT:
        return text[:end] + ", " + joined + text[end:]
    new = f"{tree.newline()}{tree.indentation(start)}from {_MODULE} import {joined}"
    return text[:line_end] + new + text[line_end:]


def _from_imports(tree: Tree) -> list[cst.ImportFrom]:
    import libcst as cst

    return [node for node in tree.walk() if isinstance(node, cst.ImportFrom)]


def _is_star(statement: cst.ImportFrom) -> bool:
    import libcst as cst

    return isinstance(statement.names, cst.ImportStar)


def _imported(tree: Tree, statement: cst.ImportFrom) -> dict[str, str]:
    """Names of one ``from torch.utils.data import ...`` statement, and how they are written."""
    import libcst as cst

    if isinstance(statement.names, cst.ImportStar):
        return {}
    found = {}
    for alias in statement.names:
        name = tree.code(alias.name)
        found[name] = tree.code(alias.asname.name) if alias.asname is not None else name
    return found


def _scope(tree: Tree, node: cst.CSTNode) -> cst.CSTNode:
    import libcst as cst

    return next(parent for parent in tree.up(node) if isinstance(parent, (cst.FunctionDef, cst.ClassDef, cst.Module)))


def _in_sight(tree: Tree, call: cst.Call, modules: str) -> list[cst.ImportFrom]:
    """The imports from modules of that pattern that the function of the call, or the module, can see."""
    import libcst as cst

    scopes = {id(parent) for parent in tree.up(call) if isinstance(parent, (cst.FunctionDef, cst.Module))}
    return [
        node
        for node in _from_imports(tree)
        if node.module is not None
        and re.fullmatch(modules, tree.code(node.module))
        and id(_scope(tree, node)) in scopes
    ]


def _samplers_in_sight(tree: Tree, call: cst.Call) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in _in_sight(tree, call, r"torch\.utils\.data(\.sampler)?"):
        found.update(_imported(tree, node))
    return found


def _import_in_sight(tree: Tree, call: cst.Call) -> cst.ImportFrom:
    """The last import of DataLoader that the call can see."""
    best: cst.ImportFrom | None = None
    for node in _in_sight(tree, call, r"torch\.utils\.data(\.dataloader)?|torchdata\.stateful_dataloader"):
        if _is_star(node) or {"DataLoader", "StatefulDataLoader"} & _imported(tree, node).keys():
            best = node
    if best is None:
        raise CannotEditError("the import of DataLoader was not found")
    return best
