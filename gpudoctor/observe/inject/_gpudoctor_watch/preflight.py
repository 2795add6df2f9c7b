"""Looks at the dataset before any candidate is run, in a forked child that alone touches it.

Rows come in the order of the loader's own sampler. What the system can tell (storage reads, CPU time of other
threads) is asked for each pass, so that waiting, computing and reading are told apart.
"""

import os
import sys
import time

from _gpudoctor_watch import held, in_worker, pools

MOST_ROWS = 256  # fewer may hold one or none of the dear rows that decide how uneven they are
_LEAST_CPU_S = 0.005  # of which a share can be told
MOST_AGAIN = 8  # of the slowest rows
MOST_FAILED = 4  # rows in turn that raise, before the look ends
DROP_BYTES = 256 * 2**20  # larger files keep their place in the page cache: others may be reading them


def look(loader, seconds, mapped, folder):
    """The facts of a LoaderPreflight; a row that fails ends the look and is told as a fault."""
    facts = {"notes": []}
    dataset = loader.dataset
    facts["handles"] = sorted(set(held.handles(dataset, "", 0, set())))[:20]
    every = getattr(loader, "snapshot_every_n_steps", None)
    facts["snapshot_every"] = every if isinstance(every, int) else None
    held.pickled(loader, facts)
    in_worker.put(mapped, 1, in_worker.PID, os.getpid())
    looked = _Look(loader, seconds, mapped)
    try:
        looked.fetch(facts)
    except StopIteration:
        facts["ends_early_at"] = looked.index
    except BaseException as error:
        facts["fault"] = {"kind": "exception", **in_worker.describe_error(error), "index": looked.index}
    if looked.failed:
        index, failure = looked.failed[0]
        facts["fault"] = {"kind": "exception", **in_worker.describe_error(failure), "index": index}
        facts["rows_failed"] = len(looked.failed)
    facts["pools"] = pools.sizes()
    facts["helper_share"] = looked.helper_share()
    return facts


# --- rows -------------------------------------------------------------------------------------------------------


