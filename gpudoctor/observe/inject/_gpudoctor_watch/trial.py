"""One candidate, run for a moment in a forked child: settings on the instance, batches asked for, times kept.

The child may do to the loader what it likes: it is a copy, and it ends with os._exit. With workers, nothing here
touches the dataset itself: only they do.
"""

import array
import os
import sys
import time

from _gpudoctor_watch import in_worker

KEEP = 400000  # batches whose times are kept
LEAST_BATCHES = 8


def configure(loader, setting):
    """Settings that DataLoader refuses after __init__ are read only when an iterator is made."""
    data = sys.modules["torch.utils.data"]
    put = lambda name, value: object.__setattr__(loader, name, value)  # noqa: E731
    workers = setting["workers"]
    put("num_workers", workers)
    put("prefetch_factor", setting["prefetch"] if workers else None)
    put("persistent_workers", bool(setting.get("persistent")) and workers > 0)
    put("timeout", 0)  # a worker that hangs is seen from outside, with its stack
    put("pin_memory", bool(setting.get("pin_memory")))
    if hasattr(loader, "in_order"):
        put("in_order", setting.get("in_order", True))
    put("_iterator", None)
    if setting.get("whole_batch") and loader.batch_size is not None and loader.batch_sampler is not None:
        collate = sys.modules["torch.utils.data._utils.collate"]
        sampler = data.BatchSampler(loader.sampler, loader.batch_size, loader.drop_last)
        for name, value in (("sampler", sampler), ("batch_size", None), ("batch_sampler", None), ("drop_last", False)):
            put(name, value)
        put("collate_fn", collate.default_convert)
    part = setting.get("part", "real")
    if part != "real":
        _ready_made(loader, part)


class _Rows:
    """A few rows, fetched once in each worker, given again and again."""

    def __init__(self, dataset, count):
        self.dataset, self.count, self.kept = dataset, count, {}

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        key = index % self.count if isinstance(index, int) else 0
        if key not in self.kept:
            self.kept[key] = self.dataset[index]
        return self.kept[key]


class _Batch:
    """One batch, made once in each worker by the loader's own means, given again and again."""

    def __init__(self, dataset, collate, auto):
        self.dataset, self.collate, self.auto, self.kept = dataset, collate, auto, None

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return index

    def make(self, indices):
        if self.kept is None:
            rows = [self.dataset[index] for index in indices] if self.auto else self.dataset[indices]
            self.kept = self.collate(rows)
        return self.kept


def _ready_made(loader, part):
    auto = loader.batch_sampler is not None
    if part == "rows":
        object.__setattr__(loader, "dataset", _Rows(loader.dataset, max(1, loader.batch_size or 1)))
    else:
        made = _Batch(loader.dataset, loader.collate_fn, auto)
        object.__setattr__(loader, "dataset", made)
        object.__setattr__(loader, "collate_fn", made.make)


class Times:
    """When each batch came and how many rows it had; epochs one after the other."""

    def __init__(self):
        self.asked = []  # a begin of iter() for each epoch
        self.ends = []  # number of batches when it ended by itself
        self.came = array.array("d")
        self.rows = array.array("l")
        self.waits = array.array("d")

    def epoch_of(self, number):
        first = self.ends[number - 1] if number else 0
        last = self.ends[number] if number < len(self.ends) else len(self.came)
        return first, last


def run(loader, setting, mapped):
    """The facts of a LoaderTrial that can be seen from here."""
    torch = sys.modules["torch"]
    if setting.get("seed") is not None:
        # Forked from one process, all trials would draw the same order, and agree on what its first rows cost.
        # torch.manual_seed would ask for CUDA, which a forked child must not.
        torch.default_generator.manual_seed(setting["seed"])
    configure(loader, setting)
    expected = _length(loader, setting)
    if setting["workers"] == 0:
        in_worker.begin(0)
    device = torch.device("cuda") if setting.get("device") else None
    times = Times()
    iterator = _consume(loader, setting, times, mapped, device, expected)
    result = {
        **summary(times, setting["workers"], setting["prefetch"], bool(setting.get("whole_epochs"))),
        "expected_batches": expected,
        "private_bytes": _private(iterator),
    }
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()
    return result


def _length(loader, setting):
    data = sys.modules["torch.utils.data"]
    if isinstance(loader.dataset, data.IterableDataset):
        return None  # len() of an iterable loader changes its state
    try:
        return len(loader)
    except Exception:
        return None


