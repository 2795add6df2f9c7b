"""Copies of tensors between host and device, and where they go."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import DEVICE_NAME, DTYPE_NAME
from gpudoctor.source.values import (
    ANY,
    BATCH,
    CPU,
    DERIVED,
    DEVICE,
    GPU,
    HOST,
    INSTANCE,
    MAYBE,
    NO_CONST,
    NUMBER,
    SEQUENCE,
    TENSOR,
    Place,
    Value,
    Why,
    element,
    sequence,
    tensor,
)

if TYPE_CHECKING:
    from gpudoctor.source.calls import Arguments


def line_of(node: ast.Call) -> int:
    """The line where the name of a called method stands, which differs in a chain over several lines."""
    return node.func.end_lineno or node.lineno


def _cpu(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    del given
    return copy_to_host(it, base, name, node, non_blocking=False)


def copy_to_host(it: Interpreter, base: Value, name: str, node: ast.Call, *, non_blocking: bool | None) -> Value:
    result = tensor(CPU, mask=base.mask, scalar=base.scalar)
    result.origin, result.frame, result.pinned = DERIVED, it.loop(), False
    if base.on_gpu:
        if non_blocking:
            result.pending = (it.site(node), it.synchronised, base.why)
        elif non_blocking is False:  # else to() takes pinned memory (aten/src/ATen/native/TensorConversions.cpp)
            it.note("copy-to-host", node, name, base, line=line_of(node))
    elif base.device == CPU:
        return base
    return result


# moving


def _to(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    return move(it, base, given, node, name)


def _cuda(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    index = given.values[0] if given.values else given.named.get("device")
    if index is not None and isinstance(index.const, int):
        it.indices.add(f"cuda:{index.const}")
    return copy_to_device(it, base, name, node, Value(DEVICE, device=GPU, why=it.why(node)), _non_blocking(given, 1))


def _non_blocking(given: Arguments, position: int) -> bool | None:
    value = given.named.get("non_blocking")
    if value is None and len(given.values) > position:
        value = given.values[position]
    if value is None:
        return False
    return value.const if isinstance(value.const, bool) else None


def move(it: Interpreter, base: Value, given: Arguments, node: ast.Call, name: str) -> Value:
    """x.to(...): to a device, to a dtype, or like another tensor."""
    target = target_of(it, given, node)
    if target is None:
        if base.kind != TENSOR:
            return base
        return base.with_(mask=base.mask and not given.values)
    blocking = _non_blocking(given, 2) if len(given.values) > 2 else _non_blocking(given, 1)
    if len(given.values) == 2 and "non_blocking" not in given.named and not isinstance(given.values[1].const, bool):
        blocking = False  # .to(device, dtype)
    if target.device == CPU:
        return copy_to_host(it, base, name, node, non_blocking=blocking) if base.kind == TENSOR else base
    if target.device is None:
        return base if base.kind != TENSOR else base.with_(device=None if base.device == CPU else base.device)
    return copy_to_device(it, base, name, node, target, blocking)


def target_of(it: Interpreter, given: Arguments, node: ast.Call) -> Value | None:
    """The DEVICE that .to() moves to; None when it changes only the dtype."""
    value = given.named.get("device")
    if value is None:
        value = given.values[0] if given.values else None
        expression = given.nodes[0] if given.nodes else None
    else:
        expression = next((k.value for k in node.keywords if k.arg == "device"), None)
    if value is None:
        other = given.named.get("other")
        return as_device(it, other, None, node) if other is not None else None
    return as_device(it, value, expression, node)


def as_device(it: Interpreter, value: Value, expression: ast.expr | None, node: ast.AST) -> Value | None:
    """A value as DEVICE; None for what is a dtype."""
    if value.kind == DEVICE:
        return value if value.why is not None or value.device is None else value.with_(why=it.why(node))
    if value.kind == HOST and value.const is not NO_CONST:
        if isinstance(value.const, bool) or value.const is None:
            return None
        place = place_of(value.const)
        if isinstance(value.const, str) and ":" in value.const:
            it.indices.add(value.const)
        return Value(DEVICE, device=place, why=it.why(node))
    if value.kind == TENSOR:
        return Value(DEVICE, device=value.device, why=value.why)
    if value.kind == "named":
        name = value.name or ""
        return (
            None
            if DTYPE_NAME.search(name) or name.startswith(("torch.", "builtins."))
            else Value(DEVICE, why=it.why(node))
        )
    text = it.module.text_of(expression) if expression is not None else ""
    if text and DTYPE_NAME.search(text):
        return None
    if text and (DEVICE_NAME.search(text) or value.tag == "global-rank"):
        return Value(DEVICE, device=MAYBE, why=it.why(node))
    return Value(DEVICE, why=it.why(node))


def place_of(const: object) -> Place:
    """Where torch.device(const) is: "cuda:1", 1, "cpu"."""
    if isinstance(const, int):
        return GPU
    if isinstance(const, str):
        kind = const.partition(":")[0].lower()
        if kind in ("cuda", "gpu", "hip", "mps", "xpu", "npu"):
            return GPU
        return CPU if kind in ("cpu", "meta") else MAYBE if kind in ("", "{}") or "{" in kind else None
    return None


def copy_to_device(
    it: Interpreter, base: Value, name: str, node: ast.Call, target: Value, non_blocking: bool | None
) -> Value:
    why = target.why or it.why(node)
    if it.in_worker is not None and target.device == GPU and base.kind != INSTANCE:
        it.in_worker.append((node, it.scope.function))
    if base.kind == INSTANCE:
        base.ref.move(target.device, why)
        it.saw_gpu(Value(TENSOR, device=target.device, why=why))
        return base
    if base.kind == SEQUENCE:
        inside = base.elements
        if isinstance(inside, dict):
            return base.with_(
                elements={k: copy_to_device(it, v, name, node, target, non_blocking) for k, v in inside.items()}
            )
        return sequence(copy_to_device(it, element(base), name, node, target, non_blocking))
    if base.kind == HOST:
        return base
    result = tensor(target.device, Why(it.module.text_of(node), it.site(node)), mask=base.mask, scalar=base.scalar)
    it.saw_gpu(result)
    if base.kind != TENSOR:
        if target.device in (GPU, MAYBE):
            it.work(copies=1)
        return result.with_(tag="either")  # a tensor, a dict of them, or a model
    if base.on_gpu:
        return result if target.device == GPU else base
    if base.device == CPU or base.origin == BATCH:
        _copied(it, node, name, base, result, non_blocking, inline=base.tag == "pinned-inline")
        if base.origin == BATCH and base.ref is not None:
            base.ref.moves.append((it.site(node), result, tuple(it.frames)))
    return result


def _copy(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    """dst.copy_(src, non_blocking)"""
    source = given.get(0, "src")
    blocking = _non_blocking(given, 1)
    if source is not None and source.kind == TENSOR:
        if base.device == CPU and source.on_gpu:
            if blocking is True:
                filled = base.with_(pending=(it.site(node), it.synchronised, source.why))
                _rebind(it, node, base, filled)
                return filled
            if blocking is False:
                it.note("copy-to-host", node, name, source, line=line_of(node))
        elif base.on_gpu and source.device == CPU:
            _copied(it, node, name, source, base, blocking, inline=False)
    return base


def _copied(
    it: Interpreter, node: ast.Call, name: str, source: Value, result: Value, non_blocking: bool | None, *, inline: bool
) -> None:
    """A copy from host memory to the device is queued. `inline`: pinned in the same expression."""
    it.work(copies=1)
    it.note(
        "copy-to-device",
        node,
        name,
        result,
        line=line_of(node),
        pinned=source.pinned,
        non_blocking=non_blocking,
        loader=source.ref if source.origin == BATCH else None,
        origin=source.origin,
        made_in=source.frame,
        inline=inline,
    )


def _rebind(it: Interpreter, node: ast.Call, old: Value, new: Value) -> None:
    """The tensor itself changed: every name and list that holds it sees the copy."""
    if isinstance(node.func, ast.Attribute):
        target = node.func.value
        if isinstance(target, ast.Name):
            it.scope.names[target.id] = new
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            holder = it.scope.find(target.value.id)
            if holder is not None and holder.kind == SEQUENCE:
                holder.elements = new
        elif isinstance(target, ast.Attribute):
            owner = it.scope.find(target.value.id) if isinstance(target.value, ast.Name) else None
            if owner is not None and owner.kind == INSTANCE:
                owner.ref.attributes[target.attr] = new
    del old


def _pin(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    del given
    if base.device != GPU:
        it.note("pinned-inline", node, name, None, line=line_of(node), origin=base.origin, made_in=base.frame)
    return base.with_(pinned=True, tag="pinned-inline")


def _type(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    """x.type("torch.cuda.FloatTensor"), x.type(torch.float16), x.type()"""
    if not given.values and not given.named:
        return NUMBER
    text = it.module.text_of(node)
    if "cuda" in text:
        return copy_to_device(
            it, base, name, node, Value(DEVICE, device=GPU, why=it.why(node)), _non_blocking(given, 1)
        )
    return base.with_(mask=False)


def _type_as(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    other = given.values[0] if given.values else ANY
    if other.kind == TENSOR and other.on_gpu and base.device == CPU:
        return copy_to_device(it, base, name, node, Value(DEVICE, device=other.device, why=other.why), False)
    return base.with_(mask=False)


METHODS = {
    "cpu": _cpu,
    "to": _to,
    "cuda": _cuda,
    "copy_": _copy,
    "pin_memory": _pin,
    "type": _type,
    "type_as": _type_as,
}
