"""Fetch whole batches: the dataset is indexed once with the list of a batch's rows.

``DataLoader(ds, batch_size=B, shuffle=True)`` draws the same rows in the same order as
``DataLoader(ds, sampler=BatchSampler(RandomSampler(ds), B, drop_last=False), batch_size=None)``. What is delivered
is what the dataset returns for a list of rows, passed through torch's default conversion: a tuple arrives as a
list there too, as it does from the default collation of single rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from gpudoctor.prescribe.imports import Imports
from gpudoctor.prescribe.loader_edit import POSITIONAL, bound_arguments, find_loader, removals
from gpudoctor.prescribe.tree import LINE_LIMIT, CannotEditError, Splice, Tree, last_name, name_or_attribute, used_names

if TYPE_CHECKING:
    import libcst as cst

# They take a loader apart and build it again from its attributes.
_REBUILDERS = {"accelerate", "deepspeed", "fastai", "ignite", "lightning", "pytorch_lightning", "ray", "transformers"}
_LOST_ATTRIBUTES = {"batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn"}
_FRESH_NAMES = ("dataset", "loader_dataset", "whole_dataset")


def whole_batch(tree: Tree, line: int, taken: Collection[str]) -> tuple[str, Imports | None, int]:
    """The text with the loader at `line` fetching whole batches, the names that still have to be imported, and the
    number of lines that were put above the call. `taken`: identifiers of the file before any edit."""
    call = find_loader(tree, line)
    bound = bound_arguments(call)
    _refuse(tree, call, bound)
    shuffle = tree.code(bound["shuffle"].value) if "shuffle" in bound else "None"
    if shuffle not in {"True", "False", "None"}:
        raise CannotEditError(f"shuffle={shuffle} is not known before the run")
    order = "RandomSampler" if shuffle == "True" else "SequentialSampler"
    batch, (sampler,), imports = _callables(tree, call, order, taken)
    before, dataset = _dataset(tree, call, bound["dataset"])
    generator = ""
    if order == "RandomSampler" and "generator" in bound:
        if not name_or_attribute(bound["generator"].value):
            raise CannotEditError("the generator is made in the call, so it cannot be shared with the sampler")
        generator = f", generator={tree.code(bound['generator'].value)}"
    size = tree.code(bound["batch_size"].value) if "batch_size" in bound else "1"
    drop_last = tree.code(bound["drop_last"].value) if "drop_last" in bound else "False"
    new = f"sampler={batch}({sampler}({dataset}{generator}), {size}, drop_last={drop_last})"
    splices = list(before)
    gone = [bound[name] for name in ("shuffle", "drop_last", "sampler", "batch_sampler") if name in bound]
    splices += removals(tree, call, gone)
    gone_ids = {id(argument) for argument in gone}
    for position, argument in enumerate(call.args):  # what follows the dataset by position gets its name
        if argument.keyword is None and position > 1 and id(argument) not in gone_ids:
            start = tree.span(argument)[0]
            splices.append((start, start, f"{POSITIONAL[position]}="))
    anchor = bound.get("batch_size")
    splices.append(_placed(tree, call, anchor, new, bound["dataset"]))
    return tree.spliced(splices), imports, len(re.findall(r"\r\n?|\n", before[0][2])) if before else 0


def _refuse(tree: Tree, call: cst.Call, bound: Mapping[str, cst.Arg]) -> None:
    import libcst as cst

    if "dataset" not in bound:
        raise CannotEditError("the call names no dataset")
    for name in ("sampler", "batch_sampler", "collate_fn"):
        if name in bound and tree.code(bound[name].value) != "None":
            raise CannotEditError(f"the loader has its own {name}")
    if "batch_size" in bound and tree.code(bound["batch_size"].value) == "None":
        raise CannotEditError("batch_size=None: the loader fetches whole batches already")
    names = _names_of(tree, call)
    for node in tree.walk():
        if isinstance(node, cst.Attribute) and node.attr.value in _LOST_ATTRIBUTES:
            base = last_name(node.value)
            if base and (base in names or "loader" in base.lower()):
                where = tree.lines(node)[0]
                raise CannotEditError(f"line {where} reads {base}.{node.attr.value}, which would be another value")
        elif isinstance(node, (cst.Import, cst.ImportFrom)):
            module = node.module if isinstance(node, cst.ImportFrom) else None
            roots = {_root(alias.name) for alias in node.names} if isinstance(node, cst.Import) else set()
            roots |= {_root(module)} if module is not None else set()
            if found := sorted(roots & _REBUILDERS):
                raise CannotEditError(f"{found[0]} rebuilds the loaders that it is given from their batch size")


def _root(node: cst.CSTNode) -> str:
    import libcst as cst

    while isinstance(node, cst.Attribute):
        node = node.value
    return node.value if isinstance(node, cst.Name) else ""


def _names_of(tree: Tree, call: cst.Call) -> set[str]:
    """The names that the statement of the call gives to the loader."""
    import libcst as cst

    targets: list[cst.CSTNode] = []
    for parent in tree.up(call):
        if isinstance(parent, cst.Assign):
            targets += [target.target for target in parent.targets]
        elif isinstance(parent, (cst.AnnAssign, cst.NamedExpr)):
            targets.append(parent.target)
    return {name for target in targets for node in tree.walk(target) if (name := last_name(node))}


def _callables(
    tree: Tree, call: cst.Call, order: str, taken: Collection[str]
) -> tuple[str, tuple[str], Imports | None]:
    """How BatchSampler and the order's sampler are written here, and what has to be imported for it."""
    import libcst as cst

    if isinstance(call.func, cst.Attribute):
        origin = {name.rsplit(".", 1)[0] for name in tree.refers_to(call.func)}
        if origin == {"torch.utils.data"}:
            prefix = tree.code(call.func.value)
            return f"{prefix}.BatchSampler", (f"{prefix}.{order}",), None
    imports = Imports.for_call(tree, call, ("BatchSampler", order), taken)
    return imports.written["BatchSampler"], (imports.written[order],), imports if imports.missing else None


