"""Methods of tensors: what they compute, read, or wait for."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gpudoctor.source import moves
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import DYNAMIC_SHAPE, HOST_METHODS, LIKE, MASKS, REDUCTIONS, SAME_TENSOR
from gpudoctor.source.project import dotted
from gpudoctor.source.values import (
    ANY,
    BATCH,
    CPU,
    DERIVED,
    FRESH,
    GPU,
    MAYBE,
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
    line = moves.line_of(node)
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
    it.read(node, name, base, line=moves.line_of(node))
    return host()


def _tolist(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    del given
    it.read(node, name, base, kind="copy-to-host", line=moves.line_of(node))
    return sequence(host())


def _numpy(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    it.touch(node, base)
    force = given.named.get("force")
    if base.on_gpu and force is not None and force.const is True:
        it.note("copy-to-host", node, name, base, line=moves.line_of(node))
    return host(tag="array")


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
            it.note("built-on-host", node, name, tensor(device, why), line=moves.line_of(node))
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
    **moves.METHODS,
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
