"""Loaders: where they were made, how long the script waits for them, and settings changed on the instance.

A loader that a library builds from the dataset of the user's loader (accelerate, Lightning) is the user's loader.
"""

import functools
import os
import sys
import threading
import weakref

from _gpudoctor_watch import state, steps
from _gpudoctor_watch.settings import describe
from _gpudoctor_watch.sites import Tally
from _gpudoctor_watch.state import W, clock, local

MOST_PROBES = 4  # a loader made anew each epoch must not be probed each time
_KEY = "_gpudoctor_loader"
_GIVEN = "_gpudoctor_given"
_loader_of: dict = {}  # id(loader) -> (weak reference, Info)
_ordinals: dict = {}


class Info:
    """One loader of the user's, over all its rebuilds and epochs."""

    def __init__(self, site, ordinal, loader):
        self.site, self.ordinal = site, ordinal
        self.dataset = _weak(getattr(loader, "dataset", None))
        self.overridden = False
        self.probe = None
        self.from_user = True
        self.alive = []  # iterators, weakly; kept only where loader candidates are tried
        self.settings = describe(loader)
        self.forget_counts()

    def forget_counts(self):
        self.train = False
        self.first_request = None  # (time, waits until then)
        self.first_batch = None
        self.iterators = self.batches = self.samples = 0
        self.wait = 0.0
        self.tally = Tally()  # of waiting, by step
        self.batch_bytes = None
        self.asked = None

    def facts(self, begin):
        trains = W.optimizer_steps_all or W.backwards  # else it may be inference, which this loader feeds
        role = "train" if self.train else "other" if self.batches and trains else "unknown"
        return {
            "site": self.site,
            "ordinal": self.ordinal,
            "role": role,
            **self.settings,
            "overridden": self.overridden,
            "iterators": self.iterators,
            "batches": self.batches,
            "samples": self.samples,
            "wait_ms": self.wait * 1e3,
            "steady_wait_ms": self.tally.steady(begin)[1] * 1e3,
            "first_batch_ms": self.first_batch,
            "batch_bytes": self.batch_bytes,
            "fetch_probe": self.probe,
        }


def _weak(value):
    try:
        return weakref.ref(value)
    except TypeError:  # a list or tuple as dataset
        return lambda: value


def install(module):
    loader_class, iterator_class = module.DataLoader, module._BaseDataLoaderIter
    _patch(loader_class, "__init__", _init)
    _patch(loader_class, "__iter__", _iter)
    _patch(loader_class, "_get_iterator", _get_iterator)
    _patch(iterator_class, "__next__", _next)
    _patch(iterator_class, "_next_index", _next_index)
    worker = sys.modules.get("torch.utils.data._utils.worker")
    if worker is not None:
        _patch(worker, "_worker_loop", _worker_loop)


def install_stateful(module):
    """StatefulDataLoader makes its own iterators."""
    loader_class = getattr(module, "StatefulDataLoader", None)
    if loader_class is not None:
        for name, make in (("__init__", _init), ("__iter__", _iter), ("_get_iterator", _get_iterator)):
            if name in vars(loader_class):
                _patch(loader_class, name, make)
    for name in ("_StatefulBaseDataLoaderIter", "_StatefulSingleProcessDataLoaderIter"):
        iterator = getattr(module, name, None)
        if iterator is not None and "__next__" in vars(iterator):
            _patch(iterator, "__next__", _next)
    worker = sys.modules.get("torchdata.stateful_dataloader.worker")
    for owner in (worker, module):
        if owner is not None and hasattr(owner, "_worker_loop"):
            _patch(owner, "_worker_loop", _worker_loop)


def _patch(owner, name, make):
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _worker_loop(original):
    def _worker_loop(*args, **kwargs):
        W.active = False  # a worker fetches rows: it has no steps, copies or loaders of its own to tell of
        from _gpudoctor_watch import in_worker

        if in_worker.ENVIRONMENT in os.environ:
            in_worker.begin()
        return original(*args, **kwargs)

    return _worker_loop


