"""Calls: arguments, and functions of the project that are walked with them."""

from __future__ import annotations

import ast
from typing import NamedTuple

from gpudoctor.source import classes, expressions, guess, packages, statements
from gpudoctor.source import frames as heat
from gpudoctor.source.evaluator import evaluate
from gpudoctor.source.frames import Call
from gpudoctor.source.interpreter import MAX_DEPTH, Interpreter, Scope
from gpudoctor.source.names import EVALUATION_NAME, TIMING_NAME, WARM_UP_NAME
from gpudoctor.source.project import Function, dotted, looks_like_module
from gpudoctor.source.values import (
    ANY,
    CLASS,
    FUNCTION,
    INSTANCE,
    METHOD,
    NAMED,
    PROJECT,
    SEQUENCE,
    TENSOR,
    Value,
    element,
    host,
    join_all,
    sequence,
    tensor,
)


class Arguments(NamedTuple):
    """Evaluated arguments; `rest` is one value for what a * or ** of unknown length adds."""

    values: list[Value]
    named: dict[str, Value]
    nodes: list[ast.expr]
    rest: Value | None = None

    def get(self, position: int, name: str) -> Value | None:
        if name in self.named:
            return self.named[name]
        return self.values[position] if 0 <= position < len(self.values) else None

    def all(self) -> list[Value]:
        return [*self.values, *self.named.values(), *([self.rest] if self.rest is not None else [])]

    def flat(self) -> list[Value]:
        """All arguments, and what the lists, tuples and dicts among them hold."""
        found: list[Value] = []
        for value in self.all():
            found.append(value)
            if value.kind == SEQUENCE:
                found.append(element(value))
        return found


def arguments(it: Interpreter, node: ast.Call) -> Arguments:
    values: list[Value] = []
    nodes: list[ast.expr] = []
    rest: Value | None = None
    for part in node.args:
        if isinstance(part, ast.Starred):
            value = evaluate(it, part.value)
            if value.kind == SEQUENCE and isinstance(value.elements, list):
                values += value.elements
                nodes += [part.value] * len(value.elements)
            else:
                rest = element(value) if value.kind == SEQUENCE else value
        else:
            values.append(evaluate(it, part))
            nodes.append(part)
    named: dict[str, Value] = {}
    for keyword in node.keywords:
        value = evaluate(it, keyword.value)
        if keyword.arg is not None:
            named[keyword.arg] = value
        elif value.kind == SEQUENCE and isinstance(value.elements, dict):
            named.update({str(key): item for key, item in value.elements.items()})
        else:
            rest = element(value) if value.kind == SEQUENCE else value
    return Arguments(values, named, nodes, rest)


def call_expression(it: Interpreter, node: ast.Call) -> Value:
    func = node.func
    before = len(it.candidates)
    if isinstance(func, ast.Attribute):
        if isinstance(func.value, ast.Call) and dotted(func.value.func) == "super":
            return classes.super_call(it, node, func.attr)
        base = evaluate(it, func.value)
        if base.kind not in (NAMED, PROJECT):
            given = arguments(it, node)
            return classes.method(it, base, func.attr, given, node, before)
        target = expressions.attribute(it, base, func.attr, func)
    else:
        target = evaluate(it, func)
    return call(it, target, arguments(it, node), node, before)


def call(it: Interpreter, target: Value, given: Arguments, node: ast.Call, before: int = 0) -> Value:
    """The result of calling a value."""
    if isinstance(target.elements, tuple):  # functools.partial
        values, named = target.elements
        given = Arguments([*values, *given.values], {**named, **given.named}, given.nodes, given.rest)
        target = target.with_(elements=None)
    kind = target.kind
    if kind == FUNCTION:
        return call_function(it, target, given, node)
    if kind == CLASS:
        return classes.instantiate(it, target, given, node)
    if kind == NAMED:
        return packages.call(it, target.name or "", given, node, before)
    if kind == INSTANCE:
        return classes.call_instance(it, target, given, node)
    if kind == METHOD:
        return classes.method(it, target.ref, target.name or "", given, node, before)
    if kind == TENSOR:  # something unknown that was moved to a device is a model when it is called
        it.work(models=1)
        return tensor(target.device, target.why)
    return guess.unknown_call(it, given, node)


# functions


def decorated(it: Interpreter, node: ast.FunctionDef | ast.AsyncFunctionDef, value: Value) -> Value:
    """The function after its decorators; those of packages change nothing that matters here, with some exceptions."""
    for decorator in reversed(node.decorator_list):
        name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator) or ""
        last = name.rpartition(".")[2]
        if last in ("no_grad", "inference_mode"):
            value = value.with_(tag="no-grad")
        elif last in ("lru_cache", "cache", "cached_property"):
            value = value.with_(tag="cached")
        elif last in ("property", "staticmethod", "classmethod", "abstractmethod", "setter", "wraps", "contextmanager"):
            continue
        else:
            found = it.scope.find(name.partition(".")[0])
            if found is None or found.kind in (PROJECT, NAMED):
                continue  # of another file: it wraps the function, which is what counts
            target = evaluate(it, decorator)
            if target.kind == FUNCTION:
                given = Arguments([value], {}, [])
                made = call_function(it, target, given, _as_call(node))
                value = made if made.kind == FUNCTION else value
            elif target.kind == CLASS:
                continue
    return value


def _as_call(node: ast.AST) -> ast.Call:
    fake = ast.Call(func=ast.Name(id="", ctx=ast.Load()), args=[], keywords=[])
    return ast.copy_location(fake, node)


