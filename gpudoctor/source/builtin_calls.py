"""Python's own functions, and methods of lists and dicts."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gpudoctor.source import calls, expressions, loops, moves
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.values import (
    ANY,
    FUNCTION,
    HOST,
    LOADER,
    NO_CONST,
    NONE,
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

if TYPE_CHECKING:
    from gpudoctor.source.calls import Arguments


def call(it: Interpreter, name: str, given: Arguments, node: ast.Call, before: int) -> Value:
    handler = _HANDLERS.get(name)
    if handler is not None:
        return handler(it, name, given, node)
    if name == "print":
        return shown(it, given, node, before)
    if name in _TO_TEXT:
        for value in given.values:
            if value.kind == TENSOR:
                it.read(node, name, value, kind="print")
        first = given.values[0] if given.values else NONE
        return host(
            str(first.const) if name == "str" and isinstance(first.const, (str, int)) else NO_CONST, tag=first.tag
        )
    if name in ("isinstance", "hasattr", "callable", "issubclass", "id", "hash", "len", "ord", "chr", "dir", "input"):
        return NUMBER
    return ANY


_TO_TEXT = ("str", "repr", "format", "ascii")


def shown(it: Interpreter, given: Arguments, node: ast.Call, before: int, *, reads: bool = False) -> Value:
    """print(), loggers and progress bars: a tensor is read to show it; `reads`: it counts as a host read as well."""
    for value in given.flat():
        if value.kind == TENSOR:
            if reads:
                it.read(node, "progress bar", value)
            else:
                it.read(node, "print", value, kind="print")
    if not reads:
        expressions.printed(it, before)
    return NONE


def as_iterable(it: Interpreter, given: Arguments, node: ast.Call, position: int) -> Value:
    if position >= len(given.values):
        return ANY
    source = given.nodes[position] if position < len(given.nodes) else node
    return loops.iterable(it, given.values[position], source)


def _number(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    value = given.values[0] if given.values else NUMBER
    if value.kind == TENSOR:
        it.read(node, name, value)
        return host()
    if isinstance(value.const, (int, float, str)) and not isinstance(value.const, bool):
        try:
            return host(int(value.const) if name == "int" else float(value.const), tag=value.tag)
        except (ValueError, OverflowError):
            return NUMBER
    return host(tag=value.tag if value.tag != "array" else None, rare=value.rare)


def _range(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    for value in given.values:
        if value.kind == TENSOR:
            it.read(node, name, value)
    return sequence(host(tag="counter"), tag="range")


def _extreme(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    """max(a, b) and sorted(list) compare tensors one by one, and wait for each answer."""
    values = given.values
    if len(values) == 1:
        one = element(values[0]) if values[0].kind == SEQUENCE else values[0]
        if one.kind == TENSOR and "key" not in given.named:
            it.read(node, f"{name}()", one, kind="branch")
        return values[0] if name == "sorted" else one
    gpu = next((v for v in values if v.kind == TENSOR and v.on_gpu), None)
    if gpu is not None:
        it.read(node, f"{name}()", gpu, kind="branch")
    return join_all(values) if values else ANY


def _any_all(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    one = element(given.values[0]) if given.values and given.values[0].kind == SEQUENCE else ANY
    if one.kind == TENSOR:
        it.read(node, f"{name}()", one, kind="branch")
    return NUMBER


def _sum(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del name, node
    inside = given.flat()
    device, why = stronger(inside)
    tensors = [value for value in inside if value.kind == TENSOR]
    if not tensors:
        return NUMBER if any(v.kind == HOST for v in inside) else ANY
    if device is not None:
        it.work()
    return tensor(device, why, scalar=all(value.scalar for value in tensors))


def _abs(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del it, name, node
    value = given.values[0] if given.values else ANY
    return value if value.kind in (TENSOR, UNKNOWN) else NUMBER


def _enumerate(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del name
    return loops.enumerated(as_iterable(it, given, node, 0))


def _zip(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del name
    parts = [as_iterable(it, given, node, index) for index in range(len(given.values))]
    tags = [part.tag for part in parts]
    tag = (
        "loader"
        if "loader" in tags
        else "range"
        if tags and all(t == "range" for t in tags)
        else next((t for t in tags if t in ("parameters", "modules")), None)
    )
    result = sequence(sequence([element(part) for part in parts]), tag=tag or "zip")
    result.ref = next((part.ref for part in parts if part.ref is not None), None)
    return result


def _same(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    """list(x), iter(x), reversed(x)"""
    value = given.values[0] if given.values else None
    if value is None:
        return sequence([]) if name != "dict" else sequence({**given.named})
    if value.kind == LOADER and name == "iter":
        return value
    if name == "dict" and value.kind == SEQUENCE:
        one = element(value)
        return value if isinstance(value.elements, dict) else sequence(element(one) if one.kind == SEQUENCE else one)
    if value.kind == SEQUENCE and not isinstance(value.elements, dict):
        return value
    return as_iterable(it, given, node, 0)


def _next(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del name
    if not given.values:
        return ANY
    found = element(as_iterable(it, given, node, 0))
    return found.with_(frame=it.loop()) if found.kind == TENSOR else found


def _map(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    if len(given.values) < 2:
        return ANY
    inner = element(as_iterable(it, given, node, 1))
    if name == "filter":
        return sequence(inner)
    function = given.values[0]
    if function.kind == FUNCTION or function.kind == "named":
        return sequence(
            calls.call(it, function, calls.Arguments([inner], {}, [given.nodes[1]]), node, len(it.candidates))
        )
    return sequence(ANY)


def _getattr(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del name
    if len(given.values) >= 2 and isinstance(given.values[1].const, str):
        found = expressions.attribute(it, given.values[0], given.values[1].const, node)
        return join(found, given.values[2]) if len(given.values) > 2 and found.kind == UNKNOWN else found
    return ANY


def _type(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del it, name, given, node
    return ANY


_HANDLERS = {
    "float": _number,
    "int": _number,
    "bool": _number,
    "complex": _number,
    "range": _range,
    "max": _extreme,
    "min": _extreme,
    "sorted": _extreme,
    "any": _any_all,
    "all": _any_all,
    "sum": _sum,
    "abs": _abs,
    "round": _abs,
    "pow": _abs,
    "enumerate": _enumerate,
    "zip": _zip,
    "reversed": _same,
    "iter": _same,
    "list": _same,
    "tuple": _same,
    "set": _same,
    "dict": _same,
    "frozenset": _same,
    "next": _next,
    "map": _map,
    "filter": _map,
    "getattr": _getattr,
    "type": _type,
}


def sequence_method(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    """Methods of lists, dicts, sets, and of dicts that know .to(device) (the output of a tokenizer)."""
    inside = base.elements
    if name in ("append", "add", "appendleft", "put") and given.values:
        value = given.values[0]
        if value is base:  # a list that holds itself
            return NONE
        base.elements = value if inside in ([], {}) else join(element(base), value)
        return NONE
    if name in ("extend", "update") and given.values:
        other = given.values[0]
        if other.kind == SEQUENCE:
            if isinstance(inside, dict) and isinstance(other.elements, dict):
                inside.update(other.elements)
            elif other.elements not in ([], {}):
                base.elements = element(other) if inside in ([], {}) else join(element(base), element(other))
        return NONE
    if name == "items":
        return sequence(sequence([host(), element(base)]), tag="items")
    if name in ("values", "popleft", "pop", "get", "setdefault"):
        if name == "values":
            return sequence(element(base), tag="items")
        key = given.values[0].const if given.values else NO_CONST
        if isinstance(inside, dict) and key in inside:
            found: Value = inside[key]
            return found
        return element(base)
    if name == "keys":
        return sequence(host(), tag="items")
    if name == "copy":
        return base
    if name == "to":
        return moves.move(it, base, given, node, name)
    if name in ("index", "count"):
        return NUMBER
    return ANY if name not in ("sort", "clear", "insert", "remove", "reverse") else NONE