def _init(original):
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if W.active:
            try:
                _noted(self, sys._getframe(1))
            except Exception as error:
                W.failed("loader made", error)

    return __init__


def _noted(loader, frame):
    known = info_of(loader)
    if known is not None:
        return known  # a subclass whose base was patched too
    frame = state.next_outer(_past_own_init(loader, frame))
    library = frame is not None and state.kind_of(frame) == state.PACKAGE
    if library:
        dataset = getattr(loader, "dataset", None)
        for info in W.loaders:
            if info.from_user and info.dataset() is dataset:
                return _remember(loader, info)
    site = state.site_of(frame) if frame is not None else "<unknown>:0"
    ordinal = _ordinals.get(site, 0)
    _ordinals[site] = ordinal + 1
    info = Info(site, ordinal, loader)
    info.from_user = not library
    W.loaders.append(info)
    return _remember(loader, info)


def _past_own_init(loader, frame):
    """Out of the __init__ methods of the loader's own class, and Lightning's wrapper around them: the line that
    made the loader is the one beyond."""
    while frame is not None:
        code = frame.f_code
        own = code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is loader
        if not (own or state.kind_of(frame) == state.OURS):
            break
        frame = frame.f_back
    return frame


def _remember(loader, info):
    key = id(loader)
    _loader_of[key] = (weakref.ref(loader, lambda _: _loader_of.pop(key, None)), info)
    return info


def info_of(loader):
    found = _loader_of.get(id(loader))
    return found[1] if found is not None and found[0]() is loader else None


# --- iterators --------------------------------------------------------------------------------------------------


def _iter(original):
    def __iter__(self):
        return _request(self, original, "__iter__")

    return __iter__


def _get_iterator(original):
    def _get_iterator(self):
        return _request(self, original, "_get_iterator")

    return _get_iterator


def _request(loader, original, what):
    if not W.active or W.window is not None:
        return original(loader)
    info = None
    try:
        info = info_of(loader) or _noted(loader, sys._getframe(2))
        if info.asked is not None:
            info = None  # __iter__ has asked for this one already
        else:
            if W.plan["loader_search"] is not None:
                _searched(loader, info)
            _prepare(loader, info)
    except Exception as error:
        W.failed("loader settings", error)
    if info is None:
        return original(loader)
    begun = info.asked = clock()
    if info.first_request is None:
        info.first_request = (begun, tuple(W.waits))
    local.loader += 1
    local.making += 1
    try:
        iterator = original(loader)
    finally:
        local.making -= 1
        local.loader -= 1
        info.asked = None
    spent = clock() - begun
    _waited(info, spent)
    try:
        info.iterators += 1
        if info.first_batch is None:
            info.first_batch = -spent * 1e3  # negative until the first batch has come
        if not hasattr(iterator, "gi_frame") and hasattr(iterator, "__dict__"):
            iterator.__dict__[_KEY] = info
            iterator.__dict__[_GIVEN] = 0
            if W.plan["loader_search"] is not None:
                info.alive.append(weakref.ref(iterator))
            if W.plan["proof"] is not None:
                from _gpudoctor_watch import proof

                proof.epoch_begins(iterator)
    except Exception as error:
        W.failed("loader iterator", error)
    return iterator


def _searched(loader, info):
    from _gpudoctor_watch import candidates

    if candidates.wanted(loader, info):
        candidates.take(loader, info)


def _waited(info, spent):
    info.wait += spent
    if threading.get_ident() == W.step_thread:
        W.waits[0] += spent
        info.tally.add(spent)


def _prepare(loader, info):
    """Settings and the fetch probe, once an instance, before its first iterator."""
    if loader.__dict__.get(_KEY + "_ready"):
        return
    object.__setattr__(loader, _KEY + "_ready", True)
    for override in W.plan["loaders"]:
        if override["site"] == info.site and override.get("ordinal") in (None, info.ordinal):
            _override(loader, override.get("arguments") or {})
            info.overridden = True
    info.settings = {**info.settings, **_changeable(loader)}
    probed = sum(other.probe is not None for other in W.loaders)
    if W.plan["probe_fetch"] and info.probe is None and probed < MOST_PROBES:
        from _gpudoctor_watch import probe

        begun = clock()
        info.probe = probe.probe(loader, info)
        W.paused += clock() - begun


def _changeable(loader):
    facts = describe(loader)
    names = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order", "batch_size", "length")
    return {name: facts[name] for name in names}


def _override(loader, arguments):
    """DataLoader refuses some of these after __init__; they are read only when an iterator is made."""
    values = dict(arguments)
    for name in ("num_workers", "pin_memory", "in_order", "persistent_workers", "prefetch_factor"):
        if name not in values:
            continue
        value = values.pop(name)
        if name == "in_order" and not hasattr(loader, "in_order"):
            if value is False:
                W.note("this torch has no in_order: the setting was left out")
            continue
        object.__setattr__(loader, name, value)
    for name in values:
        W.note(f"loader argument {name} cannot be set on the instance")
    if loader.num_workers > 0:
        if loader.prefetch_factor is None:
            object.__setattr__(loader, "prefetch_factor", 2)
    else:
        object.__setattr__(loader, "prefetch_factor", None)
        object.__setattr__(loader, "persistent_workers", False)
        object.__setattr__(loader, "timeout", 0)


# --- batches ----------------------------------------------------------------------------------------------------


def _next(original):
    def __next__(self):
        info = self.__dict__.get(_KEY) if W.active else None
        if info is None or local.loader:
            return original(self)
        if W.window is not None:
            batch = original(self)
            if W.source_rank == steps.LOADER:
                steps.tick(steps.LOADER)
            return batch
        limit = W.plan["end_loop_after"]
        if limit is not None and self.__dict__[_GIVEN] >= limit:
            raise StopIteration
        local.loader += 1
        begun = clock()
        try:
            batch = original(self)
        except StopIteration:
            if W.plan["proof"] is not None:
                from _gpudoctor_watch import proof

                proof.epoch_ended(self)
            raise
        finally:
            local.loader -= 1
            ended = clock()
            _waited(info, ended - begun)
        try:
            self.__dict__[_GIVEN] += 1
            _delivered(info, self, batch, ended - begun)
        except Exception as error:
            W.failed("batch", error)
        W.overhead += clock() - ended
        try:
            if not W.optimizer_steps:
                steps.tick(steps.LOADER)
        except Exception as error:
            W.failed("batch as step", error)
        return batch

    return __next__


def _delivered(info, iterator, batch, spent):
    info.batches += 1
    if info.first_batch is not None and info.first_batch <= 0:
        info.first_batch = -info.first_batch + spent * 1e3
    W.last_loader = info
    tensors = []
    _tensors(batch, tensors, 0)
    if tensors:
        shape = tensors[0].shape
        info.samples += int(shape[0]) if len(shape) else 1
        if info.batch_bytes is None:
            info.batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        W.batch_ids = frozenset(map(id, tensors))
    if W.plan["proof"] is not None:
        from _gpudoctor_watch import proof

        proof.batch_delivered(iterator, batch)


def _tensors(value, found, depth):
    if len(found) >= 64 or depth > 4:
        return
    if isinstance(value, W.torch.Tensor if W.torch is not None else ()):
        found.append(value)
    elif isinstance(value, dict) or hasattr(value, "keys"):
        for key in value.keys():
            _tensors(value[key], found, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value[:64]:
            _tensors(item, found, depth + 1)


def _next_index(original):
    def _next_index(self):
        index = original(self)
        if W.active and W.plan["proof"] is not None:
            from _gpudoctor_watch import proof

            proof.index_drawn(self, index)
        return index

    return _next_index
