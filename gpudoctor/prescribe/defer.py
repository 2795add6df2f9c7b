"""``value = loss.item()`` stays on the device; only where the value is shown or checked is it read.

What is made of the value at every step may be sums and lists, which stay on the device as well until the loop has
ended. Any other use at every step is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpudoctor.prescribe.accumulator import (
    Kind,
    as_operand,
    innermost_loop,
    kind_of,
    read_back,
    refuse_cuda_graphs,
    refuse_factors,
    sum_parts,
    value_read,
)
from gpudoctor.prescribe.collect import appended
from gpudoctor.prescribe.log_edit import find_rare
from gpudoctor.prescribe.reads import Read, reads
from gpudoctor.prescribe.tree import CannotEditError, Splice, Tree

if TYPE_CHECKING:
    import libcst as cst

    from gpudoctor.prescribe.counter import Loop


@dataclass(slots=True)
class Deferral:
    """`name` is set at `statement` from `value`. `sums` and `lists` are (name, line) of what is made of it at every
    step, `shown` the first lines of the output and checks that read it; those in `each_step` stand under no condition,
    so that they have to come more rarely."""

    name: str
    statement: cst.Assign
    value: cst.BaseExpression
    loop: Loop
    kind: Kind
    sums: list[tuple[str, int]] = field(default_factory=list)
    lists: list[tuple[str, int]] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    each_step: list[int] = field(default_factory=list)
    numbers: list[cst.Name] = field(default_factory=list)  # reads that get a Python number
    behind: list[str] = field(default_factory=list)  # what makes numbers again behind the loop


def find_deferral(tree: Tree, line: int) -> Deferral:
    """What becomes of the value that is read at `line`; CannotEditError when a use needs the number at every step."""
    import libcst as cst

    for simple in tree.at(cst.SimpleStatementLine, line):
        small = simple.body[0]
        if len(simple.body) != 1 or not isinstance(small, cst.Assign) or len(small.targets) != 1:
            continue
        target, value = small.targets[0].target, value_read(tree, small.value)
        if not isinstance(target, cst.Name) or value is None:
            continue
        loop = innermost_loop(tree, small)
        found = Deferral(target.value, small, value, loop, kind_of(tree, value, small))
        _refuse_other_values(tree, found)
        for read in reads(tree, found.name, tree.function(small)):
            if loop not in tree.up(read.node):
                raise CannotEditError(f"line {tree.lines(read.node)[0]} uses {found.name} outside of its loop")
        for read in reads(tree, found.name, loop):
            _judge(tree, found, read)
        return found
    raise CannotEditError("no name = value.item() at this line")


def defer_read(tree: Tree, line: int, name: str | None) -> str:
    """The text with the value kept on the device."""
    found = find_deferral(tree, line)
    if name is not None and name != found.name:
        raise CannotEditError(f"the value at this line is {found.name}, not {name}")
    refuse_cuda_graphs(tree.text)
    start, end = tree.span(found.statement.value)
    splices: list[Splice] = [(start, end, f"{as_operand(tree, found.value)}.detach().double()")]
    splices += [(*tree.span(node), f"{found.kind}({node.value})") for node in found.numbers]
    lines = [new for behind in dict.fromkeys(found.behind) for new in read_back(tree, found.loop, behind)]
    if lines:  # at one place: in one splice, so that their order is known
        splices.append((lines[0][0], lines[0][1], "".join(new for _, _, new in lines)))
    return tree.spliced(splices)


def _refuse_other_values(tree: Tree, found: Deferral) -> None:
    """The name has this value alone, nobody else sees it, and the tensor is not changed in place."""
    import libcst as cst

    function = tree.function(found.statement)
    changed = found.value.value if isinstance(found.value, cst.Name) else None
    for node in tree.walk(function):
        if isinstance(node, (cst.Global, cst.Nonlocal)) and any(each.name.value == found.name for each in node.names):
            raise CannotEditError(f"{found.name} is global or nonlocal")
        inner = isinstance(node, (cst.FunctionDef, cst.Lambda, cst.ClassDef)) and node is not function
        if inner and any(isinstance(part, cst.Name) and part.value == found.name for part in tree.walk(node)):
            raise CannotEditError(f"{found.name} is used by a nested function or class")
        if isinstance(node, cst.Name) and node.value == found.name and node is not found.statement.targets[0].target:
            first = tree.parents[node]
            set_here = any(isinstance(parent, cst.AssignTarget) for parent in tree.up(node))
            if set_here or (isinstance(first, (cst.AugAssign, cst.For, cst.NamedExpr)) and first.target is node):
                raise CannotEditError(f"line {tree.lines(node)[0]} gives {found.name} another value")
        if isinstance(node, cst.AugAssign) and isinstance(node.target, cst.Name) and node.target.value == changed:
            raise CannotEditError(f"line {tree.lines(node)[0]} changes {changed} in place")


def _judge(tree: Tree, found: Deferral, read: Read) -> None:
    line = tree.lines(read.node)[0]
    statement = read.statement
    if statement is not None and (parts := _sum(tree, statement)) is not None:
        name, added = parts
        refuse_factors(tree, added, read.node, name)
        found.sums.append((name, line))
        found.behind.append(f"{name} = {found.kind}({name})")
        _numbers_of_sum(tree, found, name)
        return
    if statement is not None and (place := appended(tree, statement)) is not None:
        written, name, node = place
        if node is read.node:
            found.lists.append((name, line))
            found.behind.append(f"{written}[:] = [{found.kind}(value) for value in {written}]")
            return
    if not read.converted and not (read.formatted and found.kind == "float"):
        found.numbers.append(read.node)
    first = _output(tree, line)
    if first is not None:
        found.shown.append(first)
    if not read.conditional:
        if first is None:
            raise CannotEditError(f"line {line} needs {found.name} at every step")
        found.each_step.append(first)


def _output(tree: Tree, line: int) -> int | None:
    """The first line of the output or check at `line`."""
    try:
        return tree.lines(find_rare(tree, line))[0]
    except CannotEditError:
        return None


def _sum(tree: Tree, statement: cst.BaseSmallStatement) -> tuple[str, cst.BaseExpression] | None:
    try:
        return sum_parts(tree, statement)
    except CannotEditError:
        return None


def _numbers_of_sum(tree: Tree, found: Deferral, name: str) -> None:
    """Rare reads of a sum get the number; of a count every other read is refused, since it is kept as a float."""
    for read in reads(tree, name, found.loop):
        if read.converted or read.statement is None or _is_own(tree, read, name):
            continue
        if read.rare and not (read.formatted and found.kind == "float"):
            found.numbers += [read.node] if read.node not in found.numbers else []
        elif not read.rare and found.kind == "int":
            raise CannotEditError(f"line {tree.lines(read.node)[0]} needs the count {name} at every step")


def _is_own(tree: Tree, read: Read, name: str) -> bool:
    parts = _sum(tree, read.statement) if read.statement is not None else None
    return parts is not None and parts[0] == name
