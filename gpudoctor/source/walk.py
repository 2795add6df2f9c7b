"""Walks one file: its own code first, as Python would run it, then the functions that nothing was seen to call."""

from __future__ import annotations

import ast
import bisect
import re
from dataclasses import dataclass, field

from gpudoctor.model import SourceLoader, SourceSite
from gpudoctor.source import calls, classes, guess, lexical, modules, workers
from gpudoctor.source import frames as heat
from gpudoctor.source.conclude import conclude
from gpudoctor.source.interpreter import ALONE_CALLS, LIBRARY_MODULES, Interpreter, Scope
from gpudoctor.source.names import (
    EVALUATION_NAME,
    LIGHTNING_BASES,
    LIGHTNING_CALLBACK_HOOKS,
    LIGHTNING_HOOKS,
    SETTINGS,
    TIMING_NAME,
    TRAINER_BASES,
    TRAINER_CALLBACK_HOOKS,
    TRAINER_HOOKS,
    WARM_UP_NAME,
)
from gpudoctor.source.project import Function, Module, Project, dotted
from gpudoctor.source.values import ANY, CLASS, FUNCTION, GPU, NUMBER, Value, Why, tensor

_INIT_CALLS = 60  # calls that are followed to learn the attributes of an object that nobody was seen to make
# Plain substrings are looked for first: they cost next to nothing in a long text.
_RELEVANT = ("torch", "lightning", "accelerate", "transformers", "vllm")
_EVIDENCE = ("cuda", "ccelerator", "abric.", "eepspeed", "set_default_device")
_HOOKED = ("Trainer", "ightning", "training_step")  # a framework moves the data
# x.to(device) and device=self.device name a place; device=x.device only follows another tensor.
_OWNERS = "|".join(sorted(SETTINGS | {"self", "accelerator", "model", "ctx"}))
_OWNER = rf"(?:(?:{_OWNERS})\.)*"
_MOVED = re.compile(
    rf"\.to\(\s*(?:device\s*=\s*)?{_OWNER}_?(?:device|dev|local_rank|rank|gpu|gpu_id|DEVICE)\b|"
    rf"\bdevice\s*=\s*{_OWNER}_?(?:device|dev|DEVICE)\b(?!\.)"
)
_LOOP = re.compile(r"(?m)^[ \t]*(?:async[ \t]+)?(?:for|while)\b")
# At the top of a module that only defines things, these are looked at all the same.
_TOP = re.compile(r"DataParallel|FullySharded|FSDP|DataLoader|optim\.|Trainer\(|cuda|\.to\(|Accelerator|device")
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
    if not any(word in text for word in _RELEVANT):
        return result
    if "cpu" in text:
        result.on_cpu = _ON_CPU.search(text) is not None
    if "accelerator" in text or "gpus" in text:
        result.on_gpu = _ON_GPU.search(text) is not None
    it = Interpreter(project, module)
    try:
        _walk(it, module, result)
    finally:
        it.close()
    return result


def _walk(it: Interpreter, module: Module, result: Walked) -> None:
    text = module.source.text
    if _is_script(it.project, module):
        modules.module_scope(it, module)
    else:
        it.most_modules = LIBRARY_MODULES
        modules.define_only(it, module, lambda node: _TOP.search(module.text_of(node)) is not None)
    if _has_evidence(text) or any(word in text for word in _HOOKED):
        _alone(it, module)
    workers.check_loaders(it)
    lexical.scan(it, module)
    conclude(it, result)
    path = module.source.path
    result.reached = {key for key in it.reached_elsewhere if key[0] != path}


def _alone(it: Interpreter, module: Module) -> None:
    """Functions that nobody was seen to call, outermost first: what they call is then known better than alone."""
    path = module.source.path
    waiting = [f for f in list(module.functions) if (path, f.name) not in it.reached and _may_be_hot(module, f)]
    text = module.source.text
    waiting.sort(key=lambda f: (text.count(f"{f.name.rpartition('.')[2]}(") > 1, f.node.lineno))
    for function in waiting:
        if (path, function.name) not in it.reached and "<locals>" not in function.name:
            _walk_alone(it, module, function)


