"""Walks one file: its own code first, as Python would run it, then the functions that nothing was seen to call."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from gpudoctor.source import calls, guess, lexical, statements, workers
from gpudoctor.source import frames as heat
from gpudoctor.source.conclude import conclude
from gpudoctor.source.interpreter import Interpreter, Scope
from gpudoctor.source.names import (
    EVALUATION_NAME,
    LIGHTNING_BASES,
    LIGHTNING_CALLBACK_HOOKS,
    LIGHTNING_HOOKS,
    TIMING_NAME,
    TRAINER_BASES,
    TRAINER_CALLBACK_HOOKS,
    TRAINER_HOOKS,
    WARM_UP_NAME,
)
from gpudoctor.source.project import Function, Module, Project
from gpudoctor.source.values import ANY, CLASS, FUNCTION, GPU, NUMBER, Value, Why, tensor
from gpudoctor.model import SourceLoader, SourceSite

_RELEVANT = re.compile(r"\b(?:torch|lightning|accelerate|transformers|pytorch_lightning|vllm)\b")
_LOOP = re.compile(r"(?m)^\s*(?:async\s+)?(?:for|while)\b|\bfor\b.*\bin\b")
_DEVICE = re.compile(r"\bcuda\b|\.to\(|\bdevice\b|[Aa]ccelerator|[Ff]abric|[Ll]ightning|Trainer")
_ON_CPU = re.compile(
    r"accelerator\s*=\s*['\"]cpu['\"]|\bno_cuda\s*=\s*True|\buse_cpu\s*=\s*True|Accelerator\([^)]*\bcpu\s*=\s*True"
)
_ON_GPU = re.compile(r"accelerator\s*=\s*['\"](?:gpu|cuda|auto)['\"]|\bgpus\s*=\s*(?:[1-9]|-1|\[)")


@dataclass(slots=True)
class Walked:
    """What one file gave. Sites by whether they rest on a function that nobody was seen to call: (path, function)."""

    sites: list[tuple[tuple[str, str] | None, SourceSite]] = field(default_factory=list)
    loaders: list[tuple[tuple[str, str] | None, SourceLoader]] = field(default_factory=list)
    hot_loops: list[str] = field(default_factory=list)
    reached: set[tuple[str, str]] = field(default_factory=set)  # in other files, with known arguments
    on_cpu: bool = False  # says that a framework runs on the CPU
    on_gpu: bool = False


def walk(project: Project, module: Module) -> Walked:
    """Facts of one file. Raises only for what is a bug here or nested too deeply (RecursionError)."""
    result = Walked()
    text = module.source.text
    if not _RELEVANT.search(text):
        return result
    result.on_cpu, result.on_gpu = bool(_ON_CPU.search(text)), bool(_ON_GPU.search(text))
    it = Interpreter(project, module)
    statements.module_scope(it, module)
    if _DEVICE.search(text):
        _alone(it, module)
    workers.check_loaders(it)
    lexical.scan(it, module)
    conclude(it, result)
    path = module.source.path
    result.reached = {key for key in it.reached_elsewhere if key[0] != path}
    return result


def _alone(it: Interpreter, module: Module) -> None:
    """Functions that nobody was seen to call, outermost first: what they call is then known better than alone."""
    path = module.source.path
    waiting = [f for f in list(module.functions) if (path, f.name) not in it.reached and _may_be_hot(module, f)]
    called = set(re.findall(r"(?:\.|\b)(\w+)\(", _without_definitions(module.source.text))) if waiting else set()
    waiting.sort(key=lambda f: (f.name.rpartition(".")[2] in called, f.node.lineno))
    for function in waiting:
        if (path, function.name) not in it.reached and "<locals>" not in function.name:
            _walk_alone(it, module, function)


def _without_definitions(text: str) -> str:
    return re.sub(r"(?m)^\s*(?:async\s+)?(?:def|class)\s+\w+", "", text)


def _may_be_hot(module: Module, function: Function) -> bool:
    node = function.node
    if isinstance(node, ast.Lambda):
        return False
    name = node.name
    if name in _HOOKS and function.cls is not None:
        return True
    if EVALUATION_NAME.search(name) and "train" not in name:
        return False
    if TIMING_NAME.search(name) or WARM_UP_NAME.search(name):
        return False
    text = "\n".join(module.lines[node.lineno - 1 : node.end_lineno])
    if ".backward(" in text and ".step(" in text:
        return True
    return _LOOP.search(text) is not None


_HOOKS = LIGHTNING_HOOKS | LIGHTNING_CALLBACK_HOOKS | TRAINER_HOOKS | TRAINER_CALLBACK_HOOKS


def _hook(it: Interpreter, function: Function, scope: Scope) -> str | None:
    """Which framework calls a method in each step."""
    cls = function.cls
    name = function.name.rpartition(".")[2]
    if cls is None or name not in _HOOKS:
        return None
    lightning = calls.inherits(it, cls, scope, *LIGHTNING_BASES) or any("Lightning" in base for base in cls.bases)
    duck = "training_step" in cls.methods and "configure_optimizers" in cls.methods
    if name in LIGHTNING_HOOKS and (lightning or duck):
        return "Lightning"
    if calls.inherits(it, cls, scope, "Callback") and name in LIGHTNING_CALLBACK_HOOKS:
        return "Lightning"
    trainer = calls.inherits(it, cls, scope, *TRAINER_BASES) or any(base.endswith("Trainer") for base in cls.bases)
    if name in TRAINER_HOOKS and trainer:
        return "the Trainer"
    if name in TRAINER_CALLBACK_HOOKS and calls.inherits(it, cls, scope, "TrainerCallback"):
        return "the Trainer"
    return None


def _walk_alone(it: Interpreter, module: Module, function: Function) -> None:
    scope = it.scopes[module.source.path]
    saved = it.module, it.scope
    it.module, it.scope = module, scope
    it.standalone = (module.source.path, function.name)
    try:
        framework = _hook(it, function, scope)
        this = _instance(it, function, scope, framework)
        given = _parameters(it, function, framework, this)
        value = Value(FUNCTION, name=function.name)
        value.ref = (function, scope, this)
        decorated = calls.decorated(it, function.node, Value(FUNCTION)) if _marks(function) else value  # type: ignore[arg-type]
        value.tag = decorated.tag
        kind = heat.HOOK if framework else heat.ONE_STEP
        text = (
            f"{framework} calls {function.name}() for each batch"
            if framework
            else f"{function.name}() is one training step"
        )
        with it.frame(kind, function.node, text):
            calls.call_function(it, value, given, function.node)
    finally:
        it.module, it.scope = saved
        it.standalone = None


def _marks(function: Function) -> bool:
    names = [
        calls.dotted(d.func if isinstance(d, ast.Call) else d) or ""
        for d in getattr(function.node, "decorator_list", ())
    ]
    return any(name.rpartition(".")[2] in ("no_grad", "inference_mode", "lru_cache", "cache") for name in names)


def _instance(it: Interpreter, function: Function, scope: Scope, framework: str | None) -> Value | None:
    """An object of the class of a method, made with unknown arguments."""
    if function.cls is None:
        return None
    key = (f"{function.module.source.path}:{function.cls.name}", 0)
    thing = it.things.get(key)
    value = Value("instance")
    if thing is None:
        # an object that the code was seen to make knows more than one made here
        made = [
            t
            for (name, _), t in it.things.items()
            if name.endswith(f":{function.cls.name}") and t.cls[0] is function.cls
        ]
        if made:
            value.ref = made[0]
            return value
        class_value = Value(CLASS, name=function.cls.name)
        class_value.ref = (function.cls, scope)
        value = calls.new_instance(it, function.cls, scope, function.cls.name)
        it.things[key] = value.ref
        init = calls.find_method(it, function.cls, scope, "__init__")
        given = calls.Arguments([], {}, [])
        if init is not None:
            given = _hints(it, init[0], skip_first=True)
        calls.initialise(it, value, given, function.node)
    else:
        value.ref = thing
    if framework is not None and value.ref.is_module and value.ref.device is None:
        value.ref.move(GPU, Why(f"{framework} moves the module to the GPU", it.site(function.cls.node)))
    return value


def _hints(it: Interpreter, function: Function, *, skip_first: bool) -> calls.Arguments:
    spec = function.node.args
    names = [*spec.posonlyargs, *spec.args]
    values = [guess.parameter(it, argument) for argument in (names[1:] if skip_first else names)]
    named = {argument.arg: guess.parameter(it, argument) for argument in spec.kwonlyargs}
    return calls.Arguments(values, named, [])


def _parameters(it: Interpreter, function: Function, framework: str | None, this: Value | None) -> calls.Arguments:
    static = calls.is_static(function)
    given = _hints(it, function, skip_first=this is not None and not static)
    if framework is None:
        return given
    spec = function.node.args
    names = [argument.arg for argument in [*spec.posonlyargs, *spec.args]][1:]
    why = Why(f"{framework} moves the batch to the GPU before it calls {function.name}()", it.site(function.node))
    for index, name in enumerate(names):
        if name in ("batch", "inputs", "outputs", "output", "loss", "out"):
            given.values[index] = tensor(GPU, why)
        elif name in (
            "batch_idx",
            "batch_id",
            "idx",
            "dataloader_idx",
            "optimizer_idx",
            "return_outputs",
            "num_items_in_batch",
        ):
            given.values[index] = NUMBER
        elif name in ("model", "pl_module", "module"):
            given.values[index] = guess.model(
                GPU, Why(f"{framework} moves the model to the GPU", it.site(function.node))
            )
        elif function.name.endswith("training_step") and index == 0:
            given.values[index] = tensor(GPU, why)
        elif given.values[index] is ANY and name in ("x", "y", "images", "labels"):
            given.values[index] = tensor(GPU, why)
    return given
