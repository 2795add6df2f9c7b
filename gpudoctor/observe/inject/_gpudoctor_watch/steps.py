"""Counts steps, whatever the script calls a step, and stops without raising into user code.

Sources, the later ones deciding over the earlier: loader batches, outermost calls of the first module, steps of
the first optimizer, executions of the line `step_at`.
"""

import functools
import os
import sys
import threading
import time
import weakref

from _gpudoctor_watch import record, state
from _gpudoctor_watch.state import W, clock

LOADER, MODULE, OPTIMIZER, STEP_AT = 1, 2, 3, 4
NAMES = ("none", "loader", "module", "optimizer", "step-at")

_originals: dict = {}
_module_depth = 0
_first_module = None


def install(torch):
    W.torch = torch
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_optimizer_stepped)
    _wrap(Optimizer, "__init__", _made_optimizer)
    _wrap(torch.autograd, "backward", _backward)
    _wrap(torch, "compile", _compile)
    _watch_modules(torch)
    scaler = getattr(sys.modules.get("torch.amp.grad_scaler"), "GradScaler", None)
    if scaler is None:
        scaler = getattr(sys.modules.get("torch.cuda.amp.grad_scaler"), "GradScaler", None)
    if scaler is not None and hasattr(scaler, "_maybe_opt_step"):
        _wrap(scaler, "_maybe_opt_step", _scaler_step)


def _wrap(owner, name, make):
    original = getattr(owner, name)
    wrapper = functools.wraps(original)(make(original))
    _originals[owner, name] = original
    setattr(owner, name, wrapper)


def _made_optimizer(original):
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        W.optimizers_made += 1
        _remember(self)
        _hook_again(type(self))

    return __init__


def _remember(optimizer):
    """In proof mode the optimizers are kept, so that their parameters can be hashed at the end."""
    try:
        if id(optimizer) not in W.optimizers:
            W.optimizers[id(optimizer)] = (lambda: optimizer) if W.plan["proof"] else weakref.ref(optimizer)
    except Exception as error:
        W.failed("optimizer", error)


def _optimizer_stepped(optimizer, args, kwargs):
    if not W.active:
        return
    try:
        _remember(optimizer)
        W.optimizer_steps_all += 1
        _mark_train()
        first = W.first_optimizer() if W.first_optimizer is not None else None
        if first is None:
            W.first_optimizer = weakref.ref(optimizer)
            W.step_thread = threading.get_ident()
            W.module_calls = 0  # they say nothing where an optimizer steps
            first = optimizer
            _unwatch_modules()
        if first is optimizer:
            W.optimizer_steps += 1
            tick(OPTIMIZER)
    except Exception as error:
        W.failed("optimizer step", error)


def _scaler_step(original):
    def _maybe_opt_step(self, *args, **kwargs):
        before = W.optimizer_steps_all
        result = original(self, *args, **kwargs)
        if W.active and W.optimizer_steps_all == before:
            W.skipped_steps += 1
        return result

    return _maybe_opt_step


def _backward(original):
    def backward(*args, **kwargs):
        if not W.active:
            return original(*args, **kwargs)
        _activity()
        result = original(*args, **kwargs)
        W.backwards += 1
        _mark_train()
        if W.plan["watch_ranks"]:
            from _gpudoctor_watch import ranks

            ranks.backward_ended()
        return result

    return backward


def _compile(original):
    def compiling(*args, **kwargs):
        W.compiled = True
        _unwatch_modules()
        result = original(*args, **kwargs)
        for reference in list(W.optimizers.values()):
            _hook_again(type(reference()))
        return result

    return compiling


def _hook_again(kind):
    """torch.compile of older versions takes the wrapper that calls the step hooks off every optimizer class."""
    try:
        step = getattr(kind, "step", None)
        if not getattr(step, "hooked", False) or hasattr(step, "_gpudoctor"):
            return
        hooking, layer = kind.profile_hook_step(step).__code__, step
        while layer is not None:
            if getattr(layer, "__code__", None) is hooking:
                return  # the wrapper is still there
            layer = getattr(layer, "__wrapped__", None)

        @functools.wraps(step)
        def hooked_step(self, *args, **kwargs):
            result = step(self, *args, **kwargs)
            _optimizer_stepped(self, args, kwargs)
            return result

        hooked_step._gpudoctor = True
        kind.step = hooked_step
    except Exception as error:
        W.failed("optimizer hooks", error)


def _mark_train():
    if W.last_loader is not None:
        W.last_loader.train = True


def _activity():
    if W.first_activity is None and W.optimizers_made:
        W.first_activity = (clock(), tuple(W.waits))


# --- modules: only while no optimizer has stepped and nothing is compiled ---------------------------------------


def _watch_modules(torch):
    module_class = torch.nn.Module
    original = module_class.__call__

    def __call__(self, *args, **kwargs):
        global _module_depth, _first_module
        if _module_depth or not W.active:
            return original(self, *args, **kwargs)
        _activity()
        begun = (clock(), tuple(W.waits))
        _module_depth += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            _module_depth -= 1
        try:
            first = _first_module() if _first_module is not None else None
            if first is None:
                _first_module = weakref.ref(self)
                first = self
            if first is self:
                W.module_calls += 1
                if W.step_begin is None:
                    W.step_begin = begun
                tick(MODULE)
        except Exception as error:
            W.failed("module call", error)
        return result

    _originals[module_class, "__call__"] = original
    module_class.__call__ = functools.wraps(original)(__call__)


def _unwatch_modules():
    """Global module hooks would slow every submodule, and a wrapped call stands in the way of torch.compile."""
    if W.torch is not None:
        original = _originals.pop((W.torch.nn.Module, "__call__"), None)
        if original is not None:
            W.torch.nn.Module.__call__ = original


def keep_out_of_graphs(trace_rules):
    """torch.compile must not trace the frames of our wrappers."""
    folder = os.path.dirname(os.path.abspath(__file__)) + os.sep
    trace_rules.SKIP_DIRS.append(folder)
    trace_rules._recompile_re()


# --- the step itself --------------------------------------------------------------------------------------------


def _forget_steps():
    """A better source appeared: what the weaker one counted were no steps."""
    W.steps.clear()
    W.step_count = 0
    W.first_step_end = W.last_step_end = None
    W.begin_totals = (0.0, 0.0, 0.0, 0.0)
    W.touched.clear()
    for entry in [*W.copies.values(), *W.syncs.values(), *(info.tally for info in W.loaders)]:
        entry.forget_steps()
    record.rewind()


def begin():
    """When the first step began, and the waits until then: the first request to a training loader, else the first
    forward or backward; None when neither was seen."""
    asked = [info for info in W.loaders if info.first_request is not None]
    asked = [info for info in asked if info.train] or [info for info in asked if info.batches]
    if asked:
        return min(info.first_request for info in asked)
    return W.step_begin if W.source_rank == MODULE else W.first_activity


def step_line():
    """Called from the line that --step-at names."""
    if W.active:
        try:
            _mark_train()
            tick(STEP_AT)
        except Exception as error:
            W.failed("step-at", error)


def tick(rank):
    """One step by the source `rank` has ended."""
    if W.stopping:
        while True:  # another thread is writing the record and leaves
            time.sleep(1)
    if rank < W.source_rank or (W.plan["step_at"] and rank != STEP_AT):
        return
    if W.window is not None:
        if W.window.step():
            stop(W.window.reason)
        return
    now = clock()
    if rank > W.source_rank:
        if W.source_rank:
            _forget_steps()
        W.source_rank = rank
    if W.last_step_end is None:
        previous, W.begin_totals = begin() or (now, tuple(W.waits))
        W.first_step_end = now
    else:
        previous = W.last_step_end
    totals = tuple(W.waits)
    if len(W.steps) < state.KEEP_STEPS:
        values = ((now - previous) * 1000.0, *tuple((a - b) * 1000.0 for a, b in zip(totals, W.begin_totals)))
        W.steps.append(values)
        record.log_step(values)
    W.begin_totals = totals
    for entry in W.touched:
        entry.settle(W.step_count)
    W.touched.clear()
    W.step_count += 1
    W.last_step_end = now
    _maybe_stop(rank)
    record.maybe_write_partial(now)
    ended = clock()
    W.overhead += ended - now


def _maybe_stop(rank):
    plan = W.plan
    if plan["loader_search"] is not None:
        from _gpudoctor_watch import candidates

        candidates.after_step(W.step_count, _may_stop(rank))
        return
    if plan["end_loop_after"] is not None:
        return
    limit = plan["steps"]
    if limit is not None and W.step_count >= limit and _may_stop(rank):
        _over("steps")
    elif plan["max_seconds"] is not None:
        if _ranks_here() > 1:
            agreed = _agreed_stop()
            if agreed is not None and W.step_count >= agreed:
                _over("time")
        elif _time_is_up():
            _over("time")


def _over(reason):
    """The watched steps are over: leave, or first record a few more with the profiler."""
    if W.plan["profiler_steps"] <= 0:
        stop(reason)
    from _gpudoctor_watch import window

    _settle(reason)
    record.freeze()
    W.window = window.Window(reason, _ranks_here() < 2)


def _may_stop(rank):
    """Batches and forward passes are steps only where no optimizer will come: a pass over the data that computes
    statistics, or a model that is run before its optimizer is made, is not the training loop."""
    if rank == LOADER:
        return not W.optimizers_made and bool(W.backwards or W.compiled)
    return rank != MODULE or not W.optimizers_made


def _ranks_here():
    """Ranks on this machine; without a launcher's word for it, all of them."""
    return state.launched("LOCAL_WORLD_SIZE") or state.ranks()[1] or 1


def _time_is_up():
    """A slow start must not leave a single step to judge by."""
    return W.step_count >= W.plan["least_steps"] and state.seconds_since_start() >= W.plan["max_seconds"]


def _agreed_stop():
    """Ranks must leave after the same step: the first one out of time names a step some way ahead for all."""
    path = os.path.join(W.plan["record_dir"], "stop-at")
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read() or 0) or None
    except FileNotFoundError:
        pass
    if not _time_is_up():
        return None
    try:
        handle = os.open(f"{path}.{W.pid}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(handle, b"%d" % (W.step_count + 10))
        os.close(handle)
        os.link(f"{path}.{W.pid}", path)  # atomic, and refused when another rank was first
    except FileExistsError:
        pass
    return None


def stop(reason):
    """Writes the record and leaves at once: no `finally:`, `except:` or atexit of the user's runs."""
    W.stopping = True
    try:
        if W.window is None:
            _settle(reason)
        _wait_for_ranks()
        _flush(sys.stdout)
        _flush(sys.stderr)
        record.write(final=True)
        record.mark(f"left-{W.pid}", str(_ranks_here()))
    finally:
        os._exit(0)


def _settle(reason):
    _synchronize()
    W.last_step_end = clock()
    W.ended = reason


def _flush(stream):
    try:
        stream.flush()
    except Exception:
        pass


def _synchronize():
    """The last step ends when the device has finished it, not when its launch returned."""
    try:
        if W.torch is not None and W.torch.cuda.is_initialized():
            state.local.call += 1
            W.torch.cuda.synchronize()
            state.local.call -= 1
    except Exception as error:
        W.failed("synchronize", error)


def _wait_for_ranks(seconds=20.0):
    """A rank that leaves early would break the collective in which a slower one still is."""
    ranks = _ranks_here()
    if ranks < 2:
        return
    folder = W.plan["record_dir"]
    try:
        record.mark(f"stopped-{W.pid}", "")
        deadline = clock() + seconds
        while clock() < deadline:
            if sum(name.startswith("stopped-") for name in os.listdir(folder)) >= ranks:
                return
            time.sleep(0.01)
        W.note(f"other ranks did not reach the same step within {seconds:g} s")
    except OSError as error:
        W.failed("ranks", error)
