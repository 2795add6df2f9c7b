"""Evaluates expressions to Values, and notes where the host takes a value from the device."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable

from gpudoctor.source import calls, classes, conditions, loops, modules, statements
from gpudoctor.source import frames as heat
from gpudoctor.source import tensors as tensor_ops
from gpudoctor.source.evaluator import STEPS, evaluate
from gpudoctor.source.interpreter import Interpreter, Scope
from gpudoctor.source.names import COUNTER_NAME, HOST_ATTRIBUTES, OTHER_DEVICE_TYPE, SETTINGS
from gpudoctor.source.project import Function, dotted
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
    METHOD,
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
    Why,
    element,
    host,
    join,
    join_all,
    named,
    sequence,
    stronger,
    tensor,
)

_BUILTINS = frozenset(dir(builtins))
_COMPARE_TO_MASK = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


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


def _bin_op(it: Interpreter, node: ast.BinOp) -> Value:
    return operate(it, node, node.op, evaluate(it, node.left), evaluate(it, node.right))


def operate(it: Interpreter, node: ast.AST, op: ast.operator, left: Value, right: Value) -> Value:
    """Arithmetic. A tensor on the GPU makes the result one; a remainder of a counter is remembered as such."""
    if left.kind == TENSOR or right.kind == TENSOR:
        if isinstance(op, ast.Mod) and isinstance(left.const, str):
            it.read(node, "formatting", right, kind="print")
            return NUMBER
        for one, other in ((left, right), (right, left)):
            if one.kind == HOST and one.tag == "array" and other.kind == TENSOR and other.on_gpu:
                return NUMBER
        device, why = stronger([left, right])
        it.touch(node, left)
        it.touch(node, right)
        bitwise = isinstance(op, (ast.BitAnd, ast.BitOr, ast.BitXor))
        masks = [value.mask for value in (left, right) if value.kind == TENSOR]
        tensors = [value for value in (left, right) if value.kind == TENSOR]
        scalar = all(value.scalar for value in tensors) and not any(v.kind == SEQUENCE for v in (left, right))
        if device in (GPU, MAYBE):
            it.work()
        result = tensor(device, why, mask=bitwise and any(masks), scalar=scalar)
        if device in (CPU, None):
            result.origin, result.frame = tensor_ops.origin_of(tensors), it.loop()
        return result
    if left.kind == SEQUENCE and isinstance(op, (ast.Add, ast.Mult)):
        if isinstance(op, ast.Mult):
            return sequence(element(left))
        return join(left, right) if right.kind == SEQUENCE else left
    if isinstance(op, ast.Mod):
        if isinstance(left.const, str):
            if right.kind == SEQUENCE and isinstance(right.elements, list):
                for part in right.elements:
                    if part.kind == TENSOR:
                        it.read(node, "formatting", part, kind="print")
            return NUMBER
        return host(tag=None if right.const == 1 or left.tag == "global-rank" else "modulo")
    if isinstance(op, ast.BitAnd) and left.tag == "counter":
        return host(tag="modulo")
    if isinstance(op, ast.Sub) and left.tag == "clock":
        return host(tag="elapsed")
    if left.kind == HOST and isinstance(left.const, str) and isinstance(right.const, str) and isinstance(op, ast.Add):
        return host(left.const + right.const)
    if left.kind == UNKNOWN and right.kind == UNKNOWN:
        return ANY
    if UNKNOWN in (left.kind, right.kind) and not (left.kind == HOST and right.kind == HOST):
        return ANY
    tag = left.tag if left.tag in ("counter", "elapsed", "global-rank", "array") else right.tag
    return host(tag=tag if tag in ("counter", "elapsed", "global-rank", "array") else None)


def _unary(it: Interpreter, node: ast.UnaryOp) -> Value:
    if isinstance(node.op, ast.Not):
        value = conditions.truth(it, node)
        return host(value.const, rare=value.rare)
    value = evaluate(it, node.operand)
    if value.kind == TENSOR:
        if value.on_gpu:
            it.work()
        return value
    if isinstance(node.op, ast.USub) and isinstance(value.const, (int, float)):
        return host(-value.const)
    return host() if value.kind == HOST else ANY


def _compare(it: Interpreter, node: ast.Compare) -> Value:
    left = evaluate(it, node.left)
    values = [left]
    result: Value | None = None
    for index, (op, part) in enumerate(zip(node.ops, node.comparators, strict=True)):
        right = evaluate(it, part)
        if isinstance(op, _COMPARE_TO_MASK) and TENSOR in (values[-1].kind, right.kind):
            device, why = stronger([values[-1], right])
            if device in (GPU, MAYBE):
                it.work()
            tensors = [v for v in (values[-1], right) if v.kind == TENSOR]
            for value in tensors:
                it.touch(node, value)
            result = tensor(device, why, mask=True, scalar=all(v.scalar for v in tensors))
            if len(node.ops) > 1 and index < len(node.ops) - 1:
                it.read(node, "chained comparison", result, kind="branch")
        elif isinstance(op, (ast.In, ast.NotIn)) and right.kind == TENSOR:
            it.read(node, "membership", right, kind="branch")
            result = NUMBER
        values.append(right)
    if result is not None:
        return result
    return _host_comparison(node, values)


def _host_comparison(node: ast.Compare, values: list[Value]) -> Value:
    if len(node.ops) != 1:
        return NUMBER
    op, left, right = node.ops[0], values[0], values[1]
    consts = left.const, right.const
    if NO_CONST not in consts and all(isinstance(c, (str, bool, type(None))) for c in consts):
        if isinstance(op, (ast.Eq, ast.Is)):
            return host(consts[0] == consts[1])
        if isinstance(op, (ast.NotEq, ast.IsNot)):
            return host(consts[0] != consts[1])
    return host(rare=_rarity(node, op, left, right))


def _rarity(node: ast.Compare, op: ast.cmpop, left: Value, right: Value) -> str | None:
    if _is_other_device(node.comparators[0], right):  # if device.type == "xpu"
        return "rare" if isinstance(op, (ast.Eq, ast.Is, ast.In)) else "common"
    if isinstance(op, ast.Eq) and right.const is NO_CONST and _is_length(node.left):
        return "rare"  # a list has grown to a limit that is set elsewhere
    tag = left.tag
    if tag is None and right.tag in ("modulo", "counter"):
        tag, left, right = right.tag, right, left
    if tag == "modulo":
        if isinstance(op, (ast.Eq, ast.Lt, ast.LtE)):
            return "rare"
        return "common" if isinstance(op, (ast.NotEq, ast.Gt, ast.GtE)) else None
    if tag == "elapsed":
        return "rare" if isinstance(op, (ast.Gt, ast.GtE)) else "common"
    if tag == "counter" or (left.kind in (UNKNOWN, HOST) and _is_counter(node.left)):
        if isinstance(op, (ast.Eq, ast.In, ast.Lt, ast.LtE)) and right.const is not None:
            return "rare"
        return "common" if isinstance(op, (ast.NotEq, ast.NotIn)) and right.const is not None else None
    return None


def _is_other_device(node: ast.expr, value: Value) -> bool:
    """Whether a comparison is with an accelerator that is no CUDA device, or with several of them."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return bool(node.elts) and all(_is_other_device(part, ANY) for part in node.elts)
    name = node.value if isinstance(node, ast.Constant) else value.const
    return OTHER_DEVICE_TYPE.search(name if isinstance(name, str) else dotted(node) or "")


