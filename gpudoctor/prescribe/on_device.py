"""``torch.zeros(n).to(device)`` in each step: made on the device in the first place, so that nothing is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudoctor.prescribe.sync_edit import moves_to_device
from gpudoctor.prescribe.tree import CannotEditError, Splice, Tree, after_brackets, last_name, name_or_attribute

if TYPE_CHECKING:
    import libcst as cst

# They give the same tensor on every device. arange does of whole numbers; of others the last digit may differ.
_SAME = {"torch.zeros", "torch.ones", "torch.full", "torch.eye"}
# They draw from the generator of their device: the same distribution, other numbers.
_RANDOM = {"torch.rand", "torch.randn", "torch.randint"}
# They move or round values in the same way everywhere, and take no other tensor.
_SHAPING = {
    "view", "reshape", "unsqueeze", "squeeze", "expand", "repeat", "transpose", "permute", "t", "flatten", "contiguous",
    "clone", "tril", "triu", "bool", "int", "long", "float", "half", "bfloat16", "double",
}  # fmt: skip
_TRIANGLES = {"torch.tril", "torch.triu"}
# Arguments with which the tensor is tied to the host, or to the graph that begins there.
_TIED = {"device", "out", "generator", "pin_memory", "requires_grad", "layout", "names"}


def make_on_device(tree: Tree, line: int, *, random: bool) -> str:
    """The text with every tensor that is made and moved at `line` made on the device.

    random: take functions that draw random numbers; else they are refused.
    """
    import libcst as cst

    splices: list[Splice] = []
    for call in tree.at(cst.Call, line):
        if not isinstance(call.func, cst.Attribute) or not moves_to_device(tree, call):
            continue
        maker = _maker(tree, call.func.value, random=random)
        device = _device(tree, call)
        end = tree.span(maker.args[-1])[1]
        splices.append((end, end, f", device={device}"))
        if _only_moves(call):
            splices.append((after_brackets(tree, call.func.value), tree.span(call)[1], ""))
    if not splices:
        raise CannotEditError("no copy to a device that can be told from the line")
    return tree.spliced(splices)


def _maker(tree: Tree, node: cst.BaseExpression, *, random: bool) -> cst.Call:
    """The call that makes the tensor, at the end of a chain of calls that only shape it."""
    import libcst as cst

    while isinstance(node, cst.Call):
        names = tree.refers_to(node.func)
        if names and names <= (_SAME | _RANDOM | {"torch.arange"}):
            _refuse_maker(tree, node, names, random=random)
            return node
        if names and names <= _TRIANGLES and node.args and node.args[0].keyword is None:
            node = node.args[0].value
        elif isinstance(node.func, cst.Attribute) and last_name(node.func) in _SHAPING:
            node = node.func.value
        else:
            break
    raise CannotEditError("the tensor is not made there by a function that gives the same on every device")


def _refuse_maker(tree: Tree, call: cst.Call, names: frozenset[str], *, random: bool) -> None:
    if any(argument.star for argument in call.args) or not call.args:
        raise CannotEditError("its arguments cannot be told from the line")
    tied = {argument.keyword.value for argument in call.args if argument.keyword is not None} & _TIED
    if tied:
        raise CannotEditError(f"{min(tied)}= is set where the tensor is made")
    if names & _RANDOM and not random:
        raise CannotEditError("other random numbers would be drawn on the device")
    if "torch.arange" in names and not all(_whole(tree, argument.value) for argument in call.args):
        raise CannotEditError("it cannot be told that all its numbers are whole")


def _whole(tree: Tree, node: cst.BaseExpression) -> bool:
    """Whether an expression is an int: a literal, a length, a size, or a dtype that holds whole numbers."""
    import libcst as cst

    if isinstance(node, cst.Subscript):
        return last_name(node.value) == "shape"
    if isinstance(node, cst.Call):
        return tree.code(node.func) == "len" or last_name(node.func) in {"size", "numel"}
    return isinstance(node, cst.Integer) or bool(tree.refers_to(node) & {"torch.long", "torch.int64", "torch.int32"})


def _device(tree: Tree, call: cst.Call) -> str:
    import libcst as cst

    if last_name(call.func) == "cuda":
        if call.args:
            raise CannotEditError("cuda() is called with arguments")
        return '"cuda"'
    named = [argument for argument in call.args if argument.keyword is not None and argument.keyword.value == "device"]
    device = (named or [call.args[0]])[0].value
    if not isinstance(device, (cst.SimpleString, cst.FormattedString)) and not name_or_attribute(device):
        raise CannotEditError("the device is not a plain name")
    return tree.code(device)


def _only_moves(call: cst.Call) -> bool:
    """Whether the call does nothing more to a tensor that is on the device already."""
    names = [argument.keyword.value if argument.keyword is not None else None for argument in call.args]
    return [name for name in names if name != "non_blocking"] in ([], [None], ["device"])
