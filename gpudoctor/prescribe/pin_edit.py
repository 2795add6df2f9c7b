"""``x.to(device)`` of a tensor made on the host in each step: copied from pinned memory, so that nobody waits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpudoctor.prescribe.counter import loops_around
from gpudoctor.prescribe.sync_edit import moves_to_device, refuse_changed_source
from gpudoctor.prescribe.tree import CannotEditError, Splice, Tree, after_brackets, last_name

if TYPE_CHECKING:
    import libcst as cst

# torch functions that give a tensor on the host when no device is named.
_MAKERS = {
    "stack", "cat", "concat", "from_numpy", "tensor", "as_tensor", "rand", "randn", "randint", "randperm", "zeros",
    "ones", "empty", "full", "arange", "linspace", "normal", "bernoulli", "where", "nn.functional.one_hot", "one_hot",
}  # fmt: skip
_KEEP_ON_HOST = {
    "float", "long", "int", "half", "bool", "double", "bfloat16", "type", "view", "reshape", "flatten", "transpose",
    "permute", "unsqueeze", "squeeze", "contiguous", "clone", "t", "div", "mul", "add", "sub", "expand", "repeat",
    "clamp", "narrow", "detach", "pow", "sqrt", "log", "exp", "abs", "round", "index_select", "gather",
}  # fmt: skip
_RUNS_ON_CPU = re.compile(r"is_available|['\"]cpu['\"]")
_DEPTH = 6


def pin_copy(tree: Tree, line: int) -> tuple[str, int]:
    """The text with the copies at `line` made from pinned memory, and the number of lines put above it."""
    import libcst as cst

    calls = [
        call
        for call in tree.at(cst.Call, line)
        if isinstance(call.func, cst.Attribute) and moves_to_device(tree, call) and _blocks(tree, call)
    ]
    if not calls:
        raise CannotEditError("no copy to a device that can be told from the line")
    sources = []
    for call in calls:
        assert isinstance(call.func, cst.Attribute)
        source = call.func.value
        if not _on_host(tree, source, call, 0):
            raise CannotEditError(f"it cannot be told that {_short(tree, source)} is a tensor made on the host")
        sources.append(source)
    splices: list[Splice] = []
    for call in calls:
        if not any(a.keyword is not None and a.keyword.value == "non_blocking" for a in call.args):
            end = tree.span(call.args[-1])[1] if call.args else tree.span(call)[1] - 1
            splices.append((end, end, ", non_blocking=True" if call.args else "non_blocking=True"))
    if not _RUNS_ON_CPU.search(tree.text):
        for source in sources:
            end = after_brackets(tree, source)
            splices.append((end, end, ".pin_memory()"))
        return tree.spliced(splices), 0
    return tree.spliced([*splices, _pinned_before(tree, calls, sources)]), 2


def _blocks(tree: Tree, call: cst.Call) -> bool:
    for argument in call.args:
        if argument.keyword is not None and argument.keyword.value == "non_blocking":
            return tree.code(argument.value) == "True"
    return sum(argument.keyword is None for argument in call.args) <= (2 if last_name(call.func) == "to" else 1)


def _short(tree: Tree, node: cst.CSTNode) -> str:
    code = " ".join(tree.code(node).split())
    return code if len(code) <= 40 else "the source"


def _pinned_before(tree: Tree, calls: list[cst.Call], sources: list[cst.BaseExpression]) -> Splice:
    """The script runs without a GPU too, where nothing can be pinned: so it is done under a test, a line above."""
    import libcst as cst

    names = list(dict.fromkeys(tree.code(source) for source in sources))
    if not all(isinstance(source, cst.Name) for source in sources):
        raise CannotEditError(
            "the source has no name, and the script also runs without a GPU, where it cannot be pinned"
        )
    for call in calls:
        refuse_changed_source(tree, call)
        _refuse_older(tree, call)
    if "torch" not in {name for node in tree.walk() if isinstance(node, cst.Import) for name in _bound(node)}:
        raise CannotEditError("the file does not import torch by its name")
    statement = tree.statement(calls[0])
    if any(tree.statement(call) is not statement for call in calls):
        raise CannotEditError("the copies at this line belong to several statements")
    if not isinstance(statement, cst.SimpleStatementLine):
        raise CannotEditError("the copy is part of a compound statement")
    tree.siblings(statement)
    if any(isinstance(parent, (cst.Lambda, cst.BaseComp)) for call in calls for parent in tree.up(call)):
        raise CannotEditError("the copy is part of a nested expression")
    start = tree.line_start(tree.span(statement)[0])
    indentation, newline = tree.indentation(start), tree.newline()
    unit = tree.unit(statement)
    pinned = ", ".join(f"{name}.pin_memory()" for name in names)
    return (
        start,
        start,
        f"{indentation}if torch.cuda.is_available():{newline}{indentation}{unit}{', '.join(names)} = {pinned}{newline}",
    )


def _bound(node: cst.Import) -> set[str]:
    import libcst as cst

    names = set()
    for alias in node.names:
        if alias.asname is not None:
            names.add(last_name(alias.asname.name))
            continue
        root = alias.name
        while isinstance(root, cst.Attribute):
            root = root.value  # type: ignore[assignment]
        names.add(last_name(root))
    return names


def _refuse_older(tree: Tree, call: cst.Call) -> None:
    """A tensor that was made before the loop is copied again in each step: pinning it each time is no gain."""
    import libcst as cst

    assert isinstance(call.func, cst.Attribute)
    loop = next(loops_around(tree, call), None)
    name = last_name(call.func.value)
    scope = loop if loop is not None else tree.function(call)
    own = tree.statement(call)
    made = any(
        isinstance(part, cst.Name) and part.value == name
        for node in tree.walk(scope)
        if isinstance(node, cst.AssignTarget) and tree.statement(node) is not own
        for part in tree.walk(node.target)
    )
    if not made:
        raise CannotEditError(f"{name} was made elsewhere, so it may be used again while its copy runs")


def _on_host(tree: Tree, node: cst.BaseExpression, at: cst.CSTNode, depth: int) -> bool:
    """Whether an expression is known to be a plain tensor that was made on the host."""
    import libcst as cst

    if depth > _DEPTH:
        return False
    if isinstance(node, cst.Subscript):
        return _on_host(tree, node.value, at, depth + 1)
    if isinstance(node, cst.BinaryOperation):
        return _on_host(tree, node.left, at, depth + 1) or _on_host(tree, node.right, at, depth + 1)
    if isinstance(node, cst.Call):
        keywords = {argument.keyword.value for argument in node.args if argument.keyword is not None}
        if "device" in keywords or any(argument.star == "**" for argument in node.args):
            return False
        called = last_name(node.func)
        if called in _MAKERS and any(name.startswith("torch.") for name in tree.refers_to(node.func)):
            return True
        if isinstance(node.func, cst.Attribute) and called in _KEEP_ON_HOST:
            return _on_host(tree, node.func.value, at, depth + 1)
        return _returned(tree, node, None, depth + 1)
    if isinstance(node, cst.Name):
        return _name_on_host(tree, node.value, at, depth)
    return False


def _name_on_host(tree: Tree, name: str, at: cst.CSTNode, depth: int) -> bool:
    """Every value that the function (else the module) gives to the name must be such a tensor."""
    import libcst as cst

    for scope in dict.fromkeys((tree.function(at), tree.module)):
        verdicts = []
        for node in tree.walk(scope):
            if not isinstance(node, cst.Assign) or tree.function(node) is not scope:
                continue
            if any(parent is at for parent in tree.walk(node)):
                continue  # the copy itself: x = x.to(device)
            for target in node.targets:
                verdicts += _values(tree, target.target, node.value, name, depth)
        if isinstance(scope, cst.FunctionDef) and any(
            isinstance(parameter, cst.Param) and parameter.name.value == name for parameter in tree.walk(scope.params)
        ):
            return False
        if verdicts:
            return all(verdicts)
    return False


def _values(tree: Tree, target: cst.BaseExpression, value: cst.BaseExpression, name: str, depth: int) -> list[bool]:
    """For each time that `target` holds the name: whether what it gets is a tensor made on the host."""
    import libcst as cst

    if isinstance(target, cst.Name):
        return [_on_host(tree, value, value, depth + 1)] if target.value == name else []
    if not isinstance(target, (cst.Tuple, cst.List)):
        return []
    found = []
    for position, element in enumerate(target.elements):
        if not (isinstance(element.value, cst.Name) and element.value.value == name):
            continue
        if isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(target.elements):
            found.append(_on_host(tree, value.elements[position].value, value, depth + 1))
        elif isinstance(value, cst.Call):
            found.append(_returned(tree, value, position, depth + 1))
        else:
            found.append(False)
    return found


def _returned(tree: Tree, call: cst.Call, position: int | None, depth: int) -> bool:
    """Whether a function of this file returns a host tensor, or a tuple with one at that place."""
    import libcst as cst

    name = call.func.value if isinstance(call.func, cst.Name) else None
    functions = [node for node in tree.module.body if isinstance(node, cst.FunctionDef) and node.name.value == name]
    if len(functions) != 1 or depth > _DEPTH:
        return False
    returned = [node for node in tree.walk(functions[0]) if isinstance(node, cst.Return)]
    return bool(returned) and all(_returns(tree, node, position, depth) for node in returned)


def _returns(tree: Tree, node: cst.Return, position: int | None, depth: int) -> bool:
    import libcst as cst

    value = node.value
    if position is not None:
        if not isinstance(value, cst.Tuple) or position >= len(value.elements):
            return False
        value = value.elements[position].value
    return value is not None and _on_host(tree, value, node, depth + 1)
