"""Operators: arithmetic, comparisons, and and or."""

from __future__ import annotations

import ast

from gpudoctor.source import conditions
from gpudoctor.source import frames as heat
from gpudoctor.source import tensors as tensor_ops
from gpudoctor.source.evaluator import evaluate
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import COUNTER_NAME, OTHER_DEVICE_TYPE
from gpudoctor.source.project import dotted
from gpudoctor.source.values import (
    ANY,
    CPU,
    GPU,
    HOST,
    MAYBE,
    NO_CONST,
    NUMBER,
    SEQUENCE,
    TENSOR,
    UNKNOWN,
    Value,
    element,
    host,
    join,
    join_all,
    sequence,
    stronger,
    tensor,
)

_COMPARE_TO_MASK = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def bin_op(it: Interpreter, node: ast.BinOp) -> Value:
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


def unary(it: Interpreter, node: ast.UnaryOp) -> Value:
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


def compare(it: Interpreter, node: ast.Compare) -> Value:
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


def bool_op(it: Interpreter, node: ast.BoolOp) -> Value:
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
