"""Writes what was seen: a record about once a second and at the end, and every step at once into a mapped file.

The mapped file survives SIGKILL, so a script that hangs or is killed loses no step.
"""

import atexit
import json
import mmap
import os
import platform
import struct
import sys

from _gpudoctor_watch import state
from _gpudoctor_watch.state import W, clock

_STEP = struct.Struct("<5d")
_HEAD = struct.Struct("<d")
_map = None
_logged = 0
_next_partial = 0.0


def register():
    atexit.register(_at_exit)


def after_fork():
    global _map, _logged, _next_partial
    _map, _logged, _next_partial = None, 0, 0.0  # the parent's mapping stays the parent's


def _path(suffix):
    return os.path.join(W.plan["record_dir"], suffix)


def mark(name, text):
    """A small file in the record directory, by rename."""
    with open(_path("." + name), "w", encoding="ascii") as file:
        file.write(text)
    os.replace(_path("." + name), _path(name))


def log_step(values):
    global _map, _logged
    if _map is None:
        size = _HEAD.size + state.KEEP_STEPS * _STEP.size
        handle = os.open(_path(f"steps-{W.pid}.bin"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, size)
            _map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
    _STEP.pack_into(_map, _HEAD.size + _logged * _STEP.size, *values)
    _logged += 1
    _HEAD.pack_into(_map, 0, _logged)


def rewind():
    global _logged
    _logged = 0
    if _map is not None:
        _HEAD.pack_into(_map, 0, 0)


def maybe_write_partial(now):
    global _next_partial
    if now < _next_partial:
        return
    write(final=False)
    cost = clock() - now
    _next_partial = now + max(1.0, 200 * cost)
    parent = W.plan["parent_pid"]
    if parent:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)  # nobody reads the record any more: do not run on for hours
        except OSError:
            pass


def _at_exit():
    if not W.active or W.stopping or os.getpid() != W.pid:
        return
    if W.frozen is not None:
        if W.window is not None:
            W.window.close()
        write(final=True)
        return
    try:
        value = getattr(sys, "last_value", None)
        if value is None:
            W.ended = "exit"
        else:
            W.ended = "exception"
            W.exception = _describe(value)
        write(final=True)
    except Exception as error:
        sys.stderr.write(f"gpudoctor: the record could not be written: {error}\n")


def _describe(value):
    text = (str(value).strip().splitlines() or [""])[0][:300]
    site, trace = None, value.__traceback__
    while trace is not None:
        if state.kind_of(trace.tb_frame) == state.USER:
            site = f"{state.shown_path(os.path.realpath(trace.tb_frame.f_code.co_filename))}:{trace.tb_lineno}"
        trace = trace.tb_next
    return "{}: {}{}".format(type(value).__name__, text, f" ({site})" if site else "")


