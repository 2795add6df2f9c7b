"""Loops: over what they run, what one round is given, and a second walk where a round changes the next."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gpudoctor.source import calls, classes, conditions, statements
from gpudoctor.source import frames as heat
from gpudoctor.source.evaluator import evaluate
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import LOADER_NAME, TIMING_NAME, WARM_UP_NAME
from gpudoctor.source.project import dotted
from gpudoctor.source.values import (
    ANY,
    BATCH,
    CPU,
    GPU,
    HOST,
    INSTANCE,
    LOADER,
    MAYBE,
    NUMBER,
    SEQUENCE,
    TENSOR,
    UNKNOWN,
    Value,
    element,
    host,
    sequence,
    tensor,
)

Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def iterable(it: Interpreter, value: Value, node: ast.expr) -> Value:
    """A value as a SEQUENCE of what a loop over it gets; `tag` says what it is, `ref` is a loader."""
    if value.kind == LOADER:
        result = sequence(_batch(value), tag="loader")
        result.ref = value.ref
        return result
    if value.kind == SEQUENCE and (isinstance(value.elements, dict) or value.tag in ("dict", "state")):
        return sequence(host(), tag="items")
    if value.kind == SEQUENCE:
        one = element(value)
        if value.tag is None and one.kind == TENSOR and one.device in (CPU, None):
            return sequence(one.with_(origin=BATCH))
        if value.tag is None and one.kind == SEQUENCE and isinstance(one.elements, list):
            parts = [p.with_(origin=BATCH) if p.kind == TENSOR and p.device in (CPU, None) else p for p in one.elements]
            return sequence(one.with_(elements=parts))
        return value
    if value.kind == TENSOR:
        return sequence(value.with_(scalar=False, origin=BATCH if value.device in (CPU, None) else None), tag="rows")
    if value.kind == INSTANCE:
        return _instance(it, value, node)
    if value.kind == HOST:
        return sequence(NUMBER, tag="host")
    if value.kind == UNKNOWN and LOADER_NAME.search(_iterated_name(node)):
        return sequence(_batch(Value(LOADER)), tag="loader")
    if value.kind == UNKNOWN and isinstance(node, ast.Call):
        return _wrapped(it, node)
    return sequence(ANY, tag="unknown")


def _iterated_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return dotted(node.func) or ""
    return dotted(node.value if isinstance(node, ast.Subscript) else node) or ""


def _wrapped(it: Interpreter, node: ast.Call) -> Value:
    """An unknown function around a loader hands out its batches: progress bars, metric loggers, prefetchers."""
    for part in node.args:
        inner = evaluate(it, part) if isinstance(part, (ast.Name, ast.Attribute, ast.Call)) else ANY
        if inner.kind == LOADER or (inner.kind == UNKNOWN and LOADER_NAME.search(_iterated_name(part))):
            found = iterable(it, inner, part)
            name = (dotted(node.func) or "").lower()
            if "enumerate" in name:
                return enumerated(found)
            return found
    if LOADER_NAME.search(_iterated_name(node)):
        return sequence(_batch(Value(LOADER)), tag="loader")
    return sequence(ANY, tag="unknown")


def _batch(loader: Value) -> Value:
    """What a loader hands out: on the CPU, or moved already by a framework."""
    if loader.device in (GPU, MAYBE):
        return tensor(loader.device, loader.why)
    batch = tensor(CPU if loader.ref is not None else None)
    batch.origin = BATCH
    batch.ref = loader.ref
    batch.pinned = loader.ref.pin_memory if loader.ref is not None else None
    return batch


def _instance(it: Interpreter, value: Value, node: ast.expr) -> Value:
    thing = value.ref
    if thing.is_module:
        inner = Value(INSTANCE)
        inner.ref = type(thing)(None, "torch.nn.Module", is_module=True)
        inner.ref.device, inner.ref.why = thing.device, thing.why
        return sequence(inner, tag="modules")
    if thing.cls is not None:
        cls, scope = thing.cls
        found = classes.find_method(it, cls, scope, "__iter__")
        if found is not None:
            function, where = found
            bound = Value("function", name="__iter__")
            bound.ref = (function, where, value)
            made = calls.call_function(it, bound, calls.Arguments([], {}, []), node)
            if made.kind == SEQUENCE:
                return made
    if LOADER_NAME.search(_iterated_name(node)):
        return sequence(_batch(Value(LOADER)), tag="loader")
    return sequence(ANY, tag="unknown")


def enumerated(value: Value) -> Value:
    counter = host(tag="counter")
    result = sequence(sequence([counter, element(value)]), tag=value.tag)
    result.ref = value.ref
    return result


def for_loop(it: Interpreter, node: ast.For | ast.AsyncFor) -> str | None:
    value = iterable(it, evaluate(it, node.iter), node.iter)
    text = it.module.text_of(node.iter)
    header = f"for {it.module.text_of(node.target)} in {text}"
    kind = heat.STEP if value.tag in ("loader", "range") else heat.COLLECTION
    guard = (
        "warm-up"
        if WARM_UP_NAME.search(text)
        else "timing"
        if TIMING_NAME.search(text) and value.tag == "range"
        else ""
    )
    if guard:
        statements.guarded(it, node, lambda: _loop(it, node, node.body, value, kind, header), guard)
    else:
        _loop(it, node, node.body, value, kind, header)
    statements.run(it, node.orelse)
    return None


def _loop(
    it: Interpreter, node: ast.For | ast.AsyncFor, body: Sequence[ast.stmt], value: Value, kind: str, header: str
) -> None:
    with it.frame(kind, node, header) as frame:
        if value.tag == "loader":
            frame.iterates_loader = True
            if value.ref is not None:
                value.ref.iterated(tuple(it.frames))
        if value.tag in ("parameters", "modules"):
            frame.elements = value.tag
        frame.times = _times(node.iter)
        one = element(value)
        if _is_batch(one):
            frame.name = "batches"
        if one.kind == TENSOR and one.device in (CPU, None):
            one = one.with_(frame=frame)
        before = dict(it.scope.names)
        statements.assign(it, node.target, one)
        statements.run(it, body)
        if _carried(before, it.scope.names):
            it.scope.names = statements.join_names(before, it.scope.names)
            statements.assign(it, node.target, one)
            statements.run(it, body)
        it.scope.names = statements.join_names(before, it.scope.names)


def _is_batch(value: Value) -> bool:
    """A CPU tensor of a list, or a tuple that holds one."""
    if value.kind == SEQUENCE:
        inside = value.elements
        return isinstance(inside, list) and any(_is_batch(part) for part in inside)
    return value.kind == TENSOR and value.origin == BATCH


def _times(node: ast.expr) -> int | None:
    """range(3) runs three times."""
    if isinstance(node, ast.Call) and dotted(node.func) == "range" and len(node.args) == 1:
        last = node.args[0]
        if isinstance(last, ast.Constant) and isinstance(last.value, int):
            return last.value
    return None


def _carried(before: dict[str, Value], after: dict[str, Value]) -> bool:
    """Whether a round leaves a tensor on the GPU under a name that held something else when it began."""
    for name, old in before.items():
        new = after.get(name)
        if (
            new is not None
            and new is not old
            and new.kind == TENSOR
            and new.on_gpu
            and not (old.kind == TENSOR and old.on_gpu)
        ):
            return True
    return False


def while_loop(it: Interpreter, node: ast.While) -> str | None:
    header = f"while {it.module.text_of(node.test)}"
    with it.frame(heat.STEP, node, header):
        before = dict(it.scope.names)
        test = conditions.truth(it, node.test)
        if test.const is False:
            return None
        statements.run(it, node.body)
        if _carried(before, it.scope.names):
            it.scope.names = statements.join_names(before, it.scope.names)
            it.statement = (node.lineno, node.lineno)
            conditions.truth(it, node.test)
            statements.run(it, node.body)
        it.scope.names = statements.join_names(before, it.scope.names)
    statements.run(it, node.orelse)
    return None


def comprehension(it: Interpreter, node: Comprehension) -> Value:
    """A list, set, dict or generator made in a loop of its own."""
    saved = it.scope.names
    it.scope.names = dict(saved)
    opened = 0
    tag = None
    try:
        for generator in node.generators:
            value = iterable(it, evaluate(it, generator.iter), generator.iter)
            frame = heat.Frame(heat.COLLECTION, it.module, node.lineno, it.module.text_of(node))
            frame.calls = len(it.calls)
            frame.elements = value.tag if value.tag in ("parameters", "modules") else "comprehension"
            if it.no_grad:
                frame.evaluating = "no gradients are kept"
            if value.tag == "loader":
                frame.iterates_loader = True
                if value.ref is not None:
                    value.ref.iterated((*it.frames, frame))
            tag = value.tag if value.tag in ("parameters", "modules") and len(node.generators) == 1 else None
            it.frames.append(frame)
            it.all_frames.append(frame)
            opened += 1
            statements.assign(it, generator.target, element(value))
            for test in generator.ifs:
                conditions.truth(it, test)
                conditions.narrow(it, test, true=True)
        if isinstance(node, ast.DictComp):
            evaluate(it, node.key)
            return sequence(evaluate(it, node.value), tag="dict")
        return sequence(evaluate(it, node.elt), tag=tag)
    finally:
        for _ in range(opened):
            it.leave_loop(it.frames.pop())
        it.scope.names = saved
