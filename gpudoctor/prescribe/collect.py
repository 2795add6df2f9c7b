"""``losses.append(loss.item())`` keeps the value on the device; behind the loop the list holds Python numbers again.

The list is changed in place, so other names for it see the numbers too. Each value costs one small allocation on
the device (512 bytes) until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpudoctor.prescribe.accumulator import (
    as_operand,
    innermost_loop,
    kind_of,
    read_back,
    refuse_cuda_graphs,
    value_read,
)
from gpudoctor.prescribe.tree import CannotEditError, Tree

if TYPE_CHECKING:
    import libcst as cst


@dataclass(frozen=True, slots=True)
class Collection:
    """`place` is the list as it is written (``losses`` or ``history["loss"]``), `name` its first name."""

    name: str
    place: str
    statement: cst.BaseSmallStatement
    read: cst.BaseExpression
    value: cst.BaseExpression


def find_collection(tree: Tree, line: int) -> Collection:
    """The append at `line`; CannotEditError when the statement has another form."""
    import libcst as cst

    for simple in tree.at(cst.SimpleStatementLine, line):
        for small in simple.body:
            call = small.value if isinstance(small, cst.Expr) else None
            if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
                continue
            if call.func.attr.value != "append" or len(call.args) != 1:
                continue
            read = call.args[0].value
            value = value_read(tree, read)
            name = _name(call.func.value)
            if value is None:
                raise CannotEditError("what is appended is not one value read from the device")
            if name is None:
                raise CannotEditError(f"{tree.code(call.func.value)} is no plain list, so other code may read it")
            place = tree.code(call.func.value)
            return Collection(name=name, place=place, statement=small, read=read, value=value)
    raise CannotEditError("no append of a value read from the device at this line")


def appended(tree: Tree, small: cst.BaseSmallStatement) -> tuple[str, str, cst.BaseExpression] | None:
    """(list as it is written, its first name, what is appended) of ``losses.append(value)``, or None."""
    import libcst as cst

    call = small.value if isinstance(small, cst.Expr) else None
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
        return None
    name = _name(call.func.value)
    if call.func.attr.value != "append" or len(call.args) != 1 or name is None:
        return None
    return tree.code(call.func.value), name, call.args[0].value


def collect_device(tree: Tree, line: int, name: str | None) -> str:
    """The text with the values kept on the device inside the loop."""
    found = find_collection(tree, line)
    if name is not None and name != found.name:
        raise CannotEditError(f"the list at this line is {found.name}, not {name}")
    refuse_cuda_graphs(tree.text)
    loop = innermost_loop(tree, found.statement)
    kind = kind_of(tree, found.value, found.statement)
    # A copy of its own: the loop may change the tensor in place, or the value may be a part of a large one.
    start, end = tree.span(found.read)
    splices = [(start, end, f"{as_operand(tree, found.value)}.detach().clone()")]
    line_behind = f"{found.place}[:] = [{kind}(value) for value in {found.place}]"
    return tree.spliced([*splices, *read_back(tree, loop, line_behind)])


def _name(node: cst.BaseExpression) -> str | None:
    """``losses``, or ``history`` of ``history["loss"]``."""
    import libcst as cst

    if isinstance(node, cst.Subscript) and len(node.slice) == 1:
        index = node.slice[0].slice
        if isinstance(index, cst.Index) and isinstance(index.value, cst.SimpleString):
            node = node.value
    return node.value if isinstance(node, cst.Name) else None
