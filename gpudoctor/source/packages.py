"""Calls of what is not read: torch, its neighbours, and builtins."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpudoctor.source import builtin_calls, guess, loaders, moves, tensors, torch_calls
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import LOGGER_METHODS, NAN_METRICS
from gpudoctor.source.values import (
    ANY,
    CLASS,
    CPU,
    FUNCTION,
    GPU,
    INSTANCE,
    LOADER,
    MAYBE,
    NONE,
    NUMBER,
    OBJECT,
    OPTIMIZER,
    SEQUENCE,
    TENSOR,
    Thing,
    Value,
    element,
    host,
    sequence,
)

if TYPE_CHECKING:
    from gpudoctor.source.calls import Arguments

LOGGER = re.compile(r"(?:^|[._])(?:log|logger|logging|loguru|_log|LOG|LOGGER)$|logger$", re.IGNORECASE)


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
    if last in LOGGER_METHODS and LOGGER.search(name.rpartition(".")[0]):
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
        where = moves.as_device(
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
        return logged(it, given, node)
    return Value(OBJECT, name=name)


def logged(it: Interpreter, given: Arguments, node: ast.Call) -> Value:
    """A tracker turns tensors into numbers: it waits for each."""
    for value in given.flat():
        if value.kind == TENSOR and value.on_gpu:
            it.read(node, "logger", value, line=node.lineno)
    return NONE


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
