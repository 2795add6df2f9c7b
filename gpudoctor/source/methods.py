"""Methods of what is not of the project: models and objects of packages, host values, what is not known."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from gpudoctor.source import builtin_calls, guess, moves, packages
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import LOGGER_METHODS, PROGRESS_METHODS, SCALAR_LOGGERS
from gpudoctor.source.project import dotted
from gpudoctor.source.values import (
    ANY,
    CPU,
    DEVICE,
    GPU,
    HOST,
    INSTANCE,
    LOADER,
    MAYBE,
    NONE,
    NUMBER,
    OBJECT,
    OPTIMIZER,
    SEQUENCE,
    TENSOR,
    UNKNOWN,
    Thing,
    Value,
    host,
    sequence,
    tensor,
)

if TYPE_CHECKING:
    from gpudoctor.source.calls import Arguments

_TRACKERS = re.compile(
    r"(?:^|[._])(?:wandb|run|mlflow|neptune|comet|experiment|tracker|swanlab|aim_run|wandb_run|wb)$", re.IGNORECASE
)
_OUTPUT_METHODS = frozenset(
    [
        "forward",
        "generate",
        "encode",
        "decode",
        "predict",
        "sample",
        "get_loss",
        "compute_loss",
        "loss",
        "embed",
        "inference",
        "encode_text",
        "encode_image",
        "forward_features",
        "forward_head",
        "get_text_features",
        "get_image_features",
        "training_step",
    ]
)
_IN_PLACE = frozenset(
    [
        "train",
        "eval",
        "half",
        "float",
        "double",
        "bfloat16",
        "requires_grad_",
        "apply",
        "compile",
        "share_memory",
        "zero_grad",
        "gradient_checkpointing_enable",
        "freeze",
        "unfreeze",
        "tie_weights",
        "type",
        "register_forward_hook",
        "enable_input_require_grads",
        "requires_grad",
    ]
)
_SAVES = frozenset(["save_pretrained", "save_checkpoint", "save_state", "save_model", "save", "save_weights"])


def method(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call, before: int) -> Value:
    kind = base.kind
    if name in PROGRESS_METHODS and kind in (UNKNOWN, OBJECT, SEQUENCE, LOADER):
        return builtin_calls.shown(it, given, node, before, reads=True)
    if name in SCALAR_LOGGERS:
        return packages.logged(it, given, node)
    if name in LOGGER_METHODS and kind in (UNKNOWN, OBJECT) and packages.LOGGER.search(dotted(_receiver(node)) or ""):
        return builtin_calls.shown(it, given, node, before)
    if name == "log" and kind in (UNKNOWN, OBJECT):
        if (base.name or "").startswith(("accelerate", "lightning.Fabric")) or _TRACKERS.search(
            dotted(_receiver(node)) or ""
        ):
            return packages.logged(it, given, node)
        return NONE
    if kind == SEQUENCE:
        return builtin_calls.sequence_method(it, base, name, given, node)
    if kind == HOST:
        return _host_method(it, base, name, given, node)
    if kind == INSTANCE:
        return _module_method(it, base, name, given, node)
    if kind == OBJECT:
        return _object_method(it, base, name, given, node)
    if kind == OPTIMIZER:
        return sequence(NUMBER) if name == "state_dict" else NONE
    if kind == LOADER:
        return Value(LOADER) if name == "__iter__" else ANY
    if kind == DEVICE:
        return NUMBER
    return _unknown_method(it, base, name, given, node, before)


def _receiver(node: ast.Call) -> ast.expr:
    return node.func.value if isinstance(node.func, ast.Attribute) else node.func


def _host_method(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    if name == "format" and isinstance(base.const, str):
        for value in given.flat():
            if value.kind == TENSOR:
                it.read(node, "format", value, kind="print")
    if name in ("tolist", "items", "values", "keys", "split"):
        return sequence(host())
    return host(tag="array" if base.tag == "array" and name != "item" else None)


def _unknown_method(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call, before: int) -> Value:
    del before
    if name == "to":
        return moves.move(it, base, given, node, name)
    if name == "cuda":
        return moves.copy_to_device(it, base, name, node, Value(DEVICE, device=GPU, why=it.why(node)), False)
    if name in ("parameters", "named_parameters", "modules", "named_modules", "children", "buffers"):
        return _parameters(name, None, None)
    if name in ("items", "values"):
        return sequence(sequence([host(), ANY]) if name == "items" else ANY, tag="items")
    if name in ("item", "numpy", "tolist", "size", "numel", "dim"):
        return NUMBER
    if name == "cpu":
        return tensor(CPU)
    if name in ("synchronize", "wait", "query", "wait_event", "wait_stream"):
        it.synchronised += 1
    if name in _SAVES and _saves(it, base, name, node):
        return NONE
    gpu = next((v for v in given.flat() if v.kind == TENSOR and v.on_gpu), None)
    if gpu is not None and name in _OUTPUT_METHODS:
        it.work(models=1)
        return tensor(gpu.device, gpu.why)
    return guess.unknown_call(it, given, node)


def _saves(it: Interpreter, base: Value, name: str, node: ast.Call) -> bool:
    receiver = dotted(_receiver(node)) or ""
    if base.kind == UNKNOWN and not re.search(r"model|net|trainer|engine|accelerator|fabric", receiver, re.IGNORECASE):
        return False
    it.note("checkpoint", node, name, None)
    return True


def _parameters(name: str, device: object, why: object) -> Value:
    one = tensor(device, why)  # type: ignore[arg-type]
    if name in ("modules", "children", "named_modules", "named_children"):
        inner = Value(INSTANCE)
        inner.ref = Thing(None, "torch.nn.Module", is_module=True)
        inner.ref.device, inner.ref.why = device, why
        return sequence(sequence([host(), inner]) if name.startswith("named_") else inner, tag="modules")
    return sequence(sequence([host(), one]) if name.startswith("named_") else one, tag="parameters")


def _module_method(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    thing = base.ref
    if name == "to":
        return moves.move(it, base, given, node, name)
    if name == "cuda":
        return moves.copy_to_device(it, base, name, node, Value(DEVICE, device=GPU, why=it.why(node)), False)
    if name == "cpu":
        return base
    if name in _IN_PLACE:
        return base
    if name in (
        "parameters",
        "named_parameters",
        "buffers",
        "named_buffers",
        "modules",
        "children",
        "named_modules",
        "named_children",
    ):
        return _parameters(name, thing.device, thing.why)
    if name == "state_dict":
        return sequence(tensor(thing.device, thing.why), tag="state")
    if name in ("register_buffer", "register_parameter") and len(given.values) + len(given.named) >= 2:
        value = given.get(1, "tensor") or ANY
        key = given.get(0, "name")
        if key is not None and isinstance(key.const, str):
            thing.attributes[key.const] = value.with_(tag="follows") if value.kind == TENSOR else value
        return NONE
    if name in ("add_module", "register_module") and len(given.values) == 2 and isinstance(given.values[0].const, str):
        thing.attributes[given.values[0].const] = given.values[1]
        return NONE
    if name in _SAVES and _saves(it, base, name, node):
        return NONE
    if name in ("update", "forward") and "gpudoctor nan check" in thing.attributes:
        metric_update(it, base, given, node)
        return NONE
    gpu = next((v for v in given.flat() if v.kind == TENSOR and v.on_gpu), None)
    if thing.is_module and (name in _OUTPUT_METHODS or gpu is not None):
        device, why = (gpu.device, gpu.why) if gpu is not None else (thing.device, thing.why)
        if device in (GPU, MAYBE) and name in _OUTPUT_METHODS:
            it.work(models=1)
            return tensor(device, why)
        return ANY
    if thing.cls is not None and name in ("save_hyperparameters", "log", "log_dict", "print"):
        return NONE
    if name == "log" and not thing.is_module:
        return NONE
    return guess.unknown_call(it, given, node)


def metric_update(it: Interpreter, base: Value, given: Arguments, node: ast.Call) -> None:
    """The check runs in each update; what to change is the line that makes the metric."""
    gpu = next((v for v in given.flat() if v.kind == TENSOR and v.on_gpu), None)
    device, why = (gpu.device, gpu.why) if gpu is not None else (base.ref.device, base.ref.why)
    made = base.ref.site
    if device not in (GPU, MAYBE) or not isinstance(made, tuple):
        return
    it.work()
    name = base.ref.attributes["gpudoctor nan check"].name
    found = it.note("hidden-sync", node, f"{name} with a NaN check", tensor(device, why), updated=it.site(node))
    if found is not None:
        found.node, found.module, found.statement = made
        found.line = getattr(made[0], "lineno", 1)


def call_object(it: Interpreter, base: Value, given: Arguments, node: ast.Call) -> Value:
    """Calling an instance without __call__ and forward that are known."""
    if "gpudoctor nan check" in base.ref.attributes:
        metric_update(it, base, given, node)
    return guess.unknown_call(it, given, node)


def _object_method(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    owner = base.name or ""
    if owner.startswith(("accelerate", "lightning.Fabric")):
        return _framework_method(it, base, name, given, node)
    if name == "synchronize" and owner == "torch.cuda.current_stream":
        it.note("synchronize", node, "current_stream().synchronize", None, line=moves.line_of(node))
    if name in ("synchronize", "wait", "query", "wait_event", "wait_stream", "elapsed_time"):
        it.synchronised += 1
        if name == "elapsed_time":
            it.clock()
            it.clock()
        return NUMBER
    if owner == "argparse" and name == "parse_args":
        return ANY
    if name == "update" and owner == "tqdm":
        return NONE
    return ANY


_PREPARES = frozenset(
    [
        "prepare",
        "setup",
        "setup_module",
        "setup_optimizers",
        "setup_dataloaders",
        "prepare_model",
        "prepare_data_loader",
        "prepare_optimizer",
    ]
)


def _framework_method(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call) -> Value:
    """accelerate and Lightning Fabric place models and batches on the GPU."""
    device, why = (CPU, None) if base.device == CPU else (GPU, it.why(node))
    if name in _PREPARES:
        moved = [prepared(it, value, device, why) for value in given.values]
        return moved[0] if len(moved) == 1 else sequence(moved)
    if name in (
        "gather",
        "gather_for_metrics",
        "reduce",
        "pad_across_processes",
        "all_gather",
        "all_reduce",
        "clip_grad_norm_",
        "to_device",
    ):
        first = given.values[-1 if name == "to_device" and len(given.values) > 1 else 0] if given.values else ANY
        if first.kind in (SEQUENCE, INSTANCE):
            return first
        return tensor(device, first.why or why, scalar=name == "clip_grad_norm_")
    if name == "unwrap_model":
        return given.values[0] if given.values else ANY
    if name in ("save_state", "save_model", "save"):
        it.note("checkpoint", node, name, None)
        return NONE
    if name == "print":
        return builtin_calls.shown(it, given, node, len(it.candidates))
    if name == "call" or name.startswith("is_"):
        return NONE
    return NONE if name in ("autocast", "accumulate", "no_sync", "wait_for_everyone", "barrier") else ANY


def prepared(it: Interpreter, value: Value, device: object, why: object) -> Value:
    if value.kind == INSTANCE and value.ref.is_module:
        value.ref.move(device, why)
        return value
    if value.kind == LOADER:
        if value.ref is not None:
            value.ref.prepared = True
        return value.with_(device=device, why=why)
    if value.kind == OPTIMIZER:
        return value
    if value.kind == SEQUENCE:
        return (
            sequence([prepared(it, v, device, why) for v in value.elements])
            if isinstance(value.elements, list)
            else value
        )
    if value.kind == UNKNOWN:
        return ANY
    return value
