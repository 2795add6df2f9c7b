"""What a loader worker tells while a candidate is tried: counters in a mapped file, one slot a worker.

The file outlives the worker, so that one that hangs or is killed has told which row it was at. Nothing here may
change what a row is or when it is drawn.
"""

import faulthandler
import hashlib
import json
import mmap
import os
import signal
import struct
import sys
import time
import traceback

ENVIRONMENT = "GPUDOCTOR_WATCH_TRIAL"  # JSON; set in the process that makes the trial, inherited by its workers
SLOTS, FIELDS = 513, 40  # slot 0 belongs to the process that asks for batches
(
    BATCHES,
    SAMPLES,
    FETCH_S,
    COLLATE_S,
    BUSY_SINCE,  # time.monotonic() when the present row was asked for; 0 between batches
    INDEX,  # of that row, -1 when it is no integer
    PID,
    CPUS,
    THREADS_FIRST,
    THREADS_LAST,
    STOPPED_AT,  # index + 1 of a row that raised StopIteration
    GROWN,  # bytes allocated since this worker's first batch; most over its restarts
    GROWN_OVER,
    GROWN_STEPS,  # how often it grew further
    COPIED,  # bytes of shared pages that became its own since then, because they were written to
    COPIED_OVER,
    COPIED_STEPS,
    PRIVATE,
    RANDOM,  # fingerprint of the random generators, 48 bits
    STARTED,
    EPOCH,  # of slot 0: which request for an iterator this is
) = range(21)
DUMP_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
_MEMORY_SHARE = 50  # reading the private memory may take a fiftieth of the time
_MEMORY_EVERY_S = 0.005
_STEP_BYTES = 256 * 1024

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_map = None
_job: dict = {}
_slot = 0
_hashes = None
_dump_file = None
_first_private = None  # (private bytes, samples) after the first batch
_first_resident = None
_next_private = _next_resident = 0.0


def create(path):
    """The file, all zero; the mapping is the caller's."""
    with open(path, "wb") as file:
        file.truncate(SLOTS * FIELDS * 8)
    return open_map(path)


def open_map(path):
    handle = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(handle, SLOTS * FIELDS * 8)
    finally:
        os.close(handle)


def get(mapped, slot, field):
    return struct.unpack_from("<d", mapped, (slot * FIELDS + field) * 8)[0]


def put(mapped, slot, field, value):
    struct.pack_into("<d", mapped, (slot * FIELDS + field) * 8, value)


def slot_of(mapped, slot):
    return struct.unpack_from(f"<{FIELDS}d", mapped, slot * FIELDS * 8)


def job():
    """The trial that this process belongs to, or None."""
    text = os.environ.get(ENVIRONMENT)
    return json.loads(text) if text else None


def begin(worker=None):
    """In a worker before its loop; or, with worker=0, in the process itself when there are no workers."""
    global _map, _job, _dump_file
    _job = job() or {}
    if not _job:
        return
    try:
        _map = open_map(_job["counters"])
        _dump_file = open(os.path.join(_job["folder"], f"stack-{os.getpid()}"), "w")  # noqa: SIM115
        faulthandler.register(DUMP_SIGNAL, file=_dump_file, all_threads=True)
    except (OSError, ValueError, RuntimeError):
        _map = None
        return
    if worker is not None:
        _begin_slot(worker)
    fetch = sys.modules["torch.utils.data._utils.fetch"]
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        _count(getattr(fetch, name))


def _begin_slot(worker):
    global _slot
    _slot = worker + 1
    put(_map, _slot, PID, os.getpid())
    put(_map, _slot, STARTED, time.monotonic())
    if hasattr(os, "sched_getaffinity"):
        put(_map, _slot, CPUS, len(os.sched_getaffinity(0)))


def _add(field, value):
    put(_map, _slot, field, get(_map, _slot, field) + value)


def _count(fetcher_class):
    original = fetcher_class.fetch
    iterable = "Iterable" in fetcher_class.__name__

    def fetch(self, index):
        if _slot == 0:
            info = sys.modules["torch.utils.data._utils.worker"]._worker_info
            _begin_slot(info.id if info is not None else 0)
        first = not hasattr(self, "_gpudoctor")
        if first:
            _prepare(self, iterable)
        put(_map, _slot, INDEX, _number(index[0] if isinstance(index, (list, tuple)) and index else index))
        put(_map, _slot, BUSY_SINCE, time.monotonic())
        self._gpudoctor = (None, 0, 0.0)
        begun = time.perf_counter()
        try:
            batch = original(self, index)
        except BaseException as error:
            _failed(error, index, iterable)
            raise
        ended = time.perf_counter()
        collating, samples, _ = self._gpudoctor
        collated_s = ended - collating if collating is not None else 0.0
        _add(COLLATE_S, collated_s)
        _add(FETCH_S, ended - begun - collated_s)
        _add(SAMPLES, samples)
        _add(BATCHES, 1)
        put(_map, _slot, BUSY_SINCE, 0.0)
        if iterable and _job.get("hash") and _hashes is not None:
            _flush()
        _memory(first)
        return batch

    fetcher_class.fetch = fetch


