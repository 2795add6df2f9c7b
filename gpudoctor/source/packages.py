"""Calls of what is not read: torch, its neighbours, builtins, and objects of packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpudoctor.source import builtin_calls, guess, loaders, tensors, torch_calls
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import (
    LOGGER_METHODS,
    NAN_METRICS,
    PROGRESS_METHODS,
    SCALAR_LOGGERS,
)
from gpudoctor.source.project import dotted
from gpudoctor.source.values import (
    ANY,
    CLASS,
    CPU,
    DEVICE,
    FUNCTION,
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
    element,
    host,
    join,
    join_all,
    sequence,
    tensor,
)

if TYPE_CHECKING:
    from gpudoctor.source.calls import Arguments

_LOGGER = re.compile(r"(?:^|[._])(?:log|logger|logging|loguru|_log|LOG|LOGGER)$|logger$", re.IGNORECASE)
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


def call(it: Interpreter, name: str, given: Arguments, node: ast.Call, before: int) -> Value:
    """The result of calling something outside of the project by its full name."""
    top, _, rest = name.partition(".")
    if top == "builtins":
        return builtin_calls.call(it, rest, given, node, before)
    if top == "torch":
        return torch_calls.call(it, rest, given, node)
    handler = _PACKAGES.get(top)
    if handler is not None:
        return handler(it, name, given, node)
    return _other(it, name, given, node, before)


def _other(it: Interpreter, name: str, given: Arguments, node: ast.Call, before: int) -> Value:
    last = name.rpartition(".")[2]
    if last == "DataLoader" or last.endswith("DataLoader"):
        return loaders.make(it, given, node, name)
    if last in LOGGER_METHODS and _LOGGER.search(name.rpartition(".")[0]):
        return builtin_calls.shown(it, given, node, before)
    if any(v.kind == SEQUENCE and v.tag == "parameters" for v in given.all()):
        optimizer = Value(OPTIMIZER, name=name)
        optimizer.ref = param_groups(next(v for v in given.all() if v.tag == "parameters"))
        return optimizer
    if last in (
        "create_model",
        "create_model_and_transforms",
        "from_pretrained",
        "build_model",
        "get_model",
    ) or _is_model_class(name):
        if re.search(r"token|processor|config|feature|scheduler|transform", name, re.IGNORECASE):
            return ANY
        return model(it, name, given, node)
    return guess.unknown_call(it, given, node)


def _is_model_class(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last[:1].isupper() and last.endswith(
        ("Model", "Net", "Network", "Encoder", "Decoder", "Transformer", "Loss", "MLP", "CNN")
    )


def model(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    """A model of a package; on the CPU until it is moved."""
    value = Value(INSTANCE)
    value.ref = Thing(None, name, is_module=True, site=it.site(node))
    placed = given.named.get("device") or given.named.get("device_map")
    if placed is not None:
        where = tensors.as_device(
            it, placed, next((k.value for k in node.keywords if k.arg in ("device", "device_map")), None), node
        )
        if where is not None and (placed.const in ("auto", "balanced", "sequential") or where.device in (GPU, MAYBE)):
            value.ref.move(GPU if where.device is None else where.device, it.why(node))
            it.saw_gpu(Value(TENSOR, device=value.ref.device, why=value.ref.why))
    else:
        inner = next(
            (v for v in given.flat() if v.kind == INSTANCE and v.ref.is_module and v.ref.device in (GPU, MAYBE)), None
        )
        if inner is not None:
            value.ref.move(inner.ref.device, inner.ref.why)
        elif it.default_device is not None:
            value.ref.move(it.default_device.device, it.default_device.why)
    return value


def param_groups(parameters: Value) -> Value:
    group = sequence({"params": sequence(element(parameters), tag="parameters"), "lr": NUMBER, "weight_decay": NUMBER})
    return sequence([group])


# packages


def _numpy(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    for value in given.all():
        it.touch(node, value)
    return host(tag="array")


def _math(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    for value in given.values:
        if value.kind == TENSOR:
            it.read(node, name, value)
    return NUMBER


def _time(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del given, node
    if name.rpartition(".")[2] in (
        "time",
        "perf_counter",
        "monotonic",
        "time_ns",
        "perf_counter_ns",
        "default_timer",
        "process_time",
        "now",
    ):
        it.clock()
        return host(tag="clock")
    return NUMBER


def _copy(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del it, name, node
    return given.values[0] if given.values else ANY


def _os(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del it, node
    first = given.values[0].const if given.values else None
    if name in ("os.environ.get", "os.getenv") and first in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        return host(tag="global-rank")
    return NUMBER


def _itertools(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    last = name.rpartition(".")[2]
    if last == "count":
        return sequence(host(tag="counter"), tag="range")
    first = builtin_calls.as_iterable(it, given, node, 0)
    if last in ("cycle", "islice", "chain", "takewhile", "dropwhile", "accumulate", "tee"):
        return first
    if last in ("product", "combinations", "permutations", "zip_longest", "pairwise"):
        return sequence(ANY)
    return ANY


def _tqdm(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    """tqdm and rich's track hand on what they are given."""
    if name.endswith("trange"):
        return sequence(host(tag="counter"), tag="range")
    if not given.values and "iterable" not in given.named:
        return Value(OBJECT, name="tqdm")
    if given.values:
        return builtin_calls.as_iterable(it, given, node, 0)
    return given.named["iterable"]


