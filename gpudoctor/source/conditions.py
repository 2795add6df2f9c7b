"""Conditions: do they wait for the device, and do they hold rarely (every N steps, the last step, a debug flag)?"""

from __future__ import annotations

import ast

from gpudoctor.source import frames as heat
from gpudoctor.source.evaluator import evaluate
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import ACCUMULATION_NAME, DEBUG_NAME, OTHER_DEVICE, RARE_NAME
from gpudoctor.source.project import dotted
from gpudoctor.source.values import HOST, NO_CONST, TENSOR, UNKNOWN, Value, host, sequence, tensor

_FLIPPED = {"rare": "common", "common": "rare", None: None}


def truth(it: Interpreter, node: ast.expr) -> Value:
    """A value in the place of a condition: HOST with `rare` and `const` where they are known."""
    if isinstance(node, ast.BoolOp):
        return _bool_op(it, node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = truth(it, node.operand)
        known = inner.const is not NO_CONST and isinstance(inner.const, (bool, int, str, float, type(None)))
        flipped = host(not inner.const if known else NO_CONST, rare=_FLIPPED[inner.rare])
        flipped.device = inner.device
        return flipped
    value = evaluate(it, node)
    if value.kind == TENSOR:
        it.read(node, _operation(node), value, kind="branch")
        result = host()
        result.device = value.device
        return result
    rare = value.rare
    if rare is None and value.kind == HOST and value.tag == "modulo":
        rare = "common"
    if rare is None and value.kind in (HOST, UNKNOWN) and value.const is NO_CONST:
        rare = _by_name(node)
    const = value.const if value.kind == HOST else NO_CONST
    return host(const, tag=value.tag, rare=rare)


def _operation(node: ast.expr) -> str:
    if isinstance(node, ast.Compare):
        return "comparison"
    return "condition"


def _by_name(node: ast.expr) -> str | None:
    target = node.func if isinstance(node, ast.Call) else node
    name = dotted(target)
    if name is None or ACCUMULATION_NAME.search(name):
        return None
    return "rare" if any(words.search(name) for words in (DEBUG_NAME, RARE_NAME, OTHER_DEVICE)) else None


def _bool_op(it: Interpreter, node: ast.BoolOp) -> Value:
    """What stands behind a rare condition with `and` runs rarely too."""
    conjunction = isinstance(node.op, ast.And)
    found: list[Value] = []
    guards = 0
    try:
        for part in node.values:
            value = truth(it, part)
            found.append(value)
            if value.rare == ("rare" if conjunction else "common"):
                it.frames.append(heat.Frame(heat.GUARD, it.module, part.lineno, ""))
                guards += 1
            if value.const is not NO_CONST and bool(value.const) is not conjunction:
                return host(bool(value.const), rare=value.rare)
    finally:
        if guards:
            del it.frames[-guards:]
    rares = [value.rare for value in found]
    one, other = ("rare", "common") if conjunction else ("common", "rare")
    rare = one if one in rares else other if all(r == other for r in rares) else None
    if rare is None and conjunction and "common" in rares and all(v.device is None for v in found):
        rare = "common"  # if step % 100 and not forced: return
    result = host(rare=rare)
    result.device = next((value.device for value in found if value.device), None)
    if all(value.const is not NO_CONST for value in found):
        result.const = found[-1].const
    return result


def rarity(it: Interpreter, node: ast.If, test: Value) -> tuple[str | None, str]:
    """Whether the body of an if runs rarely or the rest does, and the name of the guard."""
    if test.rare is not None:
        return test.rare, "interval"
    if _fills_once(it, node):
        return "rare", "once"
    if test.device is not None:
        return None, "data"
    return None, ""


def _fills_once(it: Interpreter, node: ast.If) -> bool:
    """``if self.cache is None: self.cache = ...``, ``if key not in cache: ...``, ``if first: first = False``."""
    test = node.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = test.operand
        if isinstance(inner, ast.Call) and dotted(inner.func) == "hasattr" and len(inner.args) == 2:
            name = inner.args[1]
            return isinstance(name, ast.Constant) and any(
                isinstance(target, ast.Attribute) and target.attr == name.value for target in _targets(node)
            )
        test = inner
    wanted: str | None = None
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        other = test.comparators[0]
        if isinstance(test.ops[0], ast.Is) and isinstance(other, ast.Constant) and other.value is None:
            wanted = dotted(test.left)
        elif isinstance(test.ops[0], ast.NotIn):
            wanted = dotted(other)
            return wanted is not None and any(
                isinstance(target, ast.Subscript) and dotted(target.value) == wanted for target in _targets(node)
            )
    elif isinstance(test, (ast.Name, ast.Attribute)):
        wanted = dotted(test)
    return (
        wanted is not None
        and any(not isinstance(target, ast.Subscript) and dotted(target) == wanted for target in _targets(node))
        and not _is_parameter(it, wanted)
    )


def _is_parameter(it: Interpreter, name: str) -> bool:
    """``if mask is None: mask = ...`` for a parameter fills its default in each call; anything else stays filled."""
    function = it.scope.function
    if function is None or "." in name:
        return False
    arguments = function.node.args
    return any(argument.arg == name for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])


def _targets(node: ast.If) -> list[ast.expr]:
    found: list[ast.expr] = []
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            found += statement.targets
        elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
            found.append(statement.target)
    return found


def narrow(it: Interpreter, test: ast.expr, *, true: bool) -> None:
    """``isinstance(x, torch.Tensor)`` and ``torch.is_tensor(x)`` tell what x is in each branch."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        narrow(it, test.operand, true=not true)
        return
    if isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) is true:
            for part in test.values:
                narrow(it, part, true=true)
        return
    if not isinstance(test, ast.Call) or not test.args or not isinstance(test.args[0], ast.Name):
        return
    function = dotted(test.func) or ""
    asked = test.args[1] if function == "isinstance" and len(test.args) == 2 else None
    is_tensor = function.endswith("is_tensor") or (asked is not None and (dotted(asked) or "").endswith("Tensor"))
    name = test.args[0].id
    value = it.scope.find(name)
    if not is_tensor or value is None:
        if asked is not None and value is not None and value.kind == TENSOR and true and _is_container(asked):
            it.scope.names[name] = sequence(value)
        return
    if true and value.kind == UNKNOWN:
        it.scope.names[name] = tensor(None)
    elif not true and value.kind == TENSOR:
        it.scope.names[name] = host()


def _is_container(node: ast.expr) -> bool:
    names = [dotted(part) for part in node.elts] if isinstance(node, ast.Tuple) else [dotted(node)]
    return any(name in {"list", "tuple", "dict", "Mapping", "Sequence", "collections.abc.Mapping"} for name in names)