def _has_evidence(text: str) -> bool:
    """Something that puts values on a GPU: without it no line of a text can count."""
    return any(word in text for word in _EVIDENCE) or ("device" in text and _MOVED.search(text) is not None)


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
    text = _text(module, node)
    if ".backward(" in text and ".step(" in text:
        return True
    if not module.loops:
        module.loops = _loop_lines(module.source.text)
    first = bisect.bisect_left(module.loops, node.lineno)
    if first == len(module.loops) or module.loops[first] > (node.end_lineno or node.lineno):
        return False
    if ".backward(" in text or _has_evidence(text):
        return True
    return function.cls is not None and _class_has_evidence(module, function.cls.node)


def _loop_lines(text: str) -> list[int]:
    """The lines on which loops begin; a line of a docstring that begins with "for" costs little."""
    found, line, position = [], 1, 0
    for match in _LOOP.finditer(text):
        line += text.count("\n", position, match.start())
        position = match.start()
        found.append(line)
    return found or [0]


def _text(module: Module, node: ast.stmt) -> str:
    return "\n".join(module.lines[node.lineno - 1 : node.end_lineno])


def _class_has_evidence(module: Module, node: ast.ClassDef) -> bool:
    known = module.evidence.get(node.lineno)
    if known is None:
        known = module.evidence[node.lineno] = _has_evidence(_text(module, node))
    return known


def _is_script(project: Project, module: Module) -> bool:
    """Whether the module does something when it runs, besides defining things. Calls at the top of a module of a
    package register what it defines."""
    in_package = project.in_package(module)
    for node in module.tree.body:
        if not in_package and isinstance(node, (ast.For, ast.While, ast.With, ast.AsyncFor, ast.AugAssign)):
            return True
        if not in_package and isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return True
        if isinstance(node, ast.If) and "__main__" in module.text_of(node.test):
            return True
    return False


_HOOKS = LIGHTNING_HOOKS | LIGHTNING_CALLBACK_HOOKS | TRAINER_HOOKS | TRAINER_CALLBACK_HOOKS


def _hook(it: Interpreter, function: Function, scope: Scope) -> str | None:
    """Which framework calls a method in each step."""
    cls = function.cls
    name = function.name.rpartition(".")[2]
    if cls is None or name not in _HOOKS:
        return None
    lightning = classes.inherits(it, cls, scope, *LIGHTNING_BASES) or any("Lightning" in base for base in cls.bases)
    duck = "training_step" in cls.methods and "configure_optimizers" in cls.methods
    if name in LIGHTNING_HOOKS and (lightning or duck):
        return "Lightning"
    if classes.inherits(it, cls, scope, "Callback") and name in LIGHTNING_CALLBACK_HOOKS:
        return "Lightning"
    trainer = classes.inherits(it, cls, scope, *TRAINER_BASES) or any(base.endswith("Trainer") for base in cls.bases)
    if name in TRAINER_HOOKS and trainer:
        return "the Trainer"
    if name in TRAINER_CALLBACK_HOOKS and classes.inherits(it, cls, scope, "TrainerCallback"):
        return "the Trainer"
    return None


def _walk_alone(it: Interpreter, module: Module, function: Function) -> None:
    scope = it.scopes[module.source.path]
    saved = it.module, it.scope
    it.module, it.scope = module, scope
    it.standalone = (module.source.path, function.name)
    it.most = it.count + ALONE_CALLS
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
        dotted(d.func if isinstance(d, ast.Call) else d) or "" for d in getattr(function.node, "decorator_list", ())
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
        value = classes.new_instance(it, function.cls, scope, function.cls.name)
        it.things[key] = value.ref
        init = classes.find_method(it, function.cls, scope, "__init__")
        given = calls.Arguments([], {}, [])
        if init is not None:
            given = _hints(it, init[0], skip_first=True)
        it.most = it.count + _INIT_CALLS
        classes.initialise(it, value, given, function.node)
        it.most = it.count + ALONE_CALLS
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
        elif (function.name.endswith("training_step") and index == 0) or (
            given.values[index] is ANY and name in ("x", "y", "images", "labels")
        ):
            given.values[index] = tensor(GPU, why)
    return given
