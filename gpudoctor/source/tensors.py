"""Methods of tensors, and copies between host and device."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import (
    DEVICE_NAME,
    DTYPE_NAME,
    DYNAMIC_SHAPE,
    HOST_METHODS,
    LIKE,
    MASKS,
    REDUCTIONS,
    SAME_TENSOR,
)
from gpudoctor.source.project import dotted
from gpudoctor.source.values import (
    ANY,
    BATCH,
    CPU,
    DERIVED,
    DEVICE,
    FRESH,
    GPU,
    HOST,
    INSTANCE,
    MAYBE,
    NO_CONST,
    NONE,
    NUMBER,
    SEQUENCE,
    TENSOR,
    Place,
    Value,
    Why,
    element,
    host,
    sequence,
    stronger,
    tensor,
)

if TYPE_CHECKING:
    from gpudoctor.source.calls import Arguments

# Take a Python number; a tensor on the device is read first (pytorch#108968).
_SCALAR_ARGUMENTS = frozenset(["alpha", "beta", "value"])


def line_of(node: ast.Call) -> int:
    """The line where the name of a called method stands, which differs in a chain over several lines."""
    return node.func.end_lineno or node.lineno


def method(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    """base.name(...) for a tensor, or what a model returned."""
    special = _SPECIAL.get(name)
    if special is not None:
        return special(it, base, name, given, node)
    if name in HOST_METHODS:
        return sequence(host()) if name == "keys" else NUMBER
    if base.tag == "either" and name not in REDUCTIONS | MASKS | SAME_TENSOR:
        return ANY
    return operation(it, name, [base, *given.all()], given, node, base)


def operation(
    it: Interpreter, name: str, values: list[Value], given: Arguments, node: ast.Call, base: Value | None = None
) -> Value:
    """A method or function of torch that computes a tensor from tensors."""
    flat = [inner for value in values for inner in ([value, element(value)] if value.kind == SEQUENCE else [value])]
    device, why = stronger(flat)
    for value in values:
        it.touch(node, value)
    if device in (GPU, MAYBE):
        it.work()
        _hidden(it, name, given, node, tensor(device, why))
    tensors = [value for value in flat if value.kind == TENSOR]
    masks = name in MASKS
    same = name in SAME_TENSOR or name.endswith("_")
    first = tensors[0] if tensors else None
    result = tensor(device, why, mask=masks)
    if same and first is not None and base is not None:
        kept = name in (
            "detach",
            "clone",
            "contiguous",
            "view",
            "reshape",
            "squeeze",
            "flatten",
            "unsqueeze",
            "expand",
            "t",
            "permute",
            "transpose",
            "requires_grad_",
            "detach_",
            "expand_as",
            "ravel",
            "repeat",
            "to_",
        )
        result.mask = base.mask if kept else masks
        result.scalar = base.scalar and not name.startswith(
            ("view", "reshape", "unsqueeze", "expand", "flatten", "ravel")
        )
        if device in (CPU, None):
            result.origin, result.frame, result.ref = base.origin, base.frame, base.ref
            result.pinned = base.pinned if kept else (False if base.pinned is False else None)
            result.pending = base.pending
        return result
    if name in REDUCTIONS:
        operands = [v for v in values if v.kind == TENSOR]
        reduced = not given.values if base is not None else len(given.values) <= 1
        two = name in ("dot", "vdot", "dist")
        result.scalar = (reduced or two) and not ({"dim", "axis"} & given.named.keys()) and bool(operands)
        if name in ("max", "min") and len(operands) > 1:
            result.scalar = all(v.scalar for v in operands)
    elif len(tensors) > 0 and all(value.scalar for value in tensors):
        result.scalar = name not in ("stack", "cat", "concat", "unsqueeze", "repeat", "expand", "view", "reshape")
    if name in ("where", "masked_fill") and all(v.mask for v in tensors):
        result.mask = True
    if device in (CPU, None):
        result.frame = it.loop()
        result.origin = origin_of(tensors)
        result.ref = next((v.ref for v in tensors if v.ref is not None), None)
        result.pinned = False if device == CPU and all(v.pinned is False for v in tensors) else None
    return result


def origin_of(tensors: list[Value]) -> str:
    """Where the data of a computed CPU tensor comes from."""
    if any(value.origin == BATCH for value in tensors):
        return BATCH
    return FRESH if tensors and all(value.origin == FRESH for value in tensors) else DERIVED


def _hidden(it: Interpreter, name: str, given: Arguments, node: ast.Call, value: Value) -> None:
    """Operations that wait for the device without looking like it."""
    line = line_of(node)
    plain = name.rstrip("_")
    if name in DYNAMIC_SHAPE:
        if name == "nonzero" and _static_size(given):
            return
        it.note("dynamic-shape", node, name, value, line=line)
    elif name == "repeat_interleave":
        position = 0 if _is_method(node) else 1
        repeats = given.get(position, "repeats")
        alone = repeats is None and not _is_method(node)  # torch.repeat_interleave(repeats)
        if "output_size" not in given.named and (
            alone or (repeats is not None and repeats.kind == TENSOR and repeats.on_gpu)
        ):
            it.note("dynamic-shape", node, name, value, line=line)
    elif name == "where" and len(given.values) + len(given.named) == (0 if _is_method(node) else 1):
        it.note("dynamic-shape", node, "one-argument where", value, line=line)
    elif name == "one_hot":
        classes = given.get(1, "num_classes")
        if classes is None or classes.const == -1:
            it.note("dynamic-shape", node, "one_hot without num_classes", value, line=line)
    elif plain in ("index_put", "index_copy") and any(v.kind == SEQUENCE and _holds_mask(v) for v in given.all()):
        it.note("dynamic-shape", node, f"{name} with a mask", value, line=line)
    elif name in ("equal", "allclose", "is_nonzero", "is_same_size"):
        if name != "is_same_size":
            it.note("hidden-sync", node, name, value, line=line)
    elif name == "nanmedian" and len(given.values) <= (0 if _is_method(node) else 1) and "dim" not in given.named:
        it.note("hidden-sync", node, "nanmedian", value, line=line)
    elif name in ("multinomial", "any", "all"):
        it.note("hidden-sync", node, name, value, line=line)
    elif name == "normal" and not _is_method(node):
        std = given.get(1, "std")
        if std is not None and std.kind == TENSOR and std.on_gpu:
            it.note("hidden-sync", node, "normal with a tensor as std", value, line=line)
    elif name == "histc" and "min" not in given.named and len(given.values) <= (2 if not _is_method(node) else 1):
        it.note("hidden-sync", node, "histc without min and max", value, line=line)
    for keyword in _SCALAR_ARGUMENTS & given.named.keys():
        argument = given.named[keyword]
        takes = keyword in ("alpha", "beta") or plain in ("addcmul", "addcdiv", "masked_fill_", "full_like", "fill")
        if argument.kind == TENSOR and argument.on_gpu and takes and plain not in ("masked_fill", "fill"):
            it.note("hidden-sync", node, f"tensor given as {keyword}=", value, line=line)


def _static_size(given: Arguments) -> bool:
    return "size" in given.named


def _holds_mask(value: Value) -> bool:
    inside = value.elements
    parts = inside if isinstance(inside, list) else [inside] if isinstance(inside, Value) else []
    return any(part.kind == TENSOR and part.mask for part in parts)


def _is_method(node: ast.Call) -> bool:
    """x.sum() in place of torch.sum(x): by the root of the name."""
    name = dotted(node.func) or ""
    return not name.startswith(("torch.", "F.", "nn.functional."))


# reading


def _item(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    del given
    it.read(node, name, base, line=line_of(node))
    return host()


def _tolist(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    del given
    it.read(node, name, base, kind="copy-to-host", line=line_of(node))
    return sequence(host())


def _numpy(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    it.touch(node, base)
    force = given.named.get("force")
    if base.on_gpu and force is not None and force.const is True:
        it.note("copy-to-host", node, name, base, line=line_of(node))
    return host(tag="array")


def _cpu(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    del given
    return copy_to_host(it, base, name, node, non_blocking=False)


def copy_to_host(it: Interpreter, base: Value, name: str, node: ast.Call, *, non_blocking: bool | None) -> Value:
    result = tensor(CPU, mask=base.mask, scalar=base.scalar)
    result.origin, result.frame, result.pinned = DERIVED, it.loop(), False
    if base.on_gpu:
        if non_blocking:
            result.pending = (it.site(node), it.synchronised, base.why)
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
        it.work(copies=1)
        it.note(
            "copy-to-device",
            node,
            name,
            result,
            line=line_of(node),
            pinned=base.pinned,
            non_blocking=non_blocking,
            loader=base.ref if base.origin == BATCH else None,
            origin=base.origin,
            made_in=base.frame,
            inline=base.tag == "pinned-inline",
        )
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
            it.note("copy-to-host", node, name, source, line=line_of(node))
        elif base.on_gpu and source.device == CPU:
            it.work(copies=1)
            it.note(
                "copy-to-device",
                node,
                name,
                base,
                line=line_of(node),
                pinned=source.pinned,
                non_blocking=blocking,
                loader=source.ref if source.origin == BATCH else None,
                origin=source.origin,
                made_in=source.frame,
                inline=False,
            )
    return base


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


# what a model returned, used as dict or tuple


def _items(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    del it, given, node
    if name == "items":
        return sequence(sequence([host(), base]), tag="items")
    return sequence(base, tag="items") if name == "values" else base


def _get(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    del it, name, given, node
    return base


def _nothing(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    del it, base, name, given, node
    return NONE


def _backward(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    del base, name, given, node
    it.step_event("backward")
    return NONE


def _new(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    """x.new_tensor(list) copies from the host, x.new_zeros(...) does not."""
    device, why = base.device, base.why
    if device in (GPU, MAYBE):
        it.work()
        if name == "new_tensor" and given.values and given.values[0].kind != TENSOR:
            it.note("built-on-host", node, name, tensor(device, why), line=line_of(node))
    return tensor(device, why)


def _split(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    sizes = given.get(0, "split_size_or_sections") or given.get(0, "split_size")
    if sizes is not None and sizes.kind == TENSOR and sizes.on_gpu:
        it.read(node, f"{name} sizes", sizes)
    return sequence(operation(it, name, [base], given, node, base))


_SPECIAL = {
    "item": _item,
    "tolist": _tolist,
    "numpy": _numpy,
    "__array__": _numpy,
    "cpu": _cpu,
    "to": _to,
    "cuda": _cuda,
    "copy_": _copy,
    "pin_memory": _pin,
    "type": _type,
    "type_as": _type_as,
    "items": _items,
    "values": _items,
    "get": _get,
    "pop": _get,
    "record_stream": _nothing,
    "backward": _backward,
    "new_tensor": _new,
    "__float__": _item,
    "__int__": _item,
    "__bool__": _item,
    "to_tuple": _get,
    "split": _split,
    "chunk": _split,
    "unbind": _split,
    "split_with_sizes": _split,
    **dict.fromkeys((name for name in LIKE if name.startswith("new_")), _new),
}


def fresh(it: Interpreter, device: Place, why: Why | None, *, pinned: bool | None) -> Value:
    """A new tensor, made where we are."""
    result = tensor(device, why)
    if device == CPU:
        result.origin, result.frame, result.pinned = FRESH, it.loop(), pinned
    return result
