"""Edits of the model as a whole: its memory format, and the precision in which its forward pass runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpudoctor.prescribe.tree import CannotEditError, Splice, Tree, after_brackets, method_calls

if TYPE_CHECKING:
    import libcst as cst

_FORMAT_DECIDED = re.compile(r"\b(channels_last|memory_format)\b")
_PRECISION_DECIDED = re.compile(
    r"autocast|\bamp\b|GradScaler|\.half\(|bfloat16|\bfloat16|\bfp16|\bbf16|accelerat|lightning|deepspeed",
    re.IGNORECASE,
)


def channels_last(tree: Tree, line: int) -> str:
    """The text where the model made at `line` has the memory format channels_last."""
    value = find_model(tree)
    if not tree.lines(value)[0] <= line <= tree.lines(value)[1]:
        raise CannotEditError("the model is not made at this line")
    end = after_brackets(tree, value)
    return tree.spliced([(end, end, ".to(memory_format=torch.channels_last)")])


def find_model(tree: Tree) -> cst.BaseExpression:
    """What the model is made from; CannotEditError says why that cannot be told."""
    import libcst as cst

    if _FORMAT_DECIDED.search(tree.text):
        raise CannotEditError("the script sets a memory format itself")
    name = _model_name(tree)
    values = [
        node.value
        for node in tree.walk()
        if isinstance(node, cst.Assign) and any(tree.code(target.target) == name for target in node.targets)
    ]
    if not values or not isinstance(values[0], cst.Call):
        raise CannotEditError(f"it cannot be told where {name} is made")
    for later in values[1:]:  # such as DistributedDataParallel(model), torch.compile(model), model.to(device)
        if not re.search(rf"\b{re.escape(name)}\b", tree.code(later)):
            raise CannotEditError(f"{name} is given more than one value")
    return values[0]


def _model_name(tree: Tree) -> str:
    """The name whose parameters() are given to the optimizer."""
    import libcst as cst

    receivers = (receiver for _, receiver in method_calls(tree, "parameters"))
    names = {receiver.value for receiver in receivers if isinstance(receiver, cst.Name)}
    if len(names) != 1:
        raise CannotEditError("not the parameters of one model are used")
    return names.pop()


def autocast(tree: Tree, line: int) -> str:
    """The text where the forward pass that begins at `line`, up to the backward pass, runs under bfloat16 autocast."""
    statements = find_forward(tree)
    if tree.lines(statements[0])[0] != line:
        raise CannotEditError("the forward pass does not begin at this line")
    first = tree.line_start(tree.span(statements[0])[0])
    last = tree.line_end(tree.span(statements[-1])[1])
    indentation, unit = tree.indentation(first), tree.unit(statements[0])
    head = f'{indentation}with torch.autocast("cuda", dtype=torch.bfloat16):{tree.newline()}{unit}'
    filled = (start for start in tree.starts if tree.text[start : tree.line_end(start)].strip())
    splices: list[Splice] = [(start, start, unit) for start in filled if first < start <= last]
    return tree.spliced([(first, first, head), *splices])


def find_forward(tree: Tree) -> list[cst.CSTNode]:
    """The statements from the first that calls the model to the last before the only backward pass."""
    import libcst as cst

    if _PRECISION_DECIDED.search(tree.text):
        raise CannotEditError("the script decides itself about the precision")
    name = _model_name(tree)
    passes = [call for call, _ in method_calls(tree, "backward")]
    if len(passes) != 1:
        raise CannotEditError("there is not one backward pass in the file")
    block, end = tree.siblings(tree.statement(passes[0]))
    calls = (
        number
        for number in range(end)
        if any(isinstance(node, cst.Call) and tree.code(node.func) == name for node in tree.walk(block[number]))
    )
    begin = next(calls, None)
    if begin is None:
        raise CannotEditError(f"{name} is not called in the block of the backward pass")
    for statement in block[begin:end]:
        for node in tree.walk(statement):
            text = isinstance(node, (cst.SimpleString, cst.FormattedString))
            if text and tree.lines(node)[0] != tree.lines(node)[1]:
                raise CannotEditError("a text of several lines stands in the forward pass")
    return list(block[begin:end])