def _rich(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    return _tqdm(it, name, given, node) if name.endswith("track") else ANY


def _functools(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del it, node
    if not name.endswith("partial") or not given.values or given.values[0].kind not in (FUNCTION, CLASS):
        return ANY
    return given.values[0].with_(elements=(given.values[1:], given.named))


def _accelerate(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del given
    if name.endswith("Accelerator"):
        return Value(OBJECT, name="accelerate.Accelerator", why=it.why(node))
    return ANY


def _lightning(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    last = name.rpartition(".")[2]
    if last == "Fabric":
        on_cpu = given.named.get("accelerator", NONE).const == "cpu"
        return Value(
            OBJECT, name="lightning.Fabric", why=None if on_cpu else it.why(node), device=CPU if on_cpu else None
        )
    if last == "Trainer":
        anomaly = given.named.get("detect_anomaly")
        if anomaly is not None and anomaly.const is True:
            it.note("anomaly-detection", node, "Trainer(detect_anomaly=True)", None, framework=True)
        return Value(OBJECT, name="lightning.Trainer")
    return ANY


def _torchmetrics(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    value = model(it, name, given, node)
    last = name.rpartition(".")[2]
    strategy = given.named.get("nan_strategy")
    if last in NAN_METRICS and (strategy is None or strategy.const != "disable"):
        value.ref.attributes["gpudoctor nan check"] = Value(OBJECT, name=last)
        value.ref.site = (node, it.module, it.statement)
    return value


def _transformers(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    parts = name.split(".")
    if "from_pretrained" in parts or "from_config" in parts:
        if re.search(r"Tokenizer|Processor|Config|FeatureExtractor|Scheduler", name):
            return ANY
        return model(it, name, given, node)
    if _is_model_class(name) or re.search(r"For[A-Z]\w+$|Model$", parts[-1]):
        return model(it, name, given, node)
    return guess.unknown_call(it, given, node)


def _torchvision(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    if ".models" in name or name.startswith("timm."):
        return model(it, name, given, node)
    if ".datasets" in name:
        return Value(OBJECT, name=name)
    if ".ops." in name:
        return tensors.operation(it, name.rpartition(".")[2], given.all(), given, node)
    return ANY


def _deepspeed(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    if not name.endswith("initialize"):
        return ANY
    inner = given.named.get("model") or (given.values[1] if len(given.values) > 1 else None)
    engine = inner if inner is not None and inner.kind == INSTANCE else guess.model(name="deepspeed")
    engine.ref.move(GPU, it.why(node))
    loader = given.named.get("training_data")
    return sequence([engine, Value(OPTIMIZER), Value(LOADER) if loader is not None else ANY, ANY])


def _wandb(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    if name.rpartition(".")[2] in ("log", "log_metric", "log_metrics"):
        return _logged(it, given, node)
    return Value(OBJECT, name=name)


def _logged(it: Interpreter, given: Arguments, node: ast.Call) -> Value:
    """A tracker turns tensors into numbers: it waits for each."""
    for value in given.flat():
        if value.kind == TENSOR and value.on_gpu:
            it.read(node, "logger", value, line=node.lineno)
    return NONE


# methods of what is not of the project


def method(it: Interpreter, base: Value, name: str, given: Arguments, node: ast.Call, before: int) -> Value:
    kind = base.kind
    if name in PROGRESS_METHODS and kind in (UNKNOWN, OBJECT, SEQUENCE, LOADER):
        return builtin_calls.shown(it, given, node, before, reads=True)
    if name in SCALAR_LOGGERS:
        return _logged(it, given, node)
    if name in LOGGER_METHODS and kind in (UNKNOWN, OBJECT) and _LOGGER.search(dotted(_receiver(node)) or ""):
        return builtin_calls.shown(it, given, node, before)
    if name == "log" and kind in (UNKNOWN, OBJECT):
        if (base.name or "").startswith(("accelerate", "lightning.Fabric")) or _TRACKERS.search(
            dotted(_receiver(node)) or ""
        ):
            return _logged(it, given, node)
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
        return tensors.move(it, base, given, node, name)
    if name == "cuda":
        return tensors.copy_to_device(it, base, name, node, Value(DEVICE, device=GPU, why=it.why(node)), False)
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
        return tensors.move(it, base, given, node, name)
    if name == "cuda":
        return tensors.copy_to_device(it, base, name, node, Value(DEVICE, device=GPU, why=it.why(node)), False)
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
        it.note("synchronize", node, "current_stream().synchronize", None, line=tensors.line_of(node))
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


def merged(values: list[Value]) -> Value:
    return join_all(values) if values else join(ANY, ANY)


_Handler = Callable[[Interpreter, str, "Arguments", ast.Call], Value]
_PACKAGES: dict[str, _Handler] = {
    "numpy": _numpy,
    "np": _numpy,
    "pandas": _numpy,
    "scipy": _numpy,
    "sklearn": _numpy,
    "cv2": _numpy,
    "PIL": _numpy,
    "random": _numpy,
    "math": _math,
    "cmath": _math,
    "time": _time,
    "timeit": _time,
    "datetime": _time,
    "copy": _copy,
    "os": _os,
    "itertools": _itertools,
    "tqdm": _tqdm,
    "rich": _rich,
    "fastprogress": _tqdm,
    "functools": _functools,
    "accelerate": _accelerate,
    "lightning": _lightning,
    "pytorch_lightning": _lightning,
    "lightning_fabric": _lightning,
    "torchmetrics": _torchmetrics,
    "transformers": _transformers,
    "torchvision": _torchvision,
    "timm": _torchvision,
    "torchaudio": _torchvision,
    "deepspeed": _deepspeed,
    "wandb": _wandb,
    "mlflow": _wandb,
    "swanlab": _wandb,
}
