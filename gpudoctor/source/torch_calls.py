"""Functions and classes of torch, by their name below ``torch.``"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpudoctor.source import loaders, moves, packages, tensors
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.names import FACTORIES, FROM_HOST_DATA, LINALG_SYNCS, LOSS_NAMES, NOT_TENSORS
from gpudoctor.source.values import (
    ANY,
    CPU,
    DEVICE,
    FUNCTION,
    GPU,
    HOST,
    INSTANCE,
    MAYBE,
    NONE,
    NUMBER,
    OBJECT,
    OPTIMIZER,
    SEQUENCE,
    TENSOR,
    Value,
    element,
    host,
    sequence,
    stronger,
    tensor,
)

if TYPE_CHECKING:
    from gpudoctor.source.calls import Arguments

_WRAPPERS = frozenset(
    [
        "compile",
        "jit.script",
        "jit.trace",
        "func.vmap",
        "vmap",
        "jit.ignore",
        "jit.export",
        "jit.unused",
        "compiler.disable",
        "_dynamo.optimize",
        "jit.freeze",
    ]
)
_CONTEXTS = (
    "no_grad",
    "inference_mode",
    "enable_grad",
    "autocast",
    "amp.autocast",
    "cuda.amp.autocast",
    "autograd.profiler",
    "profiler.",
)


def call(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    handler = _EXACT.get(name)
    if handler is not None:
        return handler(it, name, given, node)
    if name.startswith("nn.functional."):
        return _functional(it, name.rpartition(".")[2], given, node)
    if name.startswith("nn."):
        return _nn(it, name, given, node)
    if name.startswith("optim."):
        return _optimizer(it, name, given, node)
    if name.startswith("utils.data."):
        last = name.rpartition(".")[2]
        if last.endswith("DataLoader"):
            return loaders.make(it, given, node, f"torch.{name}")
        if last in ("Subset", "random_split", "ConcatDataset", "ChainDataset"):
            return loaders.subset(given, last)
        value = Value(OBJECT, name=f"torch.{name}")
        value.ref = (given, it.site(node), node, it.module, it.statement)
        if last == "DistributedSampler" or last == "distributed.DistributedSampler":
            it.distributed = True
        return value
    if name.startswith(("cuda.", "accelerator.", "mps.", "xpu.")):
        return _cuda(it, name, given, node)
    if name.startswith("linalg."):
        return _linalg(it, name[7:], given, node)
    if name.startswith(("distributed.", "multiprocessing.")):
        return _distributed(it, name, given, node)
    if name in _WRAPPERS:
        return _wrapped(it, given)
    if name.startswith(_CONTEXTS):
        return Value(OBJECT, name=f"torch.{name}")
    if name.startswith(("hub.load", "jit.load")):
        return packages.model(it, f"torch.{name}", given, node)
    if name in FACTORIES:
        return factory(it, name, given, node)
    if name in NOT_TENSORS or name.startswith(
        ("backends.", "random.", "version.", "utils.", "_C.", "testing.", "hub.")
    ):
        return NUMBER if not name.startswith("utils.") else ANY
    if name.startswith("autograd."):
        if name.endswith(".grad") or name == "autograd.grad":
            device, why = stronger(given.flat())
            return sequence(tensor(device, why))
        return ANY
    if "." in name and not name.startswith(("special.", "fft.", "sparse.", "signal.", "ops.", "Tensor.")):
        return ANY
    return tensors.operation(it, name.rpartition(".")[2], given.all(), given, node)


def factory(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    """torch.zeros(...), torch.tensor(list, device=...)"""
    last = name.rpartition(".")[2]
    wanted = given.named.get("device")
    pinned = given.named.get("pin_memory")
    expression = next((k.value for k in node.keywords if k.arg == "device"), None)
    target = (
        moves.as_device(it, wanted, expression, node)
        if wanted is not None and wanted.const is not None
        else it.default_device
    )
    data = given.values[0] if given.values else given.named.get("data")
    device = target.device if target is not None else CPU
    why = None
    if device in (GPU, MAYBE):
        why = it.why(node) if target is not it.default_device else target.why if target else None
    if last in ("as_tensor", "asarray", "tensor") and data is not None and data.kind == TENSOR:
        if data.on_gpu:
            return data if last != "tensor" else data.with_(scalar=data.scalar)
        if device == CPU:
            return data.with_(frame=it.loop())
    if last == "scalar_tensor":
        last = "full"
    result = tensors.fresh(
        it, device, why, pinned=None if pinned is None or device != CPU else pinned.const is not False
    )
    if device == CPU and pinned is None:
        result.pinned = False
    result.scalar = last == "tensor" and data is not None and _is_number(data)
    if "dtype" in given.named and given.named["dtype"].name in ("torch.bool", "builtins.bool"):
        result.mask = True
    if it.in_worker is not None and device == GPU:
        it.in_worker.append((node, it.scope.function))
    if device in (GPU, MAYBE):
        if last not in FROM_HOST_DATA:
            it.work()
        it.saw_gpu(result)
        if last in FROM_HOST_DATA and data is not None and not data.on_gpu:
            it.note("built-on-host", node, f"torch.{last}", result, made_in=it.loop(), data=data.kind)
    return result


def _is_number(value: Value) -> bool:
    return value.kind == HOST and value.tag != "array" and not isinstance(value.const, str)


def _functional(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    result = tensors.operation(it, name, given.all(), given, node)
    if LOSS_NAMES.search(name):
        reduction = given.named.get("reduction")
        result.scalar = reduction is None or reduction.const in ("mean", "sum", "batchmean")
    return result


def _nn(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    last = name.rpartition(".")[2]
    if last in ("Parameter", "Buffer", "UninitializedParameter"):
        value = given.values[0] if given.values else ANY
        return value.with_(tag="follows") if value.kind == TENSOR else tensor(None).with_(tag="follows")
    if last.startswith("clip_grad_norm") or name.endswith("get_total_norm"):
        return _clip(it, given, node)
    if name.startswith(("nn.utils.", "nn.init.", "nn.attention.")):
        if last in ("pad_sequence", "pack_padded_sequence", "pad_packed_sequence", "parameters_to_vector"):
            return tensors.operation(it, last, given.all(), given, node)
        return ANY if not last.endswith("_norm") else given.values[0] if given.values else ANY
    if last in ("DataParallel", "DistributedDataParallel"):
        return _parallel(it, last, given, node)
    return packages.model(it, f"torch.{name}", given, node)


def _clip(it: Interpreter, given: Arguments, node: ast.Call) -> Value:
    parameters = given.values[0] if given.values else ANY
    one = element(parameters) if parameters.kind == SEQUENCE else parameters
    device, why = stronger([one, element(one) if one.kind == SEQUENCE else one])
    check = given.get(3, "error_if_nonfinite")
    if device is None and it.uses_gpu is not None and parameters.kind != HOST:
        device, why = (MAYBE, it.uses_gpu) if one.kind != TENSOR or one.device is None else (one.device, one.why)
    if device in (GPU, MAYBE):
        it.work()
        name = "clip_grad_norm_"
        operation = f"{name} with error_if_nonfinite" if check is not None and check.const is True else name
        it.note("hidden-sync", node, operation, tensor(device, why))
    return tensor(device, why, scalar=True)


def _parallel(it: Interpreter, last: str, given: Arguments, node: ast.Call) -> Value:
    inner = given.values[0] if given.values else given.named.get("module", ANY)
    if last == "DataParallel":
        it.note("data-parallel", node, "nn.DataParallel", None)
        value = inner if inner.kind == INSTANCE else packages.model(it, "torch.nn.DataParallel", given, node)
        value.ref.move(GPU, value.ref.why or it.why(node))
        it.saw_gpu(Value(TENSOR, device=GPU, why=value.ref.why))
        return value
    it.distributed = True
    unused = given.named.get("find_unused_parameters")
    if unused is not None and unused.const is True:
        it.note("find-unused-parameters", node, "find_unused_parameters=True", None)
    if inner.kind == INSTANCE:
        if given.named.get("device_ids", NONE).const is None and inner.ref.device is None:
            return inner
        if inner.ref.device is None:
            inner.ref.move(GPU, it.why(node))
        return inner
    device_ids = given.named.get("device_ids")
    value = packages.model(it, "torch.nn.parallel.DistributedDataParallel", given, node)
    if device_ids is not None and device_ids.const is not None:
        value.ref.move(GPU, it.why(node))
    return value


def _optimizer(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    if "lr_scheduler" in name or "swa_utils" in name:
        return Value(OBJECT, name=f"torch.{name}")
    value = Value(OPTIMIZER, name=f"torch.{name}")
    parameters = given.get(0, "params")
    if parameters is not None and parameters.kind == SEQUENCE:
        value.ref = packages.param_groups(parameters)
    foreach, fused = given.named.get("foreach"), given.named.get("fused")
    if foreach is not None and foreach.const is False and (fused is None or fused.const is not True):
        it.note("single-tensor-optimizer", node, name.rpartition(".")[2], None)
    return value


def _linalg(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    device, why = stronger(given.flat())
    if device in (GPU, MAYBE):
        if name in LINALG_SYNCS:
            it.note("hidden-sync", node, f"torch.linalg.{name}", tensor(device, why))
        it.work()
    result = tensor(device, why)
    result.scalar = (
        name in ("norm", "vector_norm", "matrix_norm") and len(given.values) <= 2 and "dim" not in given.named
    )
    return result


def _distributed(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    last = name.rpartition(".")[2]
    if last == "get_rank":
        grouped = bool(given.values) or "group" in given.named
        return host(tag=None if grouped else "global-rank")
    if last in ("init_process_group", "init_device_mesh"):
        it.distributed = True
    if last in ("FullyShardedDataParallel", "FSDP"):
        return _fsdp(it, given, node)
    if last == "fully_shard":
        inner = given.values[0] if given.values else ANY
        if inner.kind == INSTANCE:
            inner.ref.move(GPU, it.why(node))
        return inner
    if last == "DistributedSampler":
        return Value(OBJECT, name=f"torch.{name}")
    if last == "spawn" and given.values and given.values[0].kind == FUNCTION:
        from gpudoctor.source import calls

        count = len(given.values[0].ref[0].node.args.args)
        rest = given.named.get("args", given.values[1] if len(given.values) > 1 else None)
        extra = rest.elements if rest is not None and isinstance(rest.elements, list) else []
        calls.call_function(it, given.values[0], calls.Arguments([host(), *extra][:count], {}, []), node)
        return NONE
    return ANY if last in ("all_reduce", "broadcast", "all_gather") else NUMBER


def _fsdp(it: Interpreter, given: Arguments, node: ast.Call) -> Value:
    it.distributed = True
    inner = given.values[0] if given.values else given.named.get("module", ANY)
    policy = given.get(4, "auto_wrap_policy")
    spread = any(keyword.arg is None for keyword in node.keywords)  # **kwargs may hold it
    if (policy is None or policy.const is None) and not spread:
        it.note("fsdp-one-unit", node, "FullyShardedDataParallel", None, wraps=id(inner.ref))
    value = inner if inner.kind == INSTANCE else packages.model(it, "torch.distributed.fsdp", given, node)
    value.ref.move(GPU, it.why(node))
    it.saw_gpu(Value(TENSOR, device=GPU, why=value.ref.why))
    return value


def _cuda(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    last = name.rpartition(".")[2]
    if last == "synchronize":
        it.synchronised += 1
        it.note("synchronize", node, f"torch.{name}", None, bare=not given.values and not given.named)
        return NONE
    if last == "empty_cache":
        it.note("empty-cache", node, f"torch.{name}", None)
        return NONE
    if last == "set_device":
        value = given.values[0] if given.values else NUMBER
        if value.tag == "global-rank":
            it.note("device-from-global-rank", node, "torch.cuda.set_device", None)
        elif isinstance(value.const, int):
            it.indices.add(f"cuda:{value.const}")
        return NONE
    if last in ("Stream", "Event", "current_stream", "default_stream", "ExternalStream"):
        return Value(OBJECT, name=f"torch.cuda.{last}")
    if last in (
        "FloatTensor",
        "HalfTensor",
        "LongTensor",
        "IntTensor",
        "ByteTensor",
        "BoolTensor",
        "DoubleTensor",
        "BFloat16Tensor",
    ):
        result = tensor(GPU, it.why(node), mask=last == "BoolTensor")
        if given.values and given.values[0].kind == SEQUENCE:
            it.note("built-on-host", node, f"torch.cuda.{last}", result, made_in=it.loop())
        it.work()
        it.saw_gpu(result)
        return result
    if last == "GradScaler":
        return Value(OBJECT, name="torch.GradScaler")
    if last in ("stream", "device", "graph", "autocast") or name.startswith("cuda.amp"):
        return Value(OBJECT, name=f"torch.{name}")
    if last == "CUDAGraph":
        return Value(OBJECT, name=f"torch.{name}")
    return NUMBER


def _device(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del name
    first = given.values[0] if given.values else given.named.get("type", given.named.get("device", NONE))
    index = given.get(1, "index")
    tag = index.tag if index is not None else first.tag
    if tag == "global-rank":
        it.note("device-from-global-rank", node, "torch.device", None)
    if first.kind == DEVICE:
        return first.with_(why=it.why(node))
    if isinstance(first.const, str) and index is not None and isinstance(index.const, int):
        it.indices.add(f"{first.const}:{index.const}")
    if isinstance(first.const, str) and re.fullmatch(r"cuda:\d+", first.const):
        it.indices.add(first.const)
    place = moves.place_of(first.const)
    if place is None and first.const != "xla":
        place = MAYBE
    return Value(DEVICE, device=place, why=it.why(node))


def _tensor_class(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    """torch.FloatTensor([1, 2]), torch.Tensor(3, 4)"""
    del name, node
    return tensors.fresh(it, CPU if it.default_device is None else it.default_device.device, None, pinned=False)


def _save(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    it.note("checkpoint", node, f"torch.{name}", None)
    del given
    return NONE


def _load(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del name
    where = given.get(1, "map_location")
    target = moves.as_device(it, where, None, node) if where is not None and where.const is not None else None
    return sequence(tensor(target.device if target else None, target.why if target else None), tag="state")


def _anomaly(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    first = given.values[0] if given.values else given.named.get("mode")
    if first is None or first.const is True:
        it.note("anomaly-detection", node, f"torch.{name}", None)
    return Value(OBJECT, name=f"torch.{name}")


def _default_device(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    value = given.values[0] if given.values else NONE
    if name == "set_default_tensor_type":
        if isinstance(value.const, str) and "cuda" in value.const:
            it.default_device = Value(DEVICE, device=GPU, why=it.why(node))
        return NONE
    it.default_device = moves.as_device(it, value, given.nodes[0] if given.nodes else None, node)
    if it.default_device is not None and it.default_device.device == CPU:
        it.default_device = None
    return NONE


def _scaler(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del it, name, given, node
    return Value(OBJECT, name="torch.GradScaler")


def _wrapped(it: Interpreter, given: Arguments) -> Value:
    del it
    return given.values[0] if given.values else ANY


def _from_numpy(it: Interpreter, name: str, given: Arguments, node: ast.Call) -> Value:
    del given, node
    result = tensors.fresh(it, CPU, None, pinned=False)
    del name
    return result


_Handler = Callable[[Interpreter, str, "Arguments", ast.Call], Value]
_EXACT: dict[str, _Handler] = {
    "device": _device,
    "save": _save,
    "load": _load,
    "Tensor": _tensor_class,
    "FloatTensor": _tensor_class,
    "LongTensor": _tensor_class,
    "IntTensor": _tensor_class,
    "ByteTensor": _tensor_class,
    "BoolTensor": _tensor_class,
    "DoubleTensor": _tensor_class,
    "HalfTensor": _tensor_class,
    "autograd.set_detect_anomaly": _anomaly,
    "autograd.detect_anomaly": _anomaly,
    "autograd.anomaly_mode.set_detect_anomaly": _anomaly,
    "autograd.anomaly_mode.detect_anomaly": _anomaly,
    "set_default_device": _default_device,
    "set_default_tensor_type": _default_device,
    "amp.GradScaler": _scaler,
    "cuda.amp.GradScaler": _scaler,
    "amp.grad_scaler.GradScaler": _scaler,
    "from_numpy": _from_numpy,
    "frombuffer": _from_numpy,
}
