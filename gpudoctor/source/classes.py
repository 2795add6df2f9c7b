"""Classes of the project, their instances and attributes; what a call of base.name(...) means."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpudoctor.source import calls, guess, methods, modules, tensors
from gpudoctor.source.evaluator import evaluate
from gpudoctor.source.interpreter import Interpreter, Scope
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
    SEQUENCE,
    TENSOR,
    UNKNOWN,
    Thing,
    Value,
    element,
    host,
    sequence,
    tensor,
)

if TYPE_CHECKING:
    from gpudoctor.source.calls import Arguments


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
        calls.call_function(it, bound, given, node)
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


def super_call(it: Interpreter, node: ast.Call, name: str) -> Value:
    given = calls.arguments(it, node)
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
    return calls.call_function(it, bound, given, node)


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
    return methods.call_object(it, target, given, node)


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
        return modules.resolve(it, value)
    if thing.cls is not None:
        cls, scope = thing.cls
        found = find_method(it, cls, scope, name)
        if found is not None:
            function = found[0]
            if any((dotted(d) or "").endswith("property") for d in getattr(function.node, "decorator_list", ())):
                return _bound_call(it, base, found, calls.Arguments([], {}, []), node)
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
            return _bound_call(it, base, found, calls.Arguments([index], {}, [node.slice]), node)
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
            return calls.call(it, value, given, node, before)
    if name == "step" and _steps(base, given, node):
        it.step_event("step")
        for value in given.all():
            if value.kind == FUNCTION:
                calls.call_function(it, value, calls.Arguments([], {}, []), node)
        return host(None)
    if base.kind == INSTANCE and name in base.ref.attributes:
        return calls.call(it, base.ref.attributes[name], given, node, before)
    if base.kind == TENSOR:
        return tensors.method(it, base, name, given, node)
    return methods.method(it, base, name, given, node, before)


def _steps(base: Value, given: Arguments, node: ast.Call) -> bool:
    """Whether .step() is that of an optimizer: by what it is, or by its name."""
    if base.kind == OPTIMIZER:
        return True
    if any(value.kind == OPTIMIZER for value in given.values):
        return True  # scaler.step(optimizer)
    if base.kind in (HOST, TENSOR, SEQUENCE):
        return False
    return guess.looks_like_optimizer(node.func, given)