def call_function(it: Interpreter, target: Value, given: Arguments, node: ast.AST) -> Value:
    """Walk a function of the project with these arguments, in the loops that are open now."""
    function, closure, this = target.ref
    if len(it.calls) >= MAX_DEPTH or it.count >= it.most or any(open_.function is function for open_ in it.calls):
        return ANY
    key = _key(it, function, closure, this, given)
    known = it.memo.get(key)
    if known is not None:
        return known
    it.count += 1
    key_of = (function.module.source.path, function.name)
    it.reached.add(key_of)
    if it.module is not function.module or len(it.calls) > 1:
        it.reached_elsewhere.add(key_of)
    scope = Scope(function.module, closure)
    it.opened.append(scope)
    scope.function, scope.this = function, this
    bind(it, function, scope, given, this)
    result = _walk(it, function, scope, node, target.tag)
    it.memo[key] = result
    return result


def _key(
    it: Interpreter, function: Function, closure: Scope | None, this: Value | None, given: Arguments
) -> tuple[object, ...]:
    frame = it.frames[-1] if it.frames else None
    return (
        id(function),
        id(closure),
        id(this.ref) if this is not None else 0,
        id(frame),
        it.no_grad,
        it.synchronised,
        tuple(_signature(value) for value in given.values),
        tuple((name, _signature(value)) for name, value in given.named.items()),
    )


def _signature(value: Value, depth: int = 0) -> tuple[object, ...]:
    inside = value.elements
    return (
        value.kind,
        value.device,
        value.mask,
        value.scalar,
        value.pinned,
        value.origin,
        id(value.ref),
        value.name,
        value.tag,
        value.rare,
        value.pending is not None,
        value.const if isinstance(value.const, (str, bool, type(None))) else None,
        _signature(inside, depth + 1) if isinstance(inside, Value) and depth < 3 else id(inside),
    )


def bind(it: Interpreter, function: Function, scope: Scope, given: Arguments, this: Value | None) -> None:
    """Give the parameters their values."""
    spec = function.node.args
    names = [argument.arg for argument in [*spec.posonlyargs, *spec.args]]
    values = list(given.values)
    if this is not None and not is_static(function):
        values.insert(0, this)
    defaults = dict(zip(names[len(names) - len(spec.defaults) :], spec.defaults, strict=True)) if spec.defaults else {}
    for index, name in enumerate(names):
        if index < len(values):
            scope.names[name] = values[index]
        elif name in given.named:
            scope.names[name] = given.named[name]
        elif given.rest is not None:
            scope.names[name] = given.rest
        elif name in defaults:
            scope.names[name] = evaluate(it, defaults[name]) if _simple(defaults[name]) else ANY
        else:
            scope.names[name] = ANY
    if spec.vararg is not None:
        extra = values[len(names) :]
        open_end = given.rest is not None
        scope.names[spec.vararg.arg] = sequence(given.rest if open_end and not extra else extra)
    for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        if argument.arg in given.named:
            scope.names[argument.arg] = given.named[argument.arg]
        else:
            known = default is not None and _simple(default)
            scope.names[argument.arg] = evaluate(it, default) if known and default is not None else given.rest or ANY
    if spec.kwarg is not None:
        known_names = {*names, *(argument.arg for argument in spec.kwonlyargs)}
        more = {name: value for name, value in given.named.items() if name not in known_names}
        scope.names[spec.kwarg.arg] = (
            sequence(dict(more)) if given.rest is None else sequence(join_all([*more.values(), given.rest]))
        )


def _simple(node: ast.expr) -> bool:
    return isinstance(node, (ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.UnaryOp))


def is_static(function: Function) -> bool:
    return any(dotted(decorator) == "staticmethod" for decorator in getattr(function.node, "decorator_list", ()))


def _walk(it: Interpreter, function: Function, scope: Scope, node: ast.AST, tag: str | None) -> Value:
    entered = Call(function, it.module, getattr(node, "lineno", 1))
    saved = (it.module, it.scope, it.function, it.statement, it.no_grad)
    it.calls.append(entered)
    guards = _guards(it, function, tag)
    it.frames += guards
    it.module, it.scope, it.function = function.module, scope, function.name
    if tag == "no-grad":
        it.no_grad += 1
    try:
        if isinstance(function.node, ast.Lambda):
            it.statement = (function.node.lineno, function.node.end_lineno or function.node.lineno)
            return evaluate(it, function.node.body)
        statements.run(it, function.node.body)
    finally:
        if guards:
            del it.frames[-len(guards) :]
        it.calls.pop()
        it.module, it.scope, it.function, it.statement, it.no_grad = saved
    if scope.yields:
        return sequence(join_all(scope.yields), tag="generator")
    return join_all(scope.returns) if scope.returns else host(None)


def _guards(it: Interpreter, function: Function, tag: str | None) -> list[heat.Frame]:
    """A function whose result is kept, a benchmark, a warm-up or an evaluation runs no training step, by its name."""
    name = function.name.rpartition(".")[2]
    found = ""
    if (name == "__init__" and function.cls is not None and looks_like_module(function.cls)) or tag == "cached":
        found = "cached"
    elif TIMING_NAME.search(name):
        found = "timing"
    elif WARM_UP_NAME.search(name) and "lr" not in name:
        found = "warm-up"
    elif EVALUATION_NAME.search(name) and "train" not in name:
        found = "evaluation"
    if not found:
        return []
    frame = heat.Frame(heat.GUARD, function.module, function.node.lineno, name)
    frame.name, frame.calls = found, len(it.calls)
    return [frame]