def write(final):
    """Writes record-<pid>.json by rename. A process in which torch was never imported has nothing to tell."""
    if W.torch is None and not W.writes:
        return
    try:
        raw = json.dumps(_build(final) if W.frozen is None else _thawed(), allow_nan=False)
    except Exception as error:
        if not final:
            W.failed("partial record", error)
            return
        raw = json.dumps({"pid": W.pid, "ended": W.ended, "notes": [f"watcher: {error}", *W.notes]})
    path = _path(f"record-{W.pid}.json")
    with open(path + ".part", "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(raw)
    os.replace(path + ".part", path)


def freeze():
    """What the record says from now on, while steps that do not count are recorded with the profiler."""
    W.frozen = _build(final=True)
    write(final=True)


def _thawed():
    if W.window is None:
        return W.frozen
    syncs = [entry.facts(key, W.frozen["steady_from"]) for key, entry in sorted(W.syncs.items())]
    return {**W.frozen, "syncs": syncs, "window": W.window.facts(), "notes": W.notes}


def _build(final):
    from _gpudoctor_watch import cost, imports, sites, steady, steps

    torch = W.torch
    rank, world_size = state.ranks()
    cuda = bool(torch is not None and torch.cuda.is_initialized())
    batches = [info.batches for info in W.loaders if info.train] or [info.batches for info in W.loaders]
    begun = steps.begin()
    watched = None
    if W.step_count and begun is not None:
        watched = W.last_step_end - begun[0]
    elif W.step_count > 1:
        watched = None
        W.note("the begin of the first step was not seen: rates cover the steps after it")
    per_s = W.step_count / watched if watched else None
    if per_s is None and W.step_count > 1 and W.last_step_end > W.first_step_end:
        watched = W.last_step_end - W.first_step_end
        per_s = (W.step_count - 1) / watched
    if W.step_count > len(W.steps):
        W.note(f"only the first {len(W.steps)} steps are kept one by one")
    patched, missed = imports.executed_lines()
    steady_from = steady.begin([values[0] for values in W.steps], sites.EARLY)
    result = {
        "version": 1,
        "pid": W.pid,
        "rank": rank,
        "local_rank": state.launched("LOCAL_RANK"),
        "world_size": world_size,
        "argv": [str(part) for part in getattr(sys, "argv", [])],
        "cwd": W.cwd,
        "python": platform.python_version(),
        "torch": str(torch.__version__) if torch is not None else None,
        "cuda": cuda,
        "device": _device(torch) if cuda else None,
        "gpu": _gpu(torch) if cuda else None,
        "gpus_visible": torch.cuda.device_count() if cuda else None,
        "ended": W.ended,
        "exception": W.exception,
        "step_source": steps.NAMES[W.source_rank],
        "step_site": W.plan["step_at"] if W.source_rank == steps.STEP_AT else None,
        "optimizer_steps": W.optimizer_steps,
        "optimizer_steps_all": W.optimizer_steps_all,
        "optimizers": len(W.optimizers),
        "skipped_steps": W.skipped_steps,
        "batches": sum(batches),
        "backwards": W.backwards,
        "module_calls": W.module_calls,
        "counts_differ": _differ(sum(batches)),
        "steps": [_step(values) for values in W.steps] if final else [],  # until then they stand in the mapped file
        "steady_from": steady_from,
        "watched_s": watched,
        "steps_per_s": per_s,
        "batches_per_s": sum(batches) / watched if watched and sum(batches) else None,
        "start_up_s": W.process_age + begun[0] - W.t0 if begun is not None else None,
        "loaders": [info.facts(steady_from) for info in W.loaders[:64]],
        "copies": [entry.facts(key, steady_from) for key, entry in sorted(W.copies.items())],
        "syncs": [entry.facts(key, steady_from) for key, entry in sorted(W.syncs.items())],
        "patched_lines": patched,
        "patched_missed": missed,
        "writes": sorted(W.writes),
        "compiled": W.compiled,
        "alloc_retries": _alloc_retries(torch) if cuda else None,
        "communication": None,
        "proof": None,
        "overhead_ms": cost.total() * 1e3,
        "window": None,
        "notes": W.notes,
    }
    if W.plan["watch_ranks"]:
        from _gpudoctor_watch import ranks

        result["communication"] = ranks.facts()
    if W.plan["proof"] is not None:
        from _gpudoctor_watch import proof

        result["proof"] = proof.facts(final)
    return result


def _step(values):
    return {
        "wall_ms": values[0],
        "loader_wait_ms": values[1],
        "copy_wait_ms": values[2],
        "sync_wait_ms": values[3],
        "communication_ms": values[4],
    }


def _device(torch):
    try:
        return str(torch.cuda.get_device_name())
    except Exception:
        return None


def _gpu(torch):
    """The GPU that is used, which need not be the current one: tensors may be sent to another without set_device.
    Asking the allocator opens no context on the others."""
    try:
        used = max(range(torch.cuda.device_count()), key=torch.cuda.memory_allocated)
        return f"GPU-{torch.cuda.get_device_properties(used).uuid}"
    except Exception:
        return None  # torch before 2.4 knows no UUID


def _alloc_retries(torch):
    """How often the allocator gave all cached memory back to the driver to serve one request."""
    try:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
    except Exception:
        return None


def _differ(batches):
    """Optimizer steps, batches and backward calls disagree by more than one batch fetched ahead."""
    if not W.optimizer_steps:
        counts = [W.step_count]
    else:
        counts = [W.optimizer_steps + W.skipped_steps]
        if W.optimizer_steps_all != W.optimizer_steps:
            counts.append(W.optimizer_steps_all)
    counts += [count for count in (batches, W.backwards) if count]
    return max(counts) - min(counts) > 1
