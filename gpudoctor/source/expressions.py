"""Evaluates expressions to Values, and notes where the host takes a value from the device."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable

from gpudoctor.source import calls, classes, conditions, loops, modules, operators, statements
from gpudoctor.source.evaluator import STEPS, evaluate
from gpudoctor.source.interpreter import Interpreter, Scope
from gpudoctor.source.names import HOST_ATTRIBUTES, SETTINGS
from gpudoctor.source.project import Function
from gpudoctor.source.values import (
    ANY,
    BATCH,
    CPU,
    DEVICE,
    FUNCTION,
    GPU,
    HOST,
    INSTANCE,
    LAZY,
    LOADER,
    MAYBE,
    NAMED,
    NO_CONST,
    NONE,
    NUMBER,
    OBJECT,
    OPTIMIZER,
    PROJECT,
    SEQUENCE,
    TENSOR,
    UNKNOWN,
    Value,
    element,
    host,
    join,
    join_all,
    named,
    sequence,
)

_BUILTINS = frozenset(dir(builtins))


def _constant(_it: Interpreter, node: ast.Constant) -> Value:
    return host(node.value)


def _name(it: Interpreter, node: ast.Name) -> Value:
    value = it.scope.find(node.id)
    if value is None:
        if node.id in _BUILTINS:
            return named(f"builtins.{node.id}")
        stars = it.scopes.get(it.module.source.path)
        found = modules.starred(it, stars, node.id) if stars is not None and stars.stars else None
        return modules.resolve(it, found) if found is not None else ANY
    if value.kind == LAZY or (value.kind == PROJECT and not isinstance(value.ref, Scope)):
        resolved = modules.resolve(it, value)
        scope: Scope | None = it.scope
        while scope is not None:  # so that it is resolved once
            if scope.names.get(node.id) is value:
                scope.names[node.id] = resolved
                break
            scope = scope.outer
        return resolved
    return value


def _attribute(it: Interpreter, node: ast.Attribute) -> Value:
    return attribute(it, evaluate(it, node.value), node.attr, node)


def attribute(it: Interpreter, base: Value, name: str, node: ast.expr) -> Value:
    kind = base.kind
    if kind == TENSOR:
        if name == "device":
            return Value(DEVICE, device=base.device, why=base.why)
        if name in HOST_ATTRIBUTES:
            return NUMBER
        if base.tag == "either":
            return ANY
        return base.with_(mask=False, scalar=base.scalar and name in ("grad", "data"))
    if kind == INSTANCE:
        return classes.instance_attribute(it, base, name, node)
    if kind == NAMED:
        full = f"{base.name}.{name}"
        if full == "os.environ":
            return named(full)
        return named(full)
    if kind == PROJECT and isinstance(base.ref, Scope):
        found = base.ref.names.get(name)
        if found is not None:
            return modules.resolve(it, found)
        module = it.project.find(base.ref.module, name, 1)
        if module is not None:
            return modules.module_value(it, module)
        return ANY
    if kind == DEVICE:
        return NUMBER
    if kind == OBJECT:
        return _object_attribute(it, base, name, node)
    if kind == OPTIMIZER and name == "param_groups":
        return base.ref if base.ref is not None else ANY
    if kind == LOADER:
        return ANY if name in ("dataset", "sampler", "batch_sampler") else NUMBER
    if kind == UNKNOWN and name == "device":
        place = MAYBE if _is_setting(node) else None  # args.device is chosen by a user, x.device only follows x
        return Value(DEVICE, device=place, why=it.why(node) if place else None)
    if kind == "class":
        return classes.class_attribute(it, base, name)
    return ANY


def _is_setting(node: ast.expr) -> bool:
    owner = node.value if isinstance(node, ast.Attribute) else None
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return name in SETTINGS


def _object_attribute(it: Interpreter, base: Value, name: str, node: ast.expr) -> Value:
    if base.name in ("accelerate.Accelerator", "lightning.Fabric") and name == "device":
        return Value(DEVICE, device=GPU, why=it.why(node))
    if name == "device":
        return Value(DEVICE, device=MAYBE, why=it.why(node))
    return ANY


def _subscript(it: Interpreter, node: ast.Subscript) -> Value:
    base = evaluate(it, node.value)
    index = evaluate(it, node.slice)
    if base.kind == TENSOR:
        return _tensor_item(it, node, base, index)
    if base.kind == SEQUENCE:
        if index.kind == TENSOR and index.on_gpu and not isinstance(base.elements, dict):
            it.read(node, "index", index)
        return _item(base, index, node)
    if base.kind == NAMED and base.name == "os.environ":
        return host(tag="global-rank" if index.const in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") else None)
    if base.kind == HOST:
        if index.kind == TENSOR and index.on_gpu:
            it.read(node, "index", index)
        return host(tag="array" if base.tag == "array" else None)
    if base.kind == OPTIMIZER:
        return NUMBER
    if base.kind == INSTANCE:
        return classes.instance_item(it, base, index, node)
    return ANY


def _item(base: Value, index: Value, node: ast.Subscript) -> Value:
    inside = base.elements
    if isinstance(inside, dict):
        if index.const is not NO_CONST and index.const in inside:
            found: Value = inside[index.const]
            return found
        return join_all(list(inside.values())) if index.const is NO_CONST and inside else ANY
    if isinstance(inside, list):
        if (
            isinstance(index.const, int)
            and not isinstance(index.const, bool)
            and -len(inside) <= index.const < len(inside)
        ):
            item: Value = inside[index.const]
            return item
        if isinstance(node.slice, ast.Slice):
            return sequence(join_all(inside)) if inside else base
        return element(base)
    if isinstance(node.slice, ast.Slice):
        return base
    return element(base)


def is_mask(index: Value) -> bool:
    """Whether an index is, or holds, a tensor of bool."""
    if index.kind == TENSOR:
        return index.mask
    if index.kind == SEQUENCE and isinstance(index.elements, list):
        return any(is_mask(part) for part in index.elements)
    return False


def _tensor_item(it: Interpreter, node: ast.Subscript, base: Value, index: Value) -> Value:
    it.touch(node, base)
    if is_mask(index):
        it.note("dynamic-shape", node, "mask index", base)
    elif base.on_gpu and isinstance(node.ctx, ast.Load) and _is_scalar_index(index):
        it.note("hidden-sync", node, "0-dim index", base)
    if base.device == CPU or base.device is None:
        same = base.with_(scalar=False, mask=base.mask)
        moving = index.const is NO_CONST and base.origin != BATCH
        return same.with_(origin=BATCH) if moving else same
    return base.with_(scalar=False, origin=None)


def _is_scalar_index(index: Value) -> bool:
    if index.kind == TENSOR:
        return index.scalar and index.on_gpu and not index.mask
    return False


def _tuple(it: Interpreter, node: ast.Tuple | ast.List | ast.Set) -> Value:
    items: list[Value] = []
    open_end = False
    for part in node.elts:
        if isinstance(part, ast.Starred):
            value = evaluate(it, part.value)
            if value.kind == SEQUENCE and isinstance(value.elements, list):
                items += value.elements
            else:
                items.append(element(value) if value.kind == SEQUENCE else value)
                open_end = True
        else:
            items.append(evaluate(it, part))
    return sequence(join_all(items)) if open_end or (isinstance(node, ast.Set) and items) else sequence(items)


def _dict(it: Interpreter, node: ast.Dict) -> Value:
    known: dict[object, Value] = {}
    others: list[Value] = []
    for key, part in zip(node.keys, node.values, strict=True):
        value = evaluate(it, part)
        if key is None:
            if value.kind == SEQUENCE and isinstance(value.elements, dict):
                known.update(value.elements)
            elif value.kind in (SEQUENCE, TENSOR):
                others.append(element(value) if value.kind == SEQUENCE else value)
            continue
        name = evaluate(it, key)
        if isinstance(name.const, (str, int)):
            known[name.const] = value
        else:
            others.append(value)
    return sequence(join_all([*known.values(), *others])) if others else sequence(known)


def _if_exp(it: Interpreter, node: ast.IfExp) -> Value:
    test = conditions.truth(it, node.test)
    if test.const is not NO_CONST and isinstance(test.const, (bool, type(None))):
        return evaluate(it, node.body if test.const else node.orelse)

    def branch(part: ast.expr, rare: bool) -> Value:
        if not rare:
            return evaluate(it, part)
        value = statements.guarded(it, part, lambda: evaluate(it, part))
        return value if isinstance(value, Value) else ANY

    saved = dict(it.scope.names)
    conditions.narrow(it, node.test, true=True)
    first = branch(node.body, test.rare == "rare")
    it.scope.names = saved
    saved = dict(saved)
    conditions.narrow(it, node.test, true=False)
    second = branch(node.orelse, test.rare == "common")
    it.scope.names = saved
    return join(first, second)


def _joined_string(it: Interpreter, node: ast.JoinedStr) -> Value:
    text = ""
    tag = None
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            before = len(it.candidates)
            value = evaluate(it, part.value)
            if value.kind == TENSOR:
                it.read(part.value, "f-string", value, kind="print")
            else:
                printed(it, before)
            text += "{}" if value.const is NO_CONST else str(value.const)
            tag = value.tag if value.tag == "global-rank" else tag
            if isinstance(part.format_spec, ast.JoinedStr):
                _joined_string(it, part.format_spec)
        elif isinstance(part, ast.Constant):
            text += str(part.value)
    return host(text, tag=tag)


def printed(it: Interpreter, before: int) -> None:
    """Reads inside what is printed count as printing too: one wait, two names for it."""
    for candidate in it.candidates[before:]:
        if candidate.kind == "host-read" and len(candidate.calls) == len(it.calls):
            candidate.extra["printed"] = True


def _lambda(it: Interpreter, node: ast.Lambda) -> Value:
    value = Value(FUNCTION, name="<lambda>")
    value.ref = (Function(node=node, module=it.module, name="<lambda>"), it.scope, None)
    return value


def _named(it: Interpreter, node: ast.NamedExpr) -> Value:
    value = evaluate(it, node.value)
    statements.assign(it, node.target, value)
    return value


def _starred(it: Interpreter, node: ast.Starred) -> Value:
    return evaluate(it, node.value)


def _await(it: Interpreter, node: ast.Await) -> Value:
    return evaluate(it, node.value)


def _yield(it: Interpreter, node: ast.Yield) -> Value:
    it.scope.yields.append(evaluate(it, node.value) if node.value is not None else NONE)
    return ANY


def _yield_from(it: Interpreter, node: ast.YieldFrom) -> Value:
    value = evaluate(it, node.value)
    it.scope.yields.append(element(value) if value.kind == SEQUENCE else value)
    return ANY


def _slice(it: Interpreter, node: ast.Slice) -> Value:
    for part in (node.lower, node.upper, node.step):
        if part is not None and not isinstance(part, ast.Constant):
            value = evaluate(it, part)
            if value.kind == TENSOR:
                it.read(part, "slice bound", value)
    return NUMBER


def _call(it: Interpreter, node: ast.Call) -> Value:
    return calls.call_expression(it, node)


def _comprehension(it: Interpreter, node: loops.Comprehension) -> Value:
    return loops.comprehension(it, node)


_TABLE: dict[type[ast.expr], Callable[[Interpreter, ast.expr], Value]] = {
    ast.Constant: _constant,  # type: ignore[dict-item]
    ast.Name: _name,  # type: ignore[dict-item]
    ast.Attribute: _attribute,  # type: ignore[dict-item]
    ast.Call: _call,  # type: ignore[dict-item]
    ast.Subscript: _subscript,  # type: ignore[dict-item]
    ast.Tuple: _tuple,  # type: ignore[dict-item]
    ast.List: _tuple,  # type: ignore[dict-item]
    ast.Set: _tuple,  # type: ignore[dict-item]
    ast.Dict: _dict,  # type: ignore[dict-item]
    ast.BinOp: operators.bin_op,  # type: ignore[dict-item]
    ast.UnaryOp: operators.unary,  # type: ignore[dict-item]
    ast.Compare: operators.compare,  # type: ignore[dict-item]
    ast.BoolOp: operators.bool_op,  # type: ignore[dict-item]
    ast.IfExp: _if_exp,  # type: ignore[dict-item]
    ast.JoinedStr: _joined_string,  # type: ignore[dict-item]
    ast.Lambda: _lambda,  # type: ignore[dict-item]
    ast.NamedExpr: _named,  # type: ignore[dict-item]
    ast.Starred: _starred,  # type: ignore[dict-item]
    ast.Await: _await,  # type: ignore[dict-item]
    ast.Yield: _yield,  # type: ignore[dict-item]
    ast.YieldFrom: _yield_from,  # type: ignore[dict-item]
    ast.Slice: _slice,  # type: ignore[dict-item]
    ast.ListComp: _comprehension,  # type: ignore[dict-item]
    ast.SetComp: _comprehension,  # type: ignore[dict-item]
    ast.GeneratorExp: _comprehension,  # type: ignore[dict-item]
    ast.DictComp: _comprehension,  # type: ignore[dict-item]
}

STEPS.update(_TABLE)
