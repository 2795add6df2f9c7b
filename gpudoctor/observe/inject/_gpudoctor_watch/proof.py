"""Seeds and deterministic algorithms, and hashes of what was delivered and learnt, to compare two runs."""

import ctypes
import hashlib
import os
import random

from _gpudoctor_watch.state import W, local


def _seed():
    return int((W.plan["proof"] or {}).get("seed") or 0)


def _forced(text):
    if text not in W.forced:
        W.forced.append(text)


def seed_random():
    random.seed(_seed())
    _forced("random.seed")
    for name in ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"):
        if name in os.environ:
            _forced(f"{name}={os.environ[name]}")


def seed_numpy(numpy):
    numpy.random.seed(_seed())
    _forced("numpy.random.seed")


def seed_torch(torch):
    torch.manual_seed(_seed())
    _forced("torch.manual_seed")
    torch.use_deterministic_algorithms(True, warn_only=True)
    _forced("torch.use_deterministic_algorithms")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    _forced("cudnn.deterministic")


def _feed(digest, value, depth=0):
    """Tensors by type, shape and bytes; containers by their order alone (a list or a tuple of the same is equal)."""
    torch = W.torch
    if isinstance(value, torch.Tensor):
        _feed_tensor(digest, value)
    elif depth > 20:
        digest.update(b"deep")
    elif hasattr(value, "keys") and hasattr(value, "__getitem__"):
        for key in value.keys():
            digest.update(repr(key).encode())
            _feed(digest, value[key], depth + 1)
    elif isinstance(value, (list, tuple)):
        digest.update(b"(%d" % len(value))
        for item in value:
            _feed(digest, item, depth + 1)
    elif type(value).__module__ == "numpy":
        digest.update(str(value.dtype).encode() + repr(value.shape).encode() + value.tobytes())
    elif isinstance(value, (str, bytes, int, float, bool, complex, type(None))):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__qualname__.encode())
        if hasattr(value, "__dict__"):
            for key in sorted(vars(value)):
                digest.update(key.encode())
                _feed(digest, vars(value)[key], depth + 1)


def _feed_tensor(digest, tensor):
    torch = W.torch
    with torch.no_grad():
        if hasattr(tensor, "to_local"):  # DTensor: this rank's part
            tensor = tensor.to_local()
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        digest.update((f"{tensor.dtype}{tuple(tensor.shape)}").encode())
        size = tensor.numel() * tensor.element_size()
        if size:
            digest.update(ctypes.string_at(tensor.data_ptr(), size))


def _hash(value):
    digest = hashlib.blake2b(digest_size=16)
    local.call += 1
    try:
        _feed(digest, value)
    finally:
        local.call -= 1
    return digest.hexdigest()


class Epoch:
    """What one pass over one loader asked for and delivered."""

    def __init__(self):
        self.indices = []
        self.delivered = 0
        self.complete = False


def epoch_begins(iterator):
    """Multiprocess iterators draw their first indices while they are made: those stand in `_gpudoctor_early`."""
    epoch = Epoch()
    epoch.indices = iterator.__dict__.pop("_gpudoctor_early", [])
    iterator.__dict__["_gpudoctor_epoch"] = epoch
    W.epochs.append(epoch)


def index_drawn(iterator, index):
    row = _rows(index)
    if local.making:
        iterator.__dict__.setdefault("_gpudoctor_early", []).append(row)
        return
    epoch = iterator.__dict__.get("_gpudoctor_epoch")
    if epoch is not None:
        epoch.indices.append(row)


def _rows(index):
    if isinstance(index, (list, tuple)):
        return [_one(item) for item in index]
    if hasattr(index, "tolist"):
        local.call += 1
        try:
            rows = index.tolist()
        finally:
            local.call -= 1
        return rows if isinstance(rows, list) else [rows]
    return [_one(index)]


def _one(item):
    return item if isinstance(item, (int, str, type(None))) else str(item)


def batch_delivered(iterator, batch):
    W.batch_hashes.append(_hash(batch))
    epoch = iterator.__dict__.get("_gpudoctor_epoch")
    if epoch is not None:
        epoch.delivered += 1


def epoch_ended(iterator):
    epoch = iterator.__dict__.get("_gpudoctor_epoch")
    if epoch is not None:
        epoch.complete = True


def _text_hash(texts):
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


def facts(final):
    parameters = None
    if final:
        try:
            parameters = _parameters()
        except Exception as error:
            W.failed("parameters", error)
    rows, order, complete, duplicates, shuffled = [], [], [], 0, None
    for epoch in W.epochs:
        taken = [row for part in epoch.indices[: epoch.delivered] for row in part if row is not None]
        if not taken:
            continue  # an iterable dataset has no rows to name, and what was not delivered tells nothing
        texts = [str(row) for row in taken]
        complete.append(epoch.complete)
        order.append(_text_hash(texts))
        rows.append(_text_hash(sorted(texts)))
        duplicates += len(texts) - len(set(texts))
        if shuffled is None and len(taken) > 1 and all(isinstance(row, int) for row in taken):
            shuffled = any(after < before for before, after in zip(taken, taken[1:]))
    return {
        "parameters": parameters,
        "batches": list(W.batch_hashes),
        "rows": rows,
        "order": order,
        "shuffled": shuffled,
        "duplicates": duplicates,
        "complete": complete,
        "forced": list(W.forced),
    }


def _parameters():
    digest = hashlib.blake2b(digest_size=16)
    seen, count = set(), 0
    local.call += 1
    try:
        for reference in W.optimizers.values():
            optimizer = reference()
            for group in getattr(optimizer, "param_groups", None) or ():
                for parameter in group["params"]:
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        count += 1
                        _feed_tensor(digest, parameter)
    finally:
        local.call -= 1
    return digest.hexdigest() if count else None