def _prepare(fetcher, iterable):
    """Once an epoch: the collate function tells when fetching ended and what it got; a proxy tells which row."""
    global _hashes
    collate = fetcher.collate_fn
    auto = fetcher.auto_collation
    hashing = iterable and _job.get("hash")
    if hashing:
        if _hashes is not None:
            os.close(_hashes[0])
        path = os.path.join(_job["folder"], f"hashes-{get(_map, 0, EPOCH):.0f}-{os.getpid()}")
        _hashes = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), [])

    def timed(data):
        begun = time.perf_counter()
        samples = len(data) if auto and hasattr(data, "__len__") else _rows_of(data)
        if hashing:
            for row in data if auto else (data,):
                _hashes[1].append(fingerprint(row))
            put(_map, _slot, BUSY_SINCE, time.monotonic())
            begun = time.perf_counter()
        fetcher._gpudoctor = (begun, samples, 0.0)
        return collate(data)

    fetcher.collate_fn = timed
    if _job.get("one_thread"):
        from _gpudoctor_watch import pools

        pools.limit(1)
    fetcher._gpudoctor = (None, 0, 0.0)
    if get(_map, _slot, THREADS_FIRST) == 0:
        put(_map, _slot, THREADS_FIRST, _native_threads())
        put(_map, _slot, RANDOM, random_fingerprint(getattr(fetcher, "dataset", None)))
    if _job.get("follow") and not iterable and not getattr(fetcher.dataset, "__getitems__", None) and auto:
        fetcher.dataset = _Followed(fetcher.dataset)


class _Followed:
    """Stands for the dataset inside the fetcher and notes each index before it is fetched."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __getitem__(self, index):
        put(_map, _slot, INDEX, _number(index))
        put(_map, _slot, BUSY_SINCE, time.monotonic())
        return self._dataset[index]

    def __getattr__(self, name):
        return getattr(self._dataset, name)


def _number(index):
    try:
        return float(int(index))
    except (TypeError, ValueError):
        return -1.0


def _rows_of(data):
    """Rows of a batch that the dataset gave whole."""
    torch = sys.modules["torch"]
    for _ in range(4):
        if isinstance(data, torch.Tensor):
            return data.shape[0] if data.dim() else 1
        if isinstance(data, dict) and data:
            data = next(iter(data.values()))
        elif isinstance(data, (list, tuple)) and data:
            if not isinstance(data[0], (torch.Tensor, dict, list, tuple)):
                return len(data)
            data = data[0]
        else:
            shape = getattr(data, "shape", None)
            return int(shape[0]) if shape else 1
    return 1


def _failed(error, index, iterable):
    if isinstance(error, StopIteration):
        if not iterable:
            put(_map, _slot, STOPPED_AT, 1 + max(0.0, get(_map, _slot, INDEX)))
        put(_map, _slot, BUSY_SINCE, 0.0)
        return
    try:
        fault = describe_error(error)
        fault["worker"] = _slot - 1
        fault["index"] = index_in(error, index)
        path = os.path.join(_job["folder"], f"fault-{os.getpid()}.json")
        with open(path + ".part", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(fault, file)
        os.replace(path + ".part", path)
    except Exception:
        pass
    put(_map, _slot, BUSY_SINCE, 0.0)


def describe_error(error):
    """Type, first line and the user's innermost line."""
    from _gpudoctor_watch import state

    text = (str(error).strip().splitlines() or [""])[0][:500]
    site = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if state.kind_of(frame) == state.USER:
            site = f"{state.shown_path(os.path.realpath(frame.f_code.co_filename))}:{line}"
    return {"text": f"{type(error).__name__}: {text}" if text else type(error).__name__, "site": site}