class _Look:
    def __init__(self, loader, seconds, mapped):
        self.loader, self.mapped = loader, mapped
        self.deadline = time.monotonic() + seconds
        self.index = None
        self.begun = None
        self.opened = set()
        self.failed = []

    def fetch(self, facts):
        data = sys.modules["torch.utils.data"]
        sys.addaudithook(self._audit)
        self.begun = (time.process_time(), time.thread_time())
        if isinstance(self.loader.dataset, data.IterableDataset):
            self._iterable(facts)
        elif hasattr(self.loader.dataset, "__getitem__"):
            self._map(facts)
        else:
            facts["notes"].append("the dataset has no __getitem__ and is not iterable: its rows were not timed")

    def helper_share(self):
        """CPU time of all threads but the fetching one, over that one's: native pools at work."""
        if self.begun is None:
            return None
        own = time.thread_time() - self.begun[1]
        return max(0.0, time.process_time() - self.begun[0] - own) / own if own >= _LEAST_CPU_S else None

    def _audit(self, event, args):
        if event == "open" and isinstance(args[0], str) and len(self.opened) < 500:
            mode = args[1]
            if not (isinstance(mode, str) and ("w" in mode or "a" in mode or "+" in mode)):
                self.opened.add(args[0])

    def _timed(self, function):
        """(result, wall, CPU of this thread, bytes read from storage) of one call.

        The time in which this thread could have run, and another process had the CPU, is no part of the wall time:
        it says nothing of the row.
        """
        read, waited = _storage_bytes(), _queued_s()
        thread, begun = time.thread_time(), time.perf_counter()
        try:
            result = function()
        finally:
            wall = time.perf_counter() - begun
            cpu = time.thread_time() - thread
        return result, max(cpu, wall - (_queued_s() - waited)), cpu, _storage_bytes() - read

    def _row(self, index):
        self.index = index if isinstance(index, int) else None
        in_worker.put(self.mapped, 1, in_worker.INDEX, in_worker._number(index))
        in_worker.put(self.mapped, 1, in_worker.BUSY_SINCE, time.monotonic())
        return self._timed(lambda: self.loader.dataset[index])

    def _tried(self, index):
        """As `_row`; a row that raises costs (None, ...) and is kept for later, a few times."""
        try:
            return self._row(index)
        except StopIteration:
            raise
        except Exception as error:
            self.failed.append((self.index, error))
            if len(self.failed) >= MOST_FAILED or time.monotonic() > self.deadline:
                raise
            return None, None, 0.0, 0

    def _map(self, facts):
        batches = self._indices()
        if not batches:
            facts["notes"].append("the loader gives no batch")
            return
        whole = self.loader.batch_sampler is None or getattr(self.loader.dataset, "__getitems__", None)
        before = _random_states(self.loader.dataset)
        timed, first_batch = [], None
        for batch in batches:
            part = []
            if whole:
                single = self.loader.batch_sampler is None
                fetch = self.loader.dataset.__getitem__ if single else self.loader.dataset.__getitems__
                part, *cost = self._timed(lambda fetch=fetch, batch=batch: fetch(batch))
                timed.append((batch, *cost))
            else:
                for index in batch:
                    row, *cost = self._tried(index)
                    if cost[0] is None:
                        continue
                    part.append(row)
                    timed.append((index, *cost))
                    if time.monotonic() > self.deadline and len(timed) > 3:
                        break
            first_batch = first_batch or part
            if time.monotonic() > self.deadline or len(timed) >= MOST_ROWS:
                break
        facts["draws_random"] = _random_states(self.loader.dataset)[0] != before[0]
        facts["generators"] = [
            name for name, state in _random_states(self.loader.dataset)[1].items() if before[1].get(name) != state
        ]
        if not timed:
            return
        self._costs(timed, facts, count_of=len if whole else None)
        self._slowest(timed, whole, facts)
        self._again(timed, whole, facts)
        self._collated(first_batch, facts, auto=not (whole and self.loader.batch_sampler is None))

    def _iterable(self, facts):
        before = _random_states(self.loader.dataset)
        size = self.loader.batch_size or 1
        iterator, *cost = self._timed(lambda: iter(self.loader.dataset))
        timed, rows = [], []
        while len(timed) < max(MOST_ROWS, size) and (time.monotonic() < self.deadline or not timed):
            in_worker.put(self.mapped, 1, in_worker.BUSY_SINCE, time.monotonic())
            row, *cost = self._timed(lambda: next(iterator, _END))
            if row is _END:
                break
            if len(rows) < size:
                rows.append(row)
            timed.append((None, *cost))
        facts["draws_random"] = _random_states(self.loader.dataset)[0] != before[0]
        if not timed:
            facts["notes"].append("the loader gives no batch")
            return
        self._costs(timed, facts)
        auto = self.loader.batch_size is not None
        self._collated(rows[:size] if auto else rows[0], facts, auto=auto)

    def _indices(self):
        """The first batches of indices that the loader's own sampler gives."""
        sampler = self.loader.batch_sampler if self.loader.batch_sampler is not None else self.loader.sampler
        batches, count = [], 0
        for indices in sampler:
            batch = list(indices) if isinstance(indices, (list, tuple)) else [indices]
            batches.append(batch if self.loader.batch_sampler is not None else indices)
            count += len(batch)
            if count >= MOST_ROWS:
                break
        return batches

    def _costs(self, timed, facts, count_of=None):
        walls = []
        for index, wall, _, _ in timed:
            count = count_of(index) if count_of is not None and isinstance(index, (list, tuple)) else 1
            walls.append(1e3 * wall / max(1, count))
        mean = sum(walls) / len(walls)
        facts["rows"] = len(walls)
        facts["row_ms"] = sorted(walls)[len(walls) // 2]
        facts["row_mean_ms"] = mean
        facts["row_max_ms"] = max(walls)
        if len(walls) >= 8 and mean > 0:
            facts["row_variation"] = _variation(sorted(walls)[: -max(1, len(walls) // 64)])  # may have been disturbed
        total = sum(wall for _, wall, _, _ in timed)
        facts["cpu_share"] = min(1.0, sum(cpu for _, _, cpu, _ in timed) / total) if total > 0 else None

    def _slowest(self, timed, whole, facts):
        """The slowest rows once more: dear each time, or disturbed from outside?"""
        walls = [entry[1] for entry in timed]
        if whole or len(walls) < 8 or sum(walls) <= 0:
            return
        for number in sorted(range(len(walls)), key=walls.__getitem__)[-MOST_AGAIN:]:
            if time.monotonic() > self.deadline + 1.0:
                return
            _, wall, *_ = self._tried(timed[number][0])
            walls[number] = min(walls[number], wall if wall is not None else walls[number])
        facts["row_variation"] = _variation(walls)

    def _again(self, timed, whole, facts):
        """The same rows once more: from memory if they were read from storage, and equal if nothing is drawn."""
        cold = [entry for entry in timed if entry[3] > 0]
        if not cold:
            self._drop_pages()
            cold = []
            for index, *_ in timed[:16]:
                if time.monotonic() > self.deadline + 2.0:
                    break
                _, wall, cpu, read = self._one(index, whole)
                if read > 0:
                    cold.append((index, wall, cpu, read))
        warm = []
        for index, *_ in (cold or timed)[:16]:
            if time.monotonic() > self.deadline + 3.0:
                break
            _, wall, _, read = self._one(index, whole)
            if read == 0:
                warm.append((index, wall))
        if len(warm) >= 2 and not facts.get("draws_random"):
            facts["repeatable"] = all(self._equal(index, whole) for index, _ in warm[:2])
        if len(cold) >= 3 and len(warm) >= 3:
            facts["cold_ms"] = 1e3 * sum(entry[1] for entry in cold) / len(cold)
            facts["warm_ms"] = 1e3 * sum(wall for _, wall in warm) / len(warm)
            facts["storage_bytes"] = int(sum(entry[3] for entry in cold))

    def _one(self, index, whole):
        if not whole:
            return self._row(index)
        single = self.loader.batch_sampler is None
        fetch = self.loader.dataset.__getitem__ if single else self.loader.dataset.__getitems__
        return self._timed(lambda: fetch(index))

    def _equal(self, index, whole):
        one, two = self._one(index, whole)[0], self._one(index, whole)[0]
        return in_worker.fingerprint(one) == in_worker.fingerprint(two)

    def _drop_pages(self):
        """Ask the kernel to forget the pages of the small files that the rows came from."""
        if not hasattr(os, "posix_fadvise"):
            return
        for path in _data_files(self.opened):
            try:
                handle = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(handle)
            except OSError:  # noqa: PERF203 - one file must not cost the others
                continue

    def _collated(self, rows, facts, auto):
        if rows is None or (auto and not rows):
            return
        row = rows[0] if auto and isinstance(rows, (list, tuple)) else rows
        tensors = []
        _tensors(row, tensors)
        if tensors and auto:
            facts["row_bytes"] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        largest = max(tensors, key=lambda tensor: tensor.numel(), default=None)
        torch = sys.modules["torch"]
        if largest is not None and largest.dtype == torch.float32 and largest.dim() >= 3:
            facts["float_images"] = largest.numel() >= 1024
        self.index = None
        in_worker.put(self.mapped, 1, in_worker.INDEX, -1.0)
        in_worker.put(self.mapped, 1, in_worker.BUSY_SINCE, time.monotonic())
        batch, wall, _, _ = self._timed(lambda: self.loader.collate_fn(rows))
        facts["collate_ms"] = 1e3 * wall
        tensors = []
        _tensors(batch, tensors)
        if tensors:
            facts["batch_bytes"] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            facts["batch_tensors"] = len(tensors)


_END = object()


def _tensors(value, found, depth=0):
    """Tensors of a row or batch; numpy arrays become tensors when they are collated or sent."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "fiub":
        found.append(torch.from_numpy(value.copy() if not value.flags.writeable else value))
    elif depth < 6 and isinstance(value, dict):
        for item in value.values():
            _tensors(item, found, depth + 1)
    elif depth < 6 and isinstance(value, (list, tuple)):
        for item in value:
            _tensors(item, found, depth + 1)


def _storage_bytes():
    try:
        with open("/proc/self/io", "rb") as file:
            for line in file:
                if line.startswith(b"read_bytes"):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0


def _queued_s():
    """Seconds that this thread has waited for a CPU, ready to run; 0 where the kernel does not tell."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _data_files(opened):
    """Regular files that were opened, are open, or are mapped, and are no code."""
    paths = set(opened)
    try:
        for name in os.listdir("/proc/self/fd"):
            paths.add(os.readlink(f"/proc/self/fd/{name}"))
    except OSError:
        pass
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                if "/" in line and " r-xp " not in line:
                    paths.add(line[line.index("/") :].rstrip("\n"))
    except OSError:
        pass
    for path in paths:
        if path.startswith(("/proc/", "/sys/", "/dev/")) or ".so" in os.path.basename(path):
            continue
        if path.endswith((".py", ".pyc", ".pth")) or "/site-packages/" in path:
            continue
        try:
            stat = os.stat(path)
        except (OSError, ValueError):
            continue
        if os.path.isfile(path) and 0 < stat.st_size <= DROP_BYTES:
            yield path


def _random_states(dataset):
    """(state of the global generators, {stored generator: state})."""
    import random

    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    states = [hash(random.getstate()), hash(torch.get_rng_state().numpy().tobytes())]
    if numpy is not None:
        states.append(hash(numpy.random.get_state()[1].tobytes()) ^ numpy.random.get_state()[2])
    stored = {name: repr(in_worker.generator_state(value)) for name, value in in_worker.stored_generators(dataset)}
    return states, stored


def _variation(walls):
    """Standard deviation over mean."""
    middle = sum(walls) / len(walls)
    return (sum((wall - middle) ** 2 for wall in walls) / len(walls)) ** 0.5 / middle
