"""What a dataset holds that workers share or must be sent: open files, and what pickling it costs."""

import io
import pickle
import sys

_HANDLES = {
    "h5py._hl.files": "h5py.File",
    "zipfile": "zipfile.ZipFile",
    "tarfile": "tarfile.TarFile",
    "lmdb": "lmdb.Environment",
    "sqlite3": "sqlite3.Connection",
}


def handles(value, path, depth, seen):
    """Open files among the attributes, a few levels deep. Properties are not called."""
    if depth > 3 or id(value) in seen or len(seen) > 5000:
        return
    seen.add(id(value))
    if depth:
        kind = _handle_kind(value)
        if kind is not None:
            yield f"{path}: {kind}"
            return
    if isinstance(value, dict):
        items = [(f"{path}[{key!r}]"[:80], item) for key, item in list(value.items())[:50]]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{number}]", item) for number, item in enumerate(value[:50])]
    elif hasattr(value, "__dict__") and not isinstance(value, type) and type(value).__module__ != "torch":
        items = [(f"{path}.{name}" if path else name, item) for name, item in list(vars(value).items())[:200]]
    else:
        return
    for name, item in items:
        if isinstance(item, (str, bytes, int, float, bool, type(None))):
            continue
        yield from handles(item, name, depth + 1, seen)


def _handle_kind(value):
    if isinstance(value, io.IOBase):
        if isinstance(value, (io.BytesIO, io.StringIO)) or value.closed or not value.readable():
            return None
        return "open file"
    module, name = type(value).__module__, type(value).__name__
    for prefix, shown in _HANDLES.items():
        if (module == prefix or module.startswith(prefix + ".")) and name == shown.rpartition(".")[2]:
            try:
                return shown if _is_open(value, shown) else None
            except Exception:
                return shown
    return None


def _is_open(value, kind):
    if kind == "h5py.File":
        return bool(value)  # False once closed
    if kind == "zipfile.ZipFile":
        return value.fp is not None
    if kind == "tarfile.TarFile":
        return not value.closed
    return True


class _Count(io.RawIOBase):
    def __init__(self):
        self.total = 0

    def writable(self):
        return True

    def write(self, data):
        size = memoryview(data).nbytes
        self.total += size
        return size


class _Pickler(pickle.Pickler):
    """Counts what tensors and arrays would take, and does not copy them."""

    def __init__(self, file):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.arrays = 0

    def reducer_override(self, value):
        torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
        if type(value) is torch.Tensor:
            self.arrays += value.numel() * value.element_size()
            return int, ()
        if numpy is not None and type(value) is numpy.ndarray and value.dtype != object:
            self.arrays += value.nbytes
            return int, ()
        return NotImplemented


def pickled(loader, facts):
    """What a spawned worker would be sent: the dataset, the collate function and worker_init_fn."""
    count = _Count()
    pickler = _Pickler(count)
    try:
        pickler.dump((loader.dataset, loader.collate_fn, loader.worker_init_fn))
        facts["pickle_bytes"] = count.total + pickler.arrays
    except BaseException as error:
        text = (str(error).strip().splitlines() or [""])[0][:300]
        facts["pickle_error"] = f"{type(error).__name__}: {text}"
    dataset = loader.dataset
    if hasattr(dataset, "state_dict"):
        try:
            facts["state_bytes"] = len(pickle.dumps(dataset.state_dict()))
        except Exception as error:
            facts["notes"].append(f"state_dict of the dataset: {type(error).__name__}")
