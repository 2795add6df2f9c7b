"""Walks statements: assignments, branches with their guards, context managers."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from gpudoctor.source import classes, conditions, expressions, loops, modules, operators
from gpudoctor.source import frames as heat
from gpudoctor.source.evaluator import evaluate
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import OPTIMIZER_NAME
from gpudoctor.source.project import dotted
from gpudoctor.source.values import ANY, DEVICE, INSTANCE, NONE, SEQUENCE, TENSOR, Value, element, host, join, sequence

END = frozenset({"return", "raise", "break", "continue"})


def run(it: Interpreter, body: Sequence[ast.stmt]) -> str | None:
    """Walk a block. Returns how it ends when it never reaches its end: return, raise, break or continue."""
    pushed = 0
    if it.steps < 0:
        return None
    try:
        for statement in body:
            step = _STEPS.get(type(statement))
            if step is None:
                continue
            it.statement = _span(statement)
            it.steps -= 1
            ended = step(it, statement)
            if ended in END:
                return ended
            if ended == "rest is rare":  # if step % 100: continue
                it.frames.append(_guard(it, statement))
                pushed += 1
        return None
    finally:
        if pushed:
            del it.frames[-pushed:]


def _span(statement: ast.stmt) -> tuple[int, int]:
    """The lines of a statement; of a compound one its header."""
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        return statement.lineno, max(statement.lineno, body[0].lineno - 1)
    return statement.lineno, statement.end_lineno or statement.lineno


def _guard(it: Interpreter, node: ast.AST, name: str = "interval", kind: str = heat.GUARD) -> heat.Frame:
    frame = heat.Frame(kind, it.module, getattr(node, "lineno", 1), "")
    frame.name, frame.calls = name, len(it.calls)
    return frame


def guarded(
    it: Interpreter, node: ast.AST, body: Callable[[], object], name: str = "interval", kind: str = heat.GUARD
) -> object:
    it.frames.append(_guard(it, node, name, kind))
    try:
        return body()
    finally:
        it.frames.pop()


# assignments


def _assign(it: Interpreter, node: ast.Assign) -> None:
    value = evaluate(it, node.value)
    for target in node.targets:
        assign(it, target, value)


def _annotated(it: Interpreter, node: ast.AnnAssign) -> None:
    if node.value is not None:
        assign(it, node.target, evaluate(it, node.value))


def _augmented(it: Interpreter, node: ast.AugAssign) -> None:
    old = evaluate(it, _loaded(node.target))
    value = operators.operate(it, node, node.op, old, evaluate(it, node.value))
    if value.kind == "host" and isinstance(node.op, ast.Add) and isinstance(node.value, ast.Constant):
        value = host(tag="counter")
    assign(it, node.target, value, augmented=True)


def _loaded(target: ast.expr) -> ast.expr:
    """The target of += as an expression that is read."""
    return target


def assign(it: Interpreter, target: ast.expr, value: Value, *, augmented: bool = False) -> None:
    if isinstance(target, ast.Name):
        _store(it, target.id, value)
    elif isinstance(target, ast.Attribute):
        base = evaluate(it, target.value)
        if base.kind == INSTANCE:
            if base.ref.late is not None:
                classes.fill(it, base)
            set_attribute(base, target.attr, value)
    elif isinstance(target, ast.Subscript):
        _assign_item(it, target, value, augmented=augmented)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for item, part in zip(target.elts, parts(value, target.elts), strict=True):
            assign(it, item.value if isinstance(item, ast.Starred) else item, part)


def set_attribute(base: Value, name: str, value: Value) -> None:
    thing = base.ref
    old = thing.attributes.get(name)
    thing.attributes[name] = value if old is None or thing.filling else join(old, value)


def _store(it: Interpreter, name: str, value: Value) -> None:
    scope = it.scope
    if name in scope.globals:
        outermost = scope
        while outermost.outer is not None:
            outermost = outermost.outer
        old = outermost.names.get(name)
        outermost.names[name] = value if old is None else join(old, value)
    else:
        scope.names[name] = value


def parts(value: Value, targets: Sequence[ast.expr]) -> list[Value]:
    """The values that a tuple of targets gets."""
    count = len(targets)
    star = next((i for i, target in enumerate(targets) if isinstance(target, ast.Starred)), None)
    inside = value.elements if value.kind == SEQUENCE else None
    if isinstance(inside, list):
        if star is None and len(inside) == count:
            return inside
        if star is not None and len(inside) >= count - 1:
            after = count - star - 1
            middle = inside[star : len(inside) - after]
            return [*inside[:star], sequence(middle), *inside[len(inside) - after :]]
    if value.kind == SEQUENCE:
        one = element(value)
    elif value.kind == TENSOR:
        one = value.with_(scalar=False)
    else:
        one = ANY
    return [sequence(one) if isinstance(target, ast.Starred) else one for target in targets]


def _assign_item(it: Interpreter, target: ast.Subscript, value: Value, *, augmented: bool) -> None:
    base = evaluate(it, target.value)
    index = evaluate(it, target.slice)
    if base.kind == TENSOR:
        if base.on_gpu and not augmented and value.kind == TENSOR and value.on_gpu and expressions.is_mask(index):
            it.note("dynamic-shape", target, "masked assignment of a tensor", base)
        return
    if base.kind != SEQUENCE:
        return
    inside = base.elements
    if isinstance(inside, dict) and isinstance(index.const, (str, int)):
        inside[index.const] = join(inside[index.const], value) if index.const in inside else value
    elif isinstance(inside, list) and not inside:
        base.elements = value
    else:
        base.elements = join(element(base), value)


# branches


def _if(it: Interpreter, node: ast.If) -> str | None:
    test = conditions.truth(it, node.test)
    rare, reason = conditions.rarity(it, node, test)
    if test.const is False or test.const is None or (test.const == 0 and isinstance(test.const, int)):
        return run(it, node.orelse)
    if test.const is True and rare is None:
        return run(it, node.body)
    before = dict(it.scope.names)
    conditions.narrow(it, node.test, true=True)
    ended = _branch(it, node, node.body, rare == "rare", reason)
    after_body = it.scope.names
    it.scope.names = dict(before)
    conditions.narrow(it, node.test, true=False)
    ended_else = _branch(it, node, node.orelse, rare == "common", reason) if node.orelse else None
    if ended in END and ended_else in END:
        return ended if ended == ended_else else "return"
    if ended in END:
        if rare == "common" and ended in ("continue", "return"):
            return "rest is rare"
    elif ended_else in END:
        it.scope.names = after_body
    else:
        it.scope.names = join_names(after_body, it.scope.names)
    return None


def _branch(it: Interpreter, node: ast.If, body: Sequence[ast.stmt], rare: bool, reason: str) -> str | None:
    hard = rare or (bool(body) and _leaves(body))
    if not hard and reason != "data":
        return run(it, body)
    if hard and reason == "interval" and _optimizes(body):
        return run(it, body)  # gradient accumulation: that is the step
    kind = heat.GUARD if hard else heat.SOFT_GUARD
    ended = guarded(it, node, lambda: run(it, body), reason if hard else "data", kind)
    return ended if isinstance(ended, str) else None


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """A branch that ends the loop runs once."""
    last = body[-1]
    if isinstance(last, (ast.Raise, ast.Break)):
        return True
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return dotted(last.value.func) in ("sys.exit", "exit", "quit", "os._exit")
    return False


def _optimizes(body: Sequence[ast.stmt]) -> bool:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
                receiver = dotted(node.func.value) or ""
                if node.args or OPTIMIZER_NAME.search(receiver):
                    return True
    return False


def join_names(first: dict[str, Value], second: dict[str, Value]) -> dict[str, Value]:
    if len(second) > len(first):
        first, second = second, first
    result = dict(first)
    for name, value in second.items():
        other = result.get(name)
        if other is None:
            result[name] = value
        elif other is not value:
            result[name] = join(other, value)
    return result


def _match(it: Interpreter, node: ast.Match) -> None:
    evaluate(it, node.subject)
    before = dict(it.scope.names)
    joined = dict(before)
    for case in node.cases:
        it.scope.names = dict(before)
        if run(it, case.body) not in END:
            joined = join_names(joined, it.scope.names)
    it.scope.names = joined


def _assert(it: Interpreter, node: ast.Assert) -> None:
    conditions.truth(it, node.test)


def _try(it: Interpreter, node: ast.Try | ast.TryStar) -> str | None:
    before = dict(it.scope.names)
    ended = run(it, node.body)
    names = it.scope.names
    for handler in node.handlers:
        it.scope.names = join_names(before, names)
        if handler.name:
            it.scope.names[handler.name] = ANY
        left = guarded(it, handler, lambda body=handler.body: run(it, body), "exception")  # type: ignore[misc]
        if not (isinstance(left, str) and left in END):
            names = join_names(names, it.scope.names)
            ended = None
    it.scope.names = names
    if ended not in END and node.orelse:
        ended = run(it, node.orelse)
    run(it, node.finalbody)
    return ended


# context managers


def _with(it: Interpreter, node: ast.With | ast.AsyncWith) -> str | None:
    undo: list[Callable[[], None]] = []
    try:
        for item in node.items:
            value = evaluate(it, item.context_expr)
            _enter(it, item.context_expr, value, undo)
            if item.optional_vars is not None:
                assign(it, item.optional_vars, value)
        return run(it, node.body)
    finally:
        for step in reversed(undo):
            step()


def _enter(it: Interpreter, node: ast.expr, value: Value, undo: list[Callable[[], None]]) -> None:
    name = value.name or ""
    if name in ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.inference_mode"):
        it.no_grad += 1
        undo.append(lambda: setattr(it, "no_grad", it.no_grad - 1))
    elif value.kind == DEVICE:
        old = it.default_device
        it.default_device = value
        undo.append(lambda: setattr(it, "default_device", old))
    elif name.startswith(("torch.profiler.profile", "torch.autograd.profiler.profile", "torch.utils.benchmark")):
        it.frames.append(_guard(it, node, "timing"))
        undo.append(lambda: it.frames.remove(next(f for f in reversed(it.frames) if f.name == "timing")))


# the rest


def _return(it: Interpreter, node: ast.Return) -> str:
    it.scope.returns.append(evaluate(it, node.value) if node.value is not None else NONE)
    return "return"


def _expression(it: Interpreter, node: ast.Expr) -> None:
    if not isinstance(node.value, ast.Constant):
        evaluate(it, node.value)


def _global(it: Interpreter, node: ast.Global) -> None:
    it.scope.globals.update(node.names)


def _nonlocal(it: Interpreter, node: ast.Nonlocal) -> None:
    for name in node.names:
        if it.scope.outer is not None and name not in it.scope.names:
            it.scope.names[name] = it.scope.outer.find(name) or ANY


def _for(it: Interpreter, node: ast.For | ast.AsyncFor) -> str | None:
    return loops.for_loop(it, node)


def _while(it: Interpreter, node: ast.While) -> str | None:
    return loops.while_loop(it, node)


def _definition(it: Interpreter, node: ast.stmt) -> None:
    modules.definition(it, node)


def _leave(_it: Interpreter, node: ast.stmt) -> str:
    return type(node).__name__.lower()


_STEPS: dict[type[ast.stmt], Callable[[Interpreter, ast.stmt], str | None]] = {
    ast.Assign: _assign,  # type: ignore[dict-item]
    ast.AnnAssign: _annotated,  # type: ignore[dict-item]
    ast.AugAssign: _augmented,  # type: ignore[dict-item]
    ast.If: _if,  # type: ignore[dict-item]
    ast.For: _for,  # type: ignore[dict-item]
    ast.AsyncFor: _for,  # type: ignore[dict-item]
    ast.While: _while,  # type: ignore[dict-item]
    ast.Match: _match,  # type: ignore[dict-item]
    ast.Assert: _assert,  # type: ignore[dict-item]
    ast.Try: _try,  # type: ignore[dict-item]
    ast.TryStar: _try,  # type: ignore[dict-item]
    ast.With: _with,  # type: ignore[dict-item]
    ast.AsyncWith: _with,  # type: ignore[dict-item]
    ast.FunctionDef: _definition,
    ast.AsyncFunctionDef: _definition,
    ast.ClassDef: _definition,
    ast.Import: _definition,
    ast.ImportFrom: _definition,
    ast.Return: _return,  # type: ignore[dict-item]
    ast.Expr: _expression,  # type: ignore[dict-item]
    ast.Global: _global,  # type: ignore[dict-item]
    ast.Nonlocal: _nonlocal,  # type: ignore[dict-item]
    ast.Raise: _leave,
    ast.Break: _leave,
    ast.Continue: _leave,
}
