"""What names, annotations and frameworks tell where nothing else does: unknown parameters, unknown calls."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import (
    DEVICE_NAME,
    LOADER_NAME,
    LOSS_NAME,
    MODEL_NAME,
    NOT_OPTIMIZER,
    OPTIMIZER_NAME,
)
from gpudoctor.source.project import dotted
from gpudoctor.source.values import (
    ANY,
    DEVICE,
    GPU,
    INSTANCE,
    LOADER,
    MAYBE,
    NUMBER,
    OBJECT,
    OPTIMIZER,
    SEQUENCE,
    TENSOR,
    Thing,
    Value,
    Why,
    host,
    tensor,
)

if TYPE_CHECKING:
    from gpudoctor.source.calls import Arguments

INSTANCE_ATTRIBUTES = frozenset(
    ["model", "model_wrapped", "optimizer", "accelerator", "args", "lr_scheduler", "device", "trainer"]
)
_HOST_ANNOTATIONS = frozenset(
    ["int", "float", "str", "bool", "Path", "dict", "Dict", "argparse.Namespace", "Namespace"]
)
_NO_RESULTS = (
    "is_", "has_", "get_", "set_", "build_", "make_", "create_", "load_", "save_", "check_", "count_", "num_",
)  # fmt: skip
_NOT_A_MODEL = (
    "name",
    "path",
    "dir",
    "id",
    "config",
    "cfg",
    "args",
    "kwargs",
    "type",
    "inputs",
    "output",
    "outputs",
    "size",
)


def parameter(it: Interpreter, argument: ast.arg) -> Value:
    """A parameter of a function that nobody is seen to call."""
    annotation = dotted(argument.annotation) if argument.annotation is not None else None
    if annotation is not None:
        last = annotation.rpartition(".")[2]
        if annotation in _HOST_ANNOTATIONS:
            return host()
        if last == "Tensor":
            return tensor(None)
        if last == "device":
            return Value(DEVICE, device=MAYBE, why=it.why(argument, f"parameter {argument.arg}"))
        if last == "DataLoader":
            return unknown_loader()
        if last in ("Module", "DistributedDataParallel", "DDP"):
            return model()
        if last == "Optimizer":
            return Value(OPTIMIZER)
        if last == "Accelerator":
            return Value(OBJECT, name="accelerate.Accelerator")
        if last == "Fabric":
            return Value(OBJECT, name="lightning.Fabric")
    name = argument.arg
    if LOADER_NAME.search(name):
        return unknown_loader()
    if name in ("device", "dev") or (DEVICE_NAME.search(name) and "rank" not in name):
        return Value(DEVICE, device=MAYBE, why=it.why(argument, f"parameter {name}"))
    if name == "accelerator":
        return Value(OBJECT, name="accelerate.Accelerator")
    if name == "fabric":
        return Value(OBJECT, name="lightning.Fabric")
    if OPTIMIZER_NAME.search(name) and not NOT_OPTIMIZER.search(name):
        return Value(OPTIMIZER)
    if MODEL_NAME.search(name) and not name.endswith(_NOT_A_MODEL):
        return model()
    return ANY


def model(device: object = None, why: Why | None = None, name: str = "") -> Value:
    """A model of which only that it is one is known."""
    value = Value(INSTANCE)
    value.ref = Thing(None, name or "torch.nn.Module", is_module=True)
    if device in (GPU, MAYBE):
        value.ref.move(device, why)
    return value


def unknown_loader() -> Value:
    return Value(LOADER)


def unknown_call(it: Interpreter, given: Arguments, node: ast.Call) -> Value:
    """The result of something that is not known: of a loss or a model by its name, where tensors on a GPU go in."""
    gpu = next((v for v in given.flat() if v.kind == TENSOR and v.on_gpu), None)
    if any(v.kind == SEQUENCE and v.tag == "parameters" for v in given.all()):
        parameters = next(v for v in given.all() if v.kind == SEQUENCE and v.tag == "parameters")
        optimizer = Value(OPTIMIZER)
        optimizer.ref = None
        del parameters
        return optimizer
    name = (dotted(node.func) or "").rpartition(".")[2]
    if name.startswith(_NO_RESULTS):
        return ANY
    if gpu is not None and (LOSS_NAME.search(name) or (MODEL_NAME.search(name) and not name.endswith(_NOT_A_MODEL))):
        it.work(models=1)
        result = tensor(gpu.device, gpu.why)
        result.scalar = LOSS_NAME.search(name)
        return result
    return ANY


def looks_like_optimizer(func: ast.expr, given: Arguments) -> bool:
    """Whether x.step() steps an optimizer, by the name of x or of what is passed (scaler.step(optimizer))."""
    if not isinstance(func, ast.Attribute):
        return False
    name = dotted(func.value) or ""
    if isinstance(func.value, ast.Call):
        name = dotted(func.value.func) or ""
    if isinstance(func.value, ast.Subscript):
        name = dotted(func.value.value) or ""
    if NOT_OPTIMIZER.search(name):
        return False
    if OPTIMIZER_NAME.search(name):
        return True
    last = name.rpartition(".")[2]
    if last.endswith("scaler"):
        return any(OPTIMIZER_NAME.search(dotted(part) or "") for part in given.nodes)
    return last in ("engine", "model_engine") and not given.values


def instance_attribute(it: Interpreter, base: Value, name: str, node: ast.expr) -> Value:
    """Attributes that a framework puts on an instance of a class of the project."""
    from gpudoctor.source import classes
    from gpudoctor.source.names import TRAINER_BASES

    thing = base.ref
    if thing.cls is None or not classes.inherits(it, *thing.cls, *TRAINER_BASES):
        return ANY
    if name in ("model", "model_wrapped"):
        return model(GPU, it.why(node, "the Trainer moves its model to the GPU"))
    if name == "optimizer":
        return Value(OPTIMIZER)
    if name == "accelerator":
        return Value(OBJECT, name="accelerate.Accelerator")
    return NUMBER if name == "args" else ANY
