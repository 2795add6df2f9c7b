"""A list that collects device values inside a loop and holds Python numbers again behind it: who may look earlier?"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpudoctor.source.later_use import Scope

_EMPTY_MAKERS = {"list", "defaultdict", "collections.defaultdict"}


def judge_list(scope: Scope, statement: ast.Expr, loop: ast.AST) -> tuple[int, ...]:
    """The lines that use the list; UnsafeUseError where one of them might see a tensor, or another list.

    The list must be made empty in the same function, get nothing but values read from the device, and be asked for
    nothing but its length until the loop has ended. Every append to it must give the same value.
    """
    from gpudoctor.source.later_use import UnsafeUseError, appended_to

    place = appended_to(statement)
    assert place is not None
    key = ast.unparse(place)
    call = statement.value
    assert isinstance(call, ast.Call)
    own = _value(call.args[0]) if call.args else ""
    lines = set()
    everywhere = scope.may_be_left_by_exception(loop)
    inside = {id(node) for node in ast.walk(loop)}
    made = False
    for use in scope.names(scope.scope, scope.name):
        lines.add(use.lineno)
        if isinstance(use.ctx, ast.Store):
            _refuse_other_list(scope, use, key, in_loop=id(use) in inside)
            made = True
            continue
        if isinstance(use.ctx, ast.Del):
            raise UnsafeUseError(use.lineno, f"{scope.name} is deleted")
        outer = _outermost(scope, use)
        if _is_length(scope, outer) or _is_own_write(scope, outer, key):
            continue
        if (appended := _appended(scope, outer)) is not None:
            if ast.unparse(outer) == key and _value(appended) != own:
                raise UnsafeUseError(use.lineno, f"{key} also gets other values, which may be of another type")
            continue
        if id(use) in inside:
            raise UnsafeUseError(use.lineno, f"{scope.name} is read before its loop has ended")
        if everywhere:
            raise UnsafeUseError(use.lineno, f"{scope.name} is read where an exception in the loop may lead")
        if use.lineno < getattr(loop, "lineno", 0):
            raise UnsafeUseError(use.lineno, f"{scope.name} may get a second name before its loop")
    if not made:
        raise UnsafeUseError(scope.line, f"{scope.name} is not made in this function, so others may see it")
    return tuple(sorted(lines))


def _outermost(scope: Scope, use: ast.Name) -> ast.expr:
    """``history["loss"]`` of the name history, else the name itself."""
    parent = scope.parents.get(use)
    return parent if isinstance(parent, ast.Subscript) and parent.value is use else use


def _refuse_other_list(scope: Scope, use: ast.Name, key: str, *, in_loop: bool) -> None:
    from gpudoctor.source.later_use import UnsafeUseError

    statement = next((node for node in scope.up(use) if isinstance(node, ast.stmt)), None)
    value = _given(statement, use)
    if value is None or in_loop:
        raise UnsafeUseError(use.lineno, f"{scope.name} is set in a way that is not followed")
    if isinstance(value, ast.Call) and ast.unparse(value.func) in _EMPTY_MAKERS:
        made = ast.unparse(value.func)
        empty = not value.args if made == "list" else [ast.unparse(a) for a in value.args] == ["list"]
    elif isinstance(value, ast.Dict):
        keys = [ast.unparse(k) if k is not None else "" for k in value.keys]
        fields = dict(zip((f"{scope.name}[{k}]" for k in keys), value.values, strict=True))
        held = fields.get(key)
        empty = isinstance(held, ast.List) and not held.elts
    else:
        empty = isinstance(value, ast.List) and not value.elts
    if not empty:
        raise UnsafeUseError(use.lineno, f"{key} does not begin as an empty list")


def _given(statement: ast.AST | None, use: ast.Name) -> ast.expr | None:
    """What a plain assignment gives to the name."""
    if isinstance(statement, ast.AnnAssign) and statement.target is use:
        return statement.value
    if not isinstance(statement, ast.Assign):
        return None
    for target in statement.targets:
        if target is use:
            return statement.value if len(statement.targets) == 1 else None  # a second name for the list
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            pairs = zip(target.elts, statement.value.elts, strict=False)
            return next((value for element, value in pairs if element is use), None)
    return None


def _is_length(scope: Scope, node: ast.expr) -> bool:
    call = scope.parents.get(node)
    return isinstance(call, ast.Call) and ast.unparse(call.func) == "len" and call.args == [node]


def _is_own_write(scope: Scope, node: ast.expr, key: str) -> bool:
    """Part of ``losses[:] = [float(value) for value in losses]``, which the rewrite puts behind the loop."""
    for parent in scope.up(node):
        if isinstance(parent, ast.Assign):
            return ast.unparse(parent) in {
                f"{key}[:] = [{kind}(value) for value in {key}]" for kind in ("float", "int")
            }
    return False


def _appended(scope: Scope, node: ast.expr) -> ast.expr | None:
    """What ``node.append(x)`` appends, where that is a statement of its own."""
    attribute = scope.parents.get(node)
    call = scope.parents.get(attribute) if isinstance(attribute, ast.Attribute) and attribute.attr == "append" else None
    if isinstance(call, ast.Call) and isinstance(scope.parents.get(call), ast.Expr) and len(call.args) == 1:
        return call.args[0]
    return None


def _value(node: ast.expr) -> str:
    """The tensor that ``x.item()`` reads, ``x.detach().clone()`` keeps."""
    return ast.unparse(node).removesuffix(".item()").removesuffix(".clone()").removesuffix(".detach()")