def _consume(loader, setting, times, mapped, device, expected):
    """Batches until the window is over: long enough for the queue to fill, and a whole number of rounds."""
    seconds, step_s = setting["seconds"], (setting.get("step_ms") or 0.0) / 1000
    step_cpu_s = min(step_s, (setting.get("step_cpu_ms") or 0.0) / 1000)
    workers = setting["workers"]
    warm = 2 * max(1, workers) * setting["prefetch"]
    least = warm + max(LEAST_BATCHES, 2 * workers)
    short, epochs = bool(setting.get("whole_epochs")), setting.get("epochs") or 0
    now = time.perf_counter
    begun = now()
    while True:
        in_worker.put(mapped, 0, in_worker.EPOCH, len(times.asked))
        times.asked.append(now())
        iterator = iter(loader)
        in_epoch = 0
        asked = times.asked[-1]
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                times.ends.append(len(times.came))
                break
            came = now()
            times.came.append(came)
            times.waits.append(came - asked)
            times.rows.append(in_worker._rows_of(batch))
            in_epoch += 1
            in_worker.put(mapped, 0, in_worker.BATCHES, len(times.came))
            in_worker.put(mapped, 0, in_worker.BUSY_SINCE, time.monotonic())
            if device is not None:
                _move(batch, device, bool(setting.get("pin_memory")))
            del batch
            if step_s:
                _step(step_s, step_cpu_s)
            asked = now()
            elapsed = asked - begun
            if len(times.ends) < epochs:
                continue
            enough = in_epoch >= least and in_epoch % max(1, workers) == 0
            if (not short and elapsed >= seconds and (enough or elapsed >= 3 * seconds)) or len(times.came) >= KEEP:
                return iterator
            if short and elapsed >= 4 * seconds:
                return iterator
        elapsed = now() - begun
        if in_epoch and len(times.ends) < epochs:
            continue
        enough = elapsed >= seconds and (len(times.ends) > 1 or not short)
        if in_epoch == 0 or enough or elapsed >= 4 * seconds or len(times.came) >= KEEP:
            return iterator


def _step(seconds, cpu_s):
    """A training step that uses a CPU for a part of its time, as the real one does, and waits for the rest."""
    until = time.perf_counter() + seconds
    busy = time.thread_time() + cpu_s
    while time.thread_time() < busy:
        pass
    left = until - time.perf_counter()
    if left > 0:
        time.sleep(left)


def _move(batch, device, non_blocking):
    torch = sys.modules["torch"]
    found = []
    _tensors(batch, found)
    for tensor in found:
        tensor.to(device, non_blocking=non_blocking)
    torch.cuda.synchronize()


def _tensors(value, found, depth=0):
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif depth < 6 and isinstance(value, dict):
        for item in value.values():
            _tensors(item, found, depth + 1)
    elif depth < 6 and isinstance(value, (list, tuple)):
        for item in value:
            _tensors(item, found, depth + 1)


def summary(times, workers, prefetch, whole_epochs):
    """Rates from the times: a window inside one epoch after the queue has filled; or whole epochs, where they are
    so short that no queue settles: then from the second request on, since the first start is told apart. When the
    first epoch did not come to its end, there is but a window of it.
    """
    count = len(times.came)
    if not count:
        return {"batches": 0, "samples": 0, "seconds": 0.0, "over": None, "epochs": len(times.ends)}
    firsts = []
    for number, asked in enumerate(times.asked):
        first, last = times.epoch_of(number)
        if last > first:
            firsts.append(times.came[first] - asked)
    window = None if whole_epochs and times.ends else _window(times, workers, prefetch)
    result = {
        "first_batch_s": firsts[0] if firsts else None,
        "restart_s": sorted(firsts[1:])[len(firsts[1:]) // 2] if len(firsts) > 1 else None,
        "epochs": len(times.ends),
        "epoch_batches": times.ends[0] if times.ends else None,
        "epoch_samples": sum(times.rows[: times.ends[0]]) if times.ends else None,
        "all_samples": sum(times.rows),
    }
    if window is not None:
        low, high = window
        result.update(over="window", batches=high - low, samples=sum(times.rows[low:high]))
        result["seconds"] = times.came[high - 1] - times.came[low - 1]
        waits = sorted(times.waits[low:high])
    else:
        later = bool(times.ends) and count - times.ends[0] >= LEAST_BATCHES // 2
        skip = 1 if len(times.ends) > 1 or later else 0
        low = times.ends[skip - 1] if skip else 0
        high = times.ends[-1] if len(times.ends) > skip else count
        result.update(over="epochs", batches=high - low, samples=sum(times.rows[low:high]))
        result["seconds"] = times.came[high - 1] - times.asked[skip]
        waits = sorted(times.waits[low:high])
    result["wait_ms"] = 1e3 * sum(waits) / len(waits)
    result["wait_p95_ms"] = 1e3 * waits[min(len(waits) - 1, int(0.95 * len(waits)))]
    return result


def _window(times, workers, prefetch):
    """The longest stretch of one epoch behind its warm-up, in whole rounds of the workers; None when too short."""
    best = None
    for number in range(len(times.asked)):
        first, last = times.epoch_of(number)
        length = last - first
        warm = min(2 * workers * prefetch, length // 2) if workers else 0
        low = first + max(1, warm)
        rounds = max(1, workers)
        high = low + (last - low) // rounds * rounds
        complete = number < len(times.ends)
        if workers and complete and length < 2 * workers * prefetch + max(LEAST_BATCHES, 2 * workers):
            continue
        if high - low >= max(4, workers) and (best is None or high - low > best[1] - best[0]):
            best = (low, high)
    return best


def _private(iterator):
    """Private memory of all workers together, or None."""
    sizes = [in_worker.private_bytes(process.pid) for process in getattr(iterator, "_workers", None) or ()]
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def shm_used():
    try:
        stat = os.statvfs("/dev/shm")  # noqa: S108 - it is only measured
    except OSError:
        return None
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize
