"""How long a rank waits for the other ranks: DDP's own timers, and collectives of the script that block the host.

DDP times each reduction itself (CPU clocks, or CUDA events on its stream): what lies between the last gradient and
the end of the last reduction is exposed, whether the data were on their way or another rank was not there yet.
"""

import functools
import sys
import weakref

from _gpudoctor_watch.state import W, clock

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "_broadcast_coalesced",
)
_models: list = []
_counts: dict = {"backend": None, "ranks": None, "reductions": 0, "calls": 0, "untimed": 0}
_depth = 0


class _Model:
    """One DDP module, and when its last reduction that was counted began."""

    def __init__(self, module):
        self.module = weakref.ref(module)
        self.begun = 0


def install_ddp(parallel):
    """After torch.nn.parallel.distributed was imported."""
    original = parallel.DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if W.active:
            try:
                self._set_ddp_runtime_logging_sample_rate(1)
                _models.append(_Model(self))
            except Exception as error:
                W.failed("DDP", error)

    parallel.DistributedDataParallel.__init__ = __init__


def install_collectives(distributed):
    """After torch.distributed was imported; its functions are called through the package or by their own module."""
    defining = sys.modules.get("torch.distributed.distributed_c10d")
    start = getattr(distributed, "init_process_group", None)
    if start is not None:

        @functools.wraps(start)
        def init_process_group(*args, **kwargs):
            start(*args, **kwargs)
            _joined()  # it may be left again before the record is written

        for owner in (distributed, defining):
            owner.init_process_group = init_process_group
    for name in _COLLECTIVES:
        original = getattr(distributed, name, None)
        if original is None:
            continue
        wrapper = _timed(original)
        for owner in (distributed, defining):
            if getattr(owner, name, None) is original:
                setattr(owner, name, wrapper)


def _timed(original):
    @functools.wraps(original)
    def collective(*args, **kwargs):
        global _depth
        if _depth or not W.active:
            return original(*args, **kwargs)
        begun = clock()
        _depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            _depth -= 1
            _called(clock() - begun, kwargs)

    return collective


def _called(spent, kwargs):
    """The host waits in a collective only where the back end blocks: NCCL's are queued on the device."""
    try:
        if not _joined():
            return
        if kwargs.get("async_op") or _counts["backend"] == "nccl":
            _counts["untimed"] += 1
        else:
            _counts["calls"] += 1
            W.waits[3] += spent
    except Exception as error:
        W.failed("collective", error)


def _joined():
    if _counts["backend"] is None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            _counts["backend"] = str(distributed.get_backend())
            _counts["ranks"] = distributed.get_world_size()
    return _counts["backend"] is not None


def backward_ended():
    """Adds what the reductions in this backward left exposed."""
    begun_at = clock()
    _joined()
    for model in list(_models):
        module = model.module()
        if module is None:
            _models.remove(model)
            continue
        try:
            module.logger.set_runtime_stats_and_log()
            told = module._get_ddp_logging_data()
            begun = told.get("backward_comm_time_start") or 0
            if begun == model.begun:
                continue  # no gradients were reduced: under no_sync, or another model's backward
            model.begun = begun
            exposed = told["backward_comm_time"] - told["backward_compute_comm_overlap_time"]
            W.waits[3] += max(0, exposed) / 1e9
            _counts["reductions"] += 1
        except Exception as error:
            W.failed("DDP timers", error)
            _models.remove(model)
    W.overhead += clock() - begun_at


def facts():
    return dict(_counts) if _joined() else None
