"""Compares, in a forked child, rows fetched one by one with one index by a list of the same rows.

The child is forked because a dataset may open files or draw random numbers when it is touched, and the process that
will fork the loader's workers must not see any of it.
"""

import json
import os
import random
import select
import signal
import sys
import time

from _gpudoctor_watch.state import W, clock

DEADLINE_S = 20.0


def probe(loader, info):
    """A FetchProbe as a dict, or None where the loader is not one that whole-batch fetching could replace."""
    facts = info.settings
    rows = min(facts["batch_size"] or 0, facts["dataset_len"] or 0)
    if facts["iterable_dataset"] or facts["custom_collate"] or rows < 1 or not hasattr(loader.dataset, "__getitem__"):
        return None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(loader, rows, facts["dataset_len"], writing)
    os.close(writing)
    raw = b""
    deadline = clock() + DEADLINE_S
    try:
        while True:
            left = deadline - clock()
            ready = select.select([reading], [], [], max(0.0, left))[0]
            if not ready:
                break
            part = os.read(reading, 65536)
            if not part:
                break
            raw += part
    finally:
        os.close(reading)
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(child, 0)
    try:
        return json.loads(raw.decode())
    except ValueError:
        return _result(rows, error=f"no answer within {DEADLINE_S:g} s")


def _result(rows, row=0.0, whole=0.0, equal=False, draws=False, repeatable=False, error=None):
    return {
        "rows": rows,
        "row_by_row_ms": row,
        "whole_batch_ms": whole,
        "equal": equal,
        "draws_random": draws,
        "repeatable": repeatable,
        "error": error,
    }


def _in_child(loader, rows, total, writing):
    try:
        W.active = False
        quiet = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(quiet, handle)
        W.torch.set_num_threads(1)
        try:
            answer = _compare(loader, rows, total)
        except BaseException as error:
            answer = _result(rows, error=f"{type(error).__name__}: {str(error)[:300]}")
        os.write(writing, json.dumps(answer).encode())
    finally:
        os._exit(0)


def _compare(loader, rows, total):
    from _gpudoctor_watch import proof

    torch = W.torch
    collate = sys.modules["torch.utils.data._utils.collate"]
    dataset = loader.dataset
    indices = [number * total // rows for number in range(rows)]

    def row_by_row():
        if hasattr(dataset, "__getitems__") and dataset.__getitems__:
            return collate.default_collate(dataset.__getitems__(indices))
        return collate.default_collate([dataset[number] for number in indices])

    before = _generators(torch)
    first = proof._hash(row_by_row())
    draws = _generators(torch) != before
    random_state = _generators(torch)
    row_ms, second = _timed(row_by_row)
    repeatable = proof._hash(second) == first
    try:
        whole_ms, whole = _timed(lambda: collate.default_convert(dataset[indices]))
        equal = proof._hash(whole) == first
    except Exception as error:
        return _result(rows, row_ms, 0.0, False, draws, repeatable, f"{type(error).__name__}: {str(error)[:300]}")
    return _result(rows, row_ms, whole_ms, equal, draws or _generators(torch) != random_state, repeatable)


def _timed(function):
    """Milliseconds of the fastest of a few calls, and the last result."""
    best, until = None, time.monotonic() + 1.0
    for _ in range(3):
        begun = clock()
        result = function()
        spent = (clock() - begun) * 1e3
        best = spent if best is None else min(best, spent)
        if time.monotonic() > until:
            break
    return best, result


def _generators(torch):
    numpy = sys.modules.get("numpy")
    state = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state.append((kind, keys.tobytes(), tuple(rest)))
    return state
