"""What the tree shows without following values: imports that are gone, side streams, layers placed by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.project import Class, Module, dotted

# Modules that are gone or deprecated: what to use, and what the finding says. rules/software knows the versions.
REMOVED = (
    "torch.distributed.pipeline",
    "torch.cuda.stream",
    "torch.distributed.launch",
    "vllm.entrypoints.api_server",
    "torch._six",
)
_GONE = (
    "distributed.pipeline",
    "distributed.launch",
    "import torch.cuda.stream",
    "vllm.entrypoints",
    "torch._six",
    "distributed import pipeline",
    "distributed import launch",
)
_ORDERS = re.compile(r"\.wait_stream\(|\.wait_event\(|\.synchronize\(|\.wait\(|\.record_event\(")
_CAPTURES = re.compile(r"CUDAGraph|cuda\.graph\(|make_graphed_callables")


def scan(it: Interpreter, module: Module) -> None:
    text = module.source.text
    if any(word in text for word in _GONE):
        _imports(it, module)
    if "cuda.stream(" in text or "with stream(" in text or "StreamContext(" in text:
        for scope in _scopes(module):
            _streams(it, module, scope)
    if len(it.indices) > 1 or "cuda:1" in text or ".cuda(1)" in text:
        for cls in module.classes:
            _layers(it, module, cls)
        _one_device(it, module)


def _at(it: Interpreter, module: Module, kind: str, node: ast.AST, operation: str, detail: str | None = None) -> None:
    saved = it.module, it.statement, it.function
    it.module = module
    it.statement = (getattr(node, "lineno", 1), getattr(node, "lineno", 1))
    it.function = None
    it.note(kind, node, operation, None, detail=detail)
    it.module, it.statement, it.function = saved


def _imports(it: Interpreter, module: Module) -> None:
    for node in ast.walk(module.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            base = node.module or ""
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            gone = next((known for known in REMOVED if name == known or name.startswith(known + ".")), None)
            if gone == "torch.cuda.stream" and isinstance(node, ast.ImportFrom) and node.module == "torch.cuda":
                continue  # the function is there; only the module is not
            if gone is not None:
                _at(it, module, "removed-interface", node, gone)
                break


# streams


def _scopes(module: Module) -> Iterator[ast.AST]:
    """Classes whole, for a prefetcher fills in one method what another hands out; functions; the module itself."""
    for node in module.tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
    yield module.tree


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(scope, ast.Module):
        yield from ast.walk(scope)
        return
    for child in scope.body:
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from ast.walk(child)


def _streams(it: Interpreter, module: Module, scope: ast.AST) -> None:
    blocks = [node for node in _own(scope) if isinstance(node, ast.With) and (_stream_of(node) is not None)]
    if not blocks:
        return
    first = getattr(scope, "lineno", 1) - 1
    last = getattr(scope, "end_lineno", None) or len(module.lines)
    text = "\n".join(module.lines[first:last])
    if _CAPTURES.search(text):
        return
    for block in blocks:
        used = _used_outside(scope, block)
        if used is None:
            continue
        stream = _stream_of(block) or "the stream"
        if not _ORDERS.search(text):
            _at(it, module, "side-stream", block, "no wait_stream", f"{used} is made on {stream} and used outside")
        elif _one_way(text, stream) and "record_stream(" not in text and _again(scope, block):
            _at(it, module, "side-stream", block, "no record_stream", f"{used} is made on {stream} and used outside")


def _stream_of(node: ast.With) -> str | None:
    for item in node.items:
        call = item.context_expr
        if (
            isinstance(call, ast.Call)
            and (dotted(call.func) or "").rpartition(".")[2] in ("stream", "StreamContext")
            and call.args
        ):
            return dotted(call.args[0])
    return None


def _one_way(text: str, stream: str) -> bool:
    """The stream of the consumer waits for the side stream, but the side stream never waits for the consumer, and the
    host waits for nobody."""
    if re.search(r"torch\.cuda\.synchronize\(", text):
        return False
    name = re.escape(stream)
    return not re.search(rf"{name}\.(?:wait_stream|wait_event|synchronize)\(", text)


def _again(scope: ast.AST, block: ast.With) -> bool:
    """Memory is handed out again only where the block runs more than once: in a class or in a loop."""
    if isinstance(scope, ast.ClassDef):
        return True
    return any(
        isinstance(node, (ast.For, ast.While)) and any(inner is block for inner in ast.walk(node))
        for node in ast.walk(scope)
    )


def _used_outside(scope: ast.AST, block: ast.With) -> str | None:
    """A name or attribute that the block assigns and that is read outside of it."""
    inside = {id(node) for node in ast.walk(block)}
    assigned: set[str] = set()
    for node in ast.walk(block):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [
                part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
        for target in targets:
            name = dotted(target)
            if name is not None and _makes_tensor(node):
                assigned.add(name)
    for node in _own(scope):
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inside and isinstance(node.ctx, ast.Load):
            name = dotted(node)
            if name in assigned:
                return name
    return None


def _makes_tensor(node: ast.AST) -> bool:
    """Something is computed or copied, and it is no handle."""
    value = getattr(node, "value", None)
    if value is None or isinstance(value, ast.Constant):
        return False
    for inner in ast.walk(value):
        if isinstance(inner, ast.BinOp):
            return True
        if isinstance(inner, ast.Call):
            name = dotted(inner.func) or (inner.func.attr if isinstance(inner.func, ast.Attribute) else "")
            if name.rpartition(".")[2] not in ("Event", "record_event", "time", "perf_counter", "next", "len"):
                return True
    return False


# several GPUs in one process


def _layers(it: Interpreter, module: Module, cls: Class) -> None:
    init, forward = cls.methods.get("__init__"), cls.methods.get("forward")
    if init is None or forward is None:
        return
    node = cls.node
    if "pipelining" in module.source.text or "DTensor" in module.source.text:
        return
    places = _indices(init.node)
    if len(places) > 1 and _indices(forward.node):
        _at(it, module, "layers-by-hand", node, cls.name, f"{', '.join(sorted(places))} in __init__")


def _indices(root: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(root):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("to", "cuda")
            and node.args
        ):
            first = node.args[0]
            if isinstance(first, ast.Constant):
                if isinstance(first.value, int) and not isinstance(first.value, bool):
                    found.add(f"cuda:{first.value}")
                elif isinstance(first.value, str) and re.fullmatch(r"cuda:\d+", first.value):
                    found.add(first.value)
    return found


def _one_device(it: Interpreter, module: Module) -> None:
    """torch.cuda.synchronize() without a device waits for the current one only."""
    if len(it.indices) < 2:
        return
    for candidate in list(it.candidates):
        if candidate.kind == "synchronize" and candidate.extra.get("bare") and candidate.module is module:
            _at(
                it,
                module,
                "synchronize-one-device",
                candidate.node,
                "torch.cuda.synchronize",
                ", ".join(sorted(it.indices)),
            )