def _is_length(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def _is_counter(node: ast.expr) -> bool:
    name = dotted(node)
    return name is not None and COUNTER_NAME.search(name)


def _bool_op(it: Interpreter, node: ast.BoolOp) -> Value:
    """``a or b`` is one of its operands; all but the last are asked whether they are true."""
    found: list[Value] = []
    guards = 0
    for index, part in enumerate(node.values):
        if index < len(node.values) - 1:
            value = evaluate(it, part)
            if value.kind == TENSOR and not (isinstance(node.op, ast.Or) and not value.scalar and not value.mask):
                it.read(part, "and/or", value, kind="branch")
            if value.kind == HOST and value.rare == ("rare" if isinstance(node.op, ast.And) else "common"):
                it.frames.append(heat.Frame(heat.GUARD, it.module, part.lineno, ""))
                guards += 1
        else:
            value = evaluate(it, part)
        found.append(value)
    if guards:
        del it.frames[-guards:]
    if all(value.kind == HOST for value in found):
        rares = [value.rare for value in found]
        conjunction = isinstance(node.op, ast.And)
        one, other = ("rare", "common") if conjunction else ("common", "rare")
        rare = one if one in rares else other if all(r == other for r in rares) else None
        return host(rare=rare) if rare else join_all(found)
    return join_all([value for value in found if value.const is not None] or found)


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
    ast.BinOp: _bin_op,  # type: ignore[dict-item]
    ast.UnaryOp: _unary,  # type: ignore[dict-item]
    ast.Compare: _compare,  # type: ignore[dict-item]
    ast.BoolOp: _bool_op,  # type: ignore[dict-item]
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

__all__ = ["METHOD", "Why", "attribute", "evaluate", "is_mask", "operate", "printed"]