def _dataset(tree: Tree, call: cst.Call, argument: cst.Arg) -> tuple[list[Splice], str]:
    """The dataset is written twice: as it is when that evaluates nothing, else under a name set on the line before."""
    text = tree.code(argument.value)
    if name_or_attribute(argument.value):
        return [], text
    statement = _movable(tree, call)
    used = used_names(tree)
    fresh = next((name for name in _FRESH_NAMES if name not in used), None)
    fresh = fresh or next(f"dataset_{number}" for number in range(2, 1000) if f"dataset_{number}" not in used)
    start = tree.line_start(tree.span(statement)[0])
    source = tree.text[slice(*tree.span(argument.value))]
    span = tree.span(argument)
    if argument.value.lpar or "\n" in source or "\r" in source:
        source = tree.text[slice(*tree.span(argument))]
        source = source.split("=", 1)[1].strip() if argument.keyword is not None else source
    name = f"{argument.keyword.value}={fresh}" if argument.keyword is not None else fresh
    assignment = f"{tree.indentation(start)}{fresh} = {source}{tree.newline()}"
    return [(start, start, assignment), (*span, name)], fresh


def _movable(tree: Tree, call: cst.Call) -> cst.CSTNode:
    """The statement before which the dataset can be made: nothing in it may run before, or instead of, the call."""
    import libcst as cst

    node: cst.CSTNode = call
    for parent in tree.up(call):
        if isinstance(parent, (cst.SimpleStatementLine, cst.For)):
            if isinstance(parent, cst.SimpleStatementLine) and parent.body[0] is not node:
                break
            if isinstance(parent, cst.For) and parent.iter is not node:
                break
            tree.siblings(parent)  # a statement on the line of its `if` cannot get a line before it
            return parent
        allowed = (cst.Arg, cst.Assign, cst.AnnAssign, cst.Return, cst.Expr)
        first_call = isinstance(parent, cst.Call) and parent.args and parent.args[0] is node
        if not isinstance(parent, allowed) and not (first_call and name_or_attribute(parent.func)):  # type: ignore[attr-defined]
            break
        node = parent
    raise CannotEditError("the dataset is made inside a larger expression, so it cannot be named on a line before")


def _placed(tree: Tree, call: cst.Call, size: cst.Arg | None, new: str, dataset: cst.Arg) -> Splice:
    """`sampler=..., batch_size=None` in the place of batch_size, wrapped as the call is where the line gets long."""
    start, end = tree.span(size) if size is not None else (tree.span(dataset)[1],) * 2
    first = tree.span(call.args[0])[0]
    before = tree.text[tree.line_start(start) : start]
    own_line = not before.strip()
    if own_line and size is not None:
        gap = f",{tree.newline()}{tree.indentation(start)}"
    elif len(before) + len(new) + len(", batch_size=None") + 2 <= LINE_LIMIT:
        gap = ", "
    else:
        prefix = tree.text[tree.line_start(first) : first]
        gap = f",{tree.newline()}" + "".join("\t" if character == "\t" else " " for character in prefix)
    lead = gap if size is None else ""
    return start, end, f"{lead}{new}{gap}batch_size=None"
