"""Calls: arguments, functions and classes of the project, instances and their attributes."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from gpudoctor.source import expressions, guess, packages, statements, tensors
from gpudoctor.source import frames as heat
from gpudoctor.source.evaluator import evaluate
from gpudoctor.source.frames import Call
from gpudoctor.source.interpreter import MAX_DEPTH, Interpreter, Scope
from gpudoctor.source.names import EVALUATION_NAME, TIMING_NAME, WARM_UP_NAME
from gpudoctor.source.project import FRAMEWORK_BASES, Class, Function, dotted, looks_like_module
from gpudoctor.source.values import (
    ANY,
    CLASS,
    DEVICE,
    FUNCTION,
    GPU,
    HOST,
    INSTANCE,
    MAYBE,
    METHOD,
    NAMED,
    NUMBER,
    OPTIMIZER,
    PROJECT,
    SEQUENCE,
    TENSOR,
    UNKNOWN,
    Thing,
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
            return _super_call(it, node, func.attr)
        base = evaluate(it, func.value)
        if base.kind not in (NAMED, PROJECT):
            given = arguments(it, node)
            return method(it, base, func.attr, given, node, before)
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
        return instantiate(it, target, given, node)
    if kind == NAMED:
        return packages.call(it, target.name or "", given, node, before)
    if kind == INSTANCE:
        return call_instance(it, target, given, node)
    if kind == METHOD:
        return method(it, target.ref, target.name or "", given, node, before)
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


# classes and instances


def instantiate(it: Interpreter, target: Value, given: Arguments, node: ast.AST) -> Value:
    cls, scope = target.ref
    key = (f"{it.module.source.path}:{cls.name}", getattr(node, "lineno", 0) * 1000 + getattr(node, "col_offset", 0))
    known = it.things.get(key)
    if known is not None:
        value = Value(INSTANCE)
        value.ref = known
        return value
    value = new_instance(it, cls, scope, it.site(node))
    it.things[key] = value.ref
    if value.ref.is_module:  # many are made, few are looked into
        value.ref.late = (given, node, it.module, it.scope)
    else:
        initialise(it, value, given, node)
    return value


def fill(it: Interpreter, value: Value) -> None:
    """Run the __init__ of a module that was put off; no step is made there."""
    given, node, module, scope = value.ref.late
    value.ref.late = None
    saved = (it.module, it.scope, it.frames, it.function, it.statement)
    it.module, it.scope, it.frames = module, scope, []
    try:
        initialise(it, value, given, node)
    finally:
        it.module, it.scope, it.frames, it.function, it.statement = saved


def new_instance(it: Interpreter, cls: Class, scope: Scope | None, site: str) -> Value:
    thing = Thing((cls, scope), cls.name, is_module=is_module(it, cls, scope), site=site)
    value = Value(INSTANCE)
    value.ref = thing
    return value


def initialise(it: Interpreter, value: Value, given: Arguments, node: ast.AST) -> None:
    thing = value.ref
    cls, scope = thing.cls
    first = given.values[0] if given.values else next(iter(given.named.values()), None)
    if inherits(it, cls, scope, "Optimizer") and first is not None:
        parameters = element(first) if first.kind == SEQUENCE else ANY
        group = sequence(
            {"params": sequence(parameters, tag="parameters"), "lr": NUMBER, "momentum": NUMBER, "weight_decay": NUMBER}
        )
        thing.attributes["param_groups"] = sequence([group])
    init = find_method(it, cls, scope, "__init__")
    if init is not None:
        function, where = init
        bound = Value(FUNCTION, name="__init__")
        bound.ref = (function, where, value)
        call_function(it, bound, given, node)
    else:
        _fields(value, cls, given)
    thing.filling = False


def _fields(value: Value, cls: Class, given: Arguments) -> None:
    """A dataclass or NamedTuple gets its arguments as attributes."""
    names = [n.target.id for n in cls.node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    for index, name in enumerate(names):
        found = given.get(index, name)
        if found is not None:
            value.ref.attributes[name] = found


def _bases(it: Interpreter, cls: Class, scope: Scope | None) -> list[tuple[Class, Scope]]:
    """The classes of the project that a class is derived from directly."""
    found = []
    for base in cls.node.bases:
        if scope is None or not isinstance(base, (ast.Name, ast.Attribute)):
            continue
        if (base.id if isinstance(base, ast.Name) else base.attr) in FRAMEWORK_BASES:
            continue
        saved = it.module, it.scope
        it.module, it.scope = cls.module, scope
        value = evaluate(it, base)
        it.module, it.scope = saved
        if value.kind == CLASS:
            found.append(value.ref)
    return found


def find_method(
    it: Interpreter, cls: Class, scope: Scope | None, name: str, depth: int = 0
) -> tuple[Function, Scope | None] | None:
    if name in cls.methods:
        return cls.methods[name], scope
    if depth < 6:
        for base, where in _bases(it, cls, scope):
            if base is not cls:
                found = find_method(it, base, where, name, depth + 1)
                if found is not None:
                    return found
    return None


def inherits(it: Interpreter, cls: Class, scope: Scope | None, *names: str, depth: int = 0) -> bool:
    if cls.inherits(*names):
        return True
    return depth < 6 and any(
        base is not cls and inherits(it, base, where, *names, depth=depth + 1) for base, where in _bases(it, cls, scope)
    )


def is_module(it: Interpreter, cls: Class, scope: Scope | None, depth: int = 0) -> bool:
    if looks_like_module(cls):
        return True
    return depth < 6 and any(
        base is not cls and is_module(it, base, where, depth + 1) for base, where in _bases(it, cls, scope)
    )


def _super_call(it: Interpreter, node: ast.Call, name: str) -> Value:
    given = arguments(it, node)
    this = it.scope.this or it.scope.find("self")
    function = it.scope.function
    if this is None or this.kind != INSTANCE or this.ref.cls is None or function is None or function.cls is None:
        return ANY
    _, scope = this.ref.cls
    for base, where in _bases(it, function.cls, scope):
        found = find_method(it, base, where, name)
        if found is not None:
            return _bound_call(it, this, found, given, node)
    if name in ("to", "cuda", "cpu"):
        return method(it, this, name, given, node, len(it.candidates), own=False)
    if name in ("compute_loss", "training_step"):
        return tensor(GPU, it.why(node, "the loss of the Trainer"))
    return ANY


def _bound_call(
    it: Interpreter, this: Value, found: tuple[Function, Scope | None], given: Arguments, node: ast.AST
) -> Value:
    function, where = found
    bound = Value(FUNCTION, name=function.name)
    bound.ref = (function, where, this)
    for decorator in getattr(function.node, "decorator_list", ()):
        name = (dotted(decorator.func if isinstance(decorator, ast.Call) else decorator) or "").rpartition(".")[2]
        if name in ("no_grad", "inference_mode"):
            bound.tag = "no-grad"
        elif name in ("lru_cache", "cache", "cached_property"):
            bound.tag = "cached"
    return call_function(it, bound, given, node)


def call_instance(it: Interpreter, target: Value, given: Arguments, node: ast.Call) -> Value:
    """model(x): walk forward() of a class of the project; of another model only where the result lives is known."""
    thing = target.ref
    if thing.cls is not None:
        cls, scope = thing.cls
        for name in ("__call__", "forward"):
            found = find_method(it, cls, scope, name)
            if found is not None:
                if thing.is_module and (
                    thing.device in (GPU, MAYBE) or any(v.kind == TENSOR and v.on_gpu for v in given.flat())
                ):
                    it.work(models=1)
                result = _bound_call(it, target, found, given, node)
                if result.kind == UNKNOWN and thing.is_module:
                    return _module_output(it, target, given)
                return result
    if thing.is_module:
        return _module_output(it, target, given)
    return packages.call_object(it, target, given, node)


def _module_output(it: Interpreter, target: Value, given: Arguments) -> Value:
    thing = target.ref
    device, why = thing.device, thing.why
    for value in given.flat():
        if value.kind == TENSOR and value.on_gpu and device != GPU:
            device, why = value.device, value.why
    if device in (GPU, MAYBE):
        it.work(models=1)
    result = tensor(device, why)
    result.scalar = thing.name.rpartition(".")[2].endswith("Loss")
    return result


def instance_attribute(it: Interpreter, base: Value, name: str, node: ast.expr) -> Value:
    thing = base.ref
    if thing.late is not None:
        fill(it, base)
    value: Value | None = thing.attributes.get(name)
    if value is not None:
        if value.kind == TENSOR and value.tag == "follows" and thing.device is not None:
            return value.with_(device=thing.device, why=thing.why)
        if value.kind == INSTANCE and value.ref.is_module and thing.is_module and thing.device in (GPU, MAYBE):
            value.ref.move(thing.device, thing.why)
        return statements.resolve(it, value)
    if thing.cls is not None:
        cls, scope = thing.cls
        found = find_method(it, cls, scope, name)
        if found is not None:
            function = found[0]
            if any((dotted(d) or "").endswith("property") for d in getattr(function.node, "decorator_list", ())):
                return _bound_call(it, base, found, Arguments([], {}, []), node)
            bound = Value(METHOD, name=name)
            bound.ref = base
            return bound
        inherited = class_attribute_of(it, cls, scope, name)
        if inherited is not None:
            return inherited
    if name == "device":
        place = thing.device if thing.device in (GPU, MAYBE) else MAYBE
        return Value(DEVICE, device=place, why=thing.why or it.why(node))
    if name == "module" and thing.is_module:
        return base
    if name == "training":
        return NUMBER
    if name in guess.INSTANCE_ATTRIBUTES:
        return guess.instance_attribute(it, base, name, node)
    return ANY


def class_attribute(it: Interpreter, base: Value, name: str) -> Value:
    cls, scope = base.ref
    found = find_method(it, cls, scope, name)
    if found is not None:
        value = Value(FUNCTION, name=name)
        value.ref = (found[0], found[1], base if _is_class_method(found[0]) else None)
        return value
    return class_attribute_of(it, cls, scope, name) or ANY


def _is_class_method(function: Function) -> bool:
    return any(dotted(decorator) == "classmethod" for decorator in getattr(function.node, "decorator_list", ()))


def class_attribute_of(it: Interpreter, cls: Class, scope: Scope | None, name: str, depth: int = 0) -> Value | None:
    for statement in cls.node.body:
        targets: Sequence[ast.expr] = ()
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name and scope is not None:
                saved = it.module, it.scope
                it.module, it.scope = cls.module, scope
                value = evaluate(it, statement.value)  # type: ignore[attr-defined]
                it.module, it.scope = saved
                return value
    if depth < 6:
        for base, where in _bases(it, cls, scope):
            if base is not cls and (found := class_attribute_of(it, base, where, name, depth + 1)) is not None:
                return found
    return None


def instance_item(it: Interpreter, base: Value, index: Value, node: ast.Subscript) -> Value:
    thing = base.ref
    if thing.cls is not None:
        cls, scope = thing.cls
        found = find_method(it, cls, scope, "__getitem__")
        if found is not None:
            return _bound_call(it, base, found, Arguments([index], {}, [node.slice]), node)
    if thing.is_module:  # nn.Sequential, nn.ModuleList, nn.ModuleDict
        inner = Value(INSTANCE)
        inner.ref = Thing(None, "torch.nn.Module", is_module=True)
        inner.ref.device, inner.ref.why = thing.device, thing.why
        return inner
    return ANY


def method(
    it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call, before: int, *, own: bool = True
) -> Value:
    """base.name(...)"""
    if name == "backward":
        it.step_event("backward")
        return host(None)
    if base.kind == INSTANCE and own and base.ref.cls is not None:
        cls, scope = base.ref.cls
        found = find_method(it, cls, scope, name)
        if found is not None:
            if name == "step" and inherits(it, cls, scope, "Optimizer"):
                it.step_event("step")
            return _bound_call(it, base, found, given, node)
        value = instance_attribute(it, base, name, node.func)
        if value.kind in (INSTANCE, FUNCTION, CLASS, NAMED) or (value.kind == METHOD and value.ref is not base):
            return call(it, value, given, node, before)
    if name == "step" and _steps(base, given, node):
        it.step_event("step")
        for value in given.all():
            if value.kind == FUNCTION:
                call_function(it, value, Arguments([], {}, []), node)
        return host(None)
    if base.kind == INSTANCE and name in base.ref.attributes:
        return call(it, base.ref.attributes[name], given, node, before)
    if base.kind == TENSOR:
        return tensors.method(it, base, name, given, node)
    return packages.method(it, base, name, given, node, before)


def _steps(base: Value, given: Arguments, node: ast.Call) -> bool:
    """Whether .step() is that of an optimizer: by what it is, or by its name."""
    if base.kind == OPTIMIZER:
        return True
    if any(value.kind == OPTIMIZER for value in given.values):
        return True  # scaler.step(optimizer)
    if base.kind in (HOST, TENSOR, SEQUENCE):
        return False
    return guess.looks_like_optimizer(node.func, given)
