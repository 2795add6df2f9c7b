"""What loader workers must not do, and ranks that read the same data: datasets, collate functions and samplers."""

from __future__ import annotations

import ast
import re

from gpudoctor.source import calls, classes, loaders
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.loaders import Loader
from gpudoctor.source.project import Function, dotted
from gpudoctor.source.values import ANY, FUNCTION, INSTANCE, NUMBER, OBJECT, Value, sequence

_OPENS = frozenset(
    [
        "h5py.File",
        "open",
        "lmdb.open",
        "zipfile.ZipFile",
        "tarfile.open",
        "sqlite3.connect",
        "tables.open_file",
        "rasterio.open",
        "netCDF4.Dataset",
        "gzip.open",
        "io.open",
    ]
)
_SHARDS = re.compile(r"rank|world_size|shard|DistributedSampler|split_dataset|worker_info", re.IGNORECASE)


def check_loaders(it: Interpreter) -> None:
    for loader in list(it.loaders.values()):
        workers = loader.num_workers
        if workers is not None and workers > 0:
            _in_worker(it, loader)
            _handles(it, loader)
        if workers is not None and workers > 1:
            _iterable(it, loader)
        if it.distributed:
            _sampler(it, loader)


def _note(
    it: Interpreter,
    loader: Loader,
    kind: str,
    operation: str,
    detail: str,
    node: ast.AST | None = None,
    function: Function | None = None,
) -> None:
    saved = it.module, it.statement, it.standalone
    it.standalone = loader.standalone
    if node is not None and function is not None:
        it.module, it.statement = function.module, (getattr(node, "lineno", 1), getattr(node, "end_lineno", 1) or 1)
    else:
        node = loader.node
        it.module, it.statement = loader.module, loader.statement
    it.note(kind, node, operation, None, detail=detail)
    it.module, it.statement, it.standalone = saved


def _in_worker(it: Interpreter, loader: Loader) -> None:
    """CUDA cannot be used in a forked worker: look for it below __getitem__ and the collate function."""
    targets: list[tuple[Value, calls.Arguments]] = []
    found = loaders.dataset_class(loader.dataset)
    if found is not None:
        method = classes.find_method(it, *found, "__getitem__") or classes.find_method(it, *found, "__iter__")
        if method is not None:
            value = Value(FUNCTION, name="__getitem__")
            value.ref = (method[0], method[1], loader.dataset)
            targets.append((value, calls.Arguments([NUMBER], {}, [])))
    collate = loader.arguments.get("collate_fn")
    if collate is not None and collate.kind == FUNCTION:
        targets.append((collate, calls.Arguments([sequence(ANY)], {}, [])))
    for value, given in targets:
        seen: list[tuple[ast.AST, Function | None]] = []
        it.in_worker = seen
        kept = len(it.candidates)
        try:
            calls.call_function(it, value, given, loader.node)
        finally:
            it.in_worker = None
            del it.candidates[kept:]
        for node, function in seen[:1]:
            _note(
                it,
                loader,
                "cuda-in-worker",
                "device use in a worker",
                f"{loader.site}: num_workers={loader.num_workers}",
                node,
                function,
            )


def _handles(it: Interpreter, loader: Loader) -> None:
    """A file that __init__ opens and __getitem__ reads is shared by all workers."""
    found = loaders.dataset_class(loader.dataset)
    if found is None:
        return
    init = classes.find_method(it, *found, "__init__")
    item = classes.find_method(it, *found, "__getitem__")
    if init is None or item is None:
        return
    used = {dotted(node) for node in ast.walk(item[0].node) if isinstance(node, ast.Attribute)}
    for statement in init[0].node.body if not isinstance(init[0].node, ast.Lambda) else ():
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        opener = dotted(statement.value.func) or ""
        target = dotted(statement.targets[0])
        if opener in _OPENS and target is not None and target in used:
            _note(
                it,
                loader,
                "handle-before-fork",
                opener,
                f"{loader.site}: num_workers={loader.num_workers}",
                statement,
                init[0],
            )


def _iterable(it: Interpreter, loader: Loader) -> None:
    found = loaders.dataset_class(loader.dataset)
    if found is None or not classes.inherits(it, *found, "IterableDataset") or "worker_init_fn" in loader.arguments:
        return
    method = classes.find_method(it, *found, "__iter__")
    if method is None:
        return
    node = found[0].node
    text = "\n".join(found[0].module.lines[node.lineno - 1 : node.end_lineno])
    if "worker" in text or "shard" in text:
        return
    _note(it, loader, "iterable-not-split", f"{found[0].name}.__iter__", f"num_workers={loader.num_workers}")


def _sampler(it: Interpreter, loader: Loader) -> None:
    """Under DistributedDataParallel each rank must read its own part."""
    trains = any(frames[-1].trains for frames in loader.loops)
    if not trains or loader.prepared or loader.open:
        return
    sampler = loader.arguments.get("sampler")
    if sampler is None and "batch_sampler" not in loader.arguments:
        dataset = loader.dataset
        known = dataset.kind in (INSTANCE, OBJECT)
        found = loaders.dataset_class(dataset)
        if not known or (found is not None and _is_split(it, found)):
            return
        if _SHARDS.search(loader.module.text_of(loader.node)) or _SHARDS.search(dataset.name or ""):
            return
        _note(it, loader, "sampler-missing", "DataLoader without sampler", "the program is distributed")
    elif sampler is not None and (sampler.name or "").endswith("DistributedSampler") and isinstance(sampler.ref, tuple):
        shuffle = sampler.ref[0].named.get("shuffle")
        around = any(loaders.epochs_around(frames) is not None for frames in loader.loops)
        if around and not (shuffle is not None and shuffle.const is False) and not _sets_epoch(it):
            given, _, node, module, statement = sampler.ref
            del given
            saved = it.module, it.statement, it.standalone
            it.module, it.statement, it.standalone = module, statement, loader.standalone
            it.note("set-epoch-missing", node, "DistributedSampler", None, detail=loader.site)
            it.module, it.statement, it.standalone = saved


def _is_split(it: Interpreter, found: tuple[object, object]) -> bool:
    cls = found[0]
    node, module = cls.node, cls.module  # type: ignore[attr-defined]
    text = "\n".join(module.lines[node.lineno - 1 : node.end_lineno])
    return bool(_SHARDS.search(text)) or classes.inherits(it, cls, found[1], "IterableDataset")  # type: ignore[arg-type]


def _sets_epoch(it: Interpreter) -> bool:
    return any("set_epoch(" in scope.module.source.text for scope in it.scopes.values())