def index_in(error, index):
    """The row that was being fetched: the loop variable of torch's own fetching line."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.endswith("fetch.py") and "idx" in frame.f_locals:
            number = _number(frame.f_locals["idx"])
            return int(number) if number >= 0 else None
    number = _number(index)
    return int(number) if number >= 0 else None


def fingerprint(value, depth=0):
    """Eight bytes that tell rows apart; long tensors are sampled. b"" when nothing of the row can be read."""
    digest = hashlib.blake2b(digest_size=8)
    return digest.digest() if _feed(digest, value, depth) else b""


def _feed(digest, value, depth):
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            return False
        flat = value.detach().reshape(-1)
        if flat.numel() > 2048:
            flat = flat[:: flat.numel() // 1024]
        digest.update(repr((tuple(value.shape), flat.tolist())).encode())
        return True
    if isinstance(value, (str, bytes, int, float, bool, complex)):
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
        return True
    if depth < 6 and isinstance(value, dict):
        return sum(_feed(digest, item, depth + 1) for item in value.values()) > 0
    if depth < 6 and isinstance(value, (list, tuple)):
        return sum(_feed(digest, item, depth + 1) for item in value[:64]) > 0
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        flat = value.reshape(-1) if hasattr(value, "reshape") else value
        digest.update(repr(getattr(value, "shape", ())).encode() + flat[:: max(1, flat.size // 1024)].tobytes())
        return True
    if hasattr(value, "tobytes") and hasattr(value, "size"):  # PIL images
        digest.update(repr(value.size).encode() + value.tobytes()[::97])
        return True
    return False


def _flush():
    handle, pending = _hashes
    if pending:
        os.write(handle, b"".join(item or b"\0" * 8 for item in pending))
        pending.clear()


def _memory(first):
    """Growth since the first batch. The resident size is cheap to read and sees what is allocated; the private size
    sees shared pages that were written to, too, but the kernel walks all pages for it."""
    global _first_private, _first_resident, _next_private, _next_resident
    now = time.monotonic()
    samples = get(_map, _slot, SAMPLES)
    if now >= _next_resident:
        _next_resident = now + _MEMORY_EVERY_S
        resident = _resident_bytes()
        if _first_resident is None:
            _first_resident = (resident, samples)
        else:
            _grown(GROWN, resident - _first_resident[0], samples - _first_resident[1])
    if not first and now < _next_private:
        return
    begun = time.perf_counter()
    used = private_bytes("self")
    _next_private = now + max(0.02, _MEMORY_SHARE * (time.perf_counter() - begun))
    put(_map, _slot, THREADS_LAST, max(_native_threads(), get(_map, _slot, THREADS_LAST)))
    if used is None:
        return
    put(_map, _slot, PRIVATE, used)
    if _first_private is None:
        _first_private = (used, samples)
    else:
        copied = used - _first_private[0] - get(_map, _slot, GROWN)
        _grown(COPIED, copied, samples - _first_private[1])


def _grown(field, size, samples):
    """The most bytes, the samples until then, and how often they became more: three fields in a row."""
    if size > get(_map, _slot, field) + _STEP_BYTES:
        put(_map, _slot, field, size)
        put(_map, _slot, field + 1, samples)
        _add(field + 2, 1)


def _resident_bytes():
    """Anonymous memory in use, without files and shared memory."""
    try:
        with open("/proc/self/statm", "rb") as file:
            parts = file.read().split()
        return (int(parts[1]) - int(parts[2])) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def private_bytes(pid):
    """Memory that is this process's alone (unique set size), or None."""
    total = None
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith((b"Private_Clean", b"Private_Dirty")):
                    total = (total or 0) + int(line.split()[1]) * 1024
    except OSError:
        return None
    return total


def _native_threads():
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def random_fingerprint(dataset):
    """48 bits of the states of the generators stored in the dataset, which fork copies; else of numpy's global one.
    0 when there is none."""
    states = [generator_state(generator) for _, generator in stored_generators(dataset)]
    numpy = sys.modules.get("numpy")
    if not states and numpy is not None:
        states = [numpy.random.get_state()[1].tobytes()]
    if not states:
        return 0.0
    return float(int.from_bytes(hashlib.blake2b(repr(states).encode(), digest_size=6).digest(), "little"))


def stored_generators(dataset, depth=0):
    """Random generators among the attributes of a dataset: (attribute, object)."""
    import random

    numpy = sys.modules.get("numpy")
    kinds = (random.Random,)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    for name, value in list((getattr(dataset, "__dict__", None) or {}).items())[:200]:
        if isinstance(value, kinds):
            yield name, value
        elif depth < 2 and type(value).__module__ not in ("builtins", "numpy", "torch") and hasattr(value, "__dict__"):
            for inner, generator in stored_generators(value, depth + 1):
                yield f"{name}.{inner}", generator


def generator_state(generator):
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:
        return bits.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()
