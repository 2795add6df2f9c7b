"""Copies between host and device, and synchronising calls, by the user's line.

Where torch can use CUDA only calls that touch a device matter, so that calls on CPU tensors return at once; in a
build for the CPU they are counted, since nothing else shows where a script would copy and wait on a GPU.

A wrapper stands in for a method of torch.Tensor: it compares and hashes equal to the original, because torch and
tensor subclasses look methods up in lists and dictionaries. The conversions that Python itself calls, which nobody
looks up, are plain functions: those cost a quarter.
"""

import functools
import itertools
import sys
from types import MethodType

from _gpudoctor_watch import debug_mode
from _gpudoctor_watch.sites import CopyEntry, SyncEntry, place_of
from _gpudoctor_watch.state import W, clock, local

getframe = sys._getframe
SAMPLE = 63  # one call in 64 is timed for the watcher's own cost
_COPIES = ("to", "cuda", "cpu", "copy_")
_SYNCS = {"item": "item", "tolist": "tolist", "nonzero": "nonzero", "__format__": "format", "__repr__": "repr"}
_CONVERSIONS = {"__float__": "float", "__int__": "int", "__bool__": "bool", "__index__": "index"}
_traced: dict = {}  # tensor type -> is it one that torch.compile and fake tensor tracing pass around?
_methods: list = []
_tensor = None
_device_only = False  # calls on CPU tensors are not counted
_passed = itertools.count()  # calls on CPU tensors that returned at once
_asked = 0


class Method:
    """A method of torch.Tensor that is watched; `run` does its work."""

    __slots__ = ("cache", "name", "original", "run", "shown")

    def __init__(self, original, name, shown, make=None):
        self.original, self.name, self.shown = original, name, shown
        self.cache = {}  # (id of the user's code, instruction, kind of copy) -> entry
        self.run = original if make is None else make(self, original)
        _methods.append(self)

    def __get__(self, instance, owner=None):
        return self if instance is None else MethodType(self.run, instance)

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)

    def __eq__(self, other):
        return other is self or other == self.original

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(self.original)

    def __getattr__(self, attribute):
        return getattr(self.original, attribute)

    def __reduce__(self):
        return getattr, (_tensor, self.name)

    def __repr__(self):
        return repr(self.original)

    @property
    def __doc__(self):
        return self.original.__doc__

    @property
    def __signature__(self):
        import inspect

        return inspect.signature(self.original)


def _copying(method, original):
    passed = _passed.__next__

    def run(tensor, /, *args, **kwargs):
        if local.call or not W.active:
            return original(tensor, *args, **kwargs)
        local.call = 1
        begun = clock()
        try:
            result = original(tensor, *args, **kwargs)
        finally:
            local.call = 0
        ended = clock()
        try:
            if not note_copy(method, tensor, result, args, kwargs, begun, ended, getframe(1)):
                passed()
            elif not W.calls & SAMPLE:
                W.overhead += (clock() - ended) * (SAMPLE + 1)
        except Exception as error:
            W.failed(method.shown, error)
        return result

    return _named(run, method)


def _reading(method, original):
    passed = _passed.__next__
    device_only = _device_only

    def run(tensor, /, *args, **kwargs):
        if device_only and not tensor.is_cuda:
            passed()
            return original(tensor, *args, **kwargs)
        if local.call or not W.active:
            return original(tensor, *args, **kwargs)
        local.call = 1
        begun = clock()
        try:
            result = original(tensor, *args, **kwargs)
        finally:
            local.call = 0
        ended = clock()
        try:
            if note_sync(method, tensor.is_cuda, begun, ended, getframe(1), tensor) and not W.calls & SAMPLE:
                W.overhead += (clock() - ended) * (SAMPLE + 1)
        except Exception as error:
            W.failed(method.shown, error)
        return result

    return _named(run, method)


def _named(run, method):
    run.__name__ = method.name
    run.__qualname__ = f"Tensor.{method.name}"
    run.__module__ = "torch"  # where a pickle finds it
    run.__doc__ = method.original.__doc__
    run.__wrapped__ = method.original
    return run


def passed_calls():
    """How many calls on CPU tensors returned at once; asking counts as none."""
    global _asked
    number = next(_passed) - _asked
    _asked += 1
    return number


def install(torch):
    global _tensor, _device_only
    _tensor = torch.Tensor
    _device_only = bool(torch.version.cuda or getattr(torch.version, "hip", None))
    if _device_only:
        debug_mode.install(torch)
    for name in _COPIES if _device_only else (*_COPIES, "numpy"):  # numpy() takes CPU tensors only
        setattr(_tensor, name, Method(getattr(_tensor, name), name, name, _copying))
    for name, shown in _SYNCS.items():
        setattr(_tensor, name, Method(getattr(_tensor, name), name, shown, _reading))
    for name, shown in _CONVERSIONS.items():
        setattr(_tensor, name, Method(getattr(_tensor, name), name, shown, _reading).run)
    for owner, name in (
        (torch.cuda, "synchronize"),
        (torch.cuda, "empty_cache"),
        (torch.cuda.memory, "empty_cache"),
        (torch.cuda.Event, "synchronize"),
        (torch.cuda.Stream, "synchronize"),
        (getattr(torch, "accelerator", None), "synchronize"),
    ):
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, _function(torch, original, name))


def _function(torch, original, shown):
    method = Method(original, shown, shown)

    def watched(*args, **kwargs):
        if local.call or not W.active:
            return original(*args, **kwargs)
        local.call = 1
        begun = clock()
        try:
            result = original(*args, **kwargs)
        finally:
            local.call = 0
        ended = clock()
        try:
            note_sync(method, torch.cuda.is_initialized(), begun, ended, getframe(1))
        except Exception as error:
            W.failed(shown, error)
        return result

    try:
        return functools.wraps(original)(watched)
    except Exception:
        return watched


def forget_entries():
    """After a fork: the child's own entries begin at nothing."""
    for method in _methods:
        method.cache.clear()


def is_traced(tensor):
    """FakeTensor and its like are what a compiler passes around while it traces: no work happens."""
    kind = type(tensor)
    found = _traced.get(kind)
    if found is None:
        module = kind.__module__ or ""
        found = _traced[kind] = module.startswith(("torch._subclasses", "torch.fx", "torch._functorch"))
    return found


def note_copy(method, tensor, result, args, kwargs, begun, ended, frame):
    """True when the call was counted."""
    from_device, to_device = tensor.is_cuda, getattr(result, "is_cuda", False)
    if method.shown == "copy_":
        source = args[0] if args else kwargs.get("src", kwargs.get("other"))
        from_device, to_device = getattr(source, "is_cuda", False), tensor.is_cuda
        tensor = source
    if from_device == to_device:
        if _device_only or local.loader or method.shown == "copy_":
            return False
        kind = "none"
    else:
        kind = "d2h" if from_device else "h2d"
    if is_traced(tensor):
        return False
    if W.window is not None:
        local.debug_hits = 0
        W.window.called(begun, ended)
        return False
    entry = method.cache.get((id(frame.f_code), frame.f_lasti, kind))
    if entry is None:
        entry = place_of(frame, method.cache, method.shown, W.copies, CopyEntry, kind)
        if entry is None:
            return False
    W.calls += 1
    entry.add(ended - begun)
    if id(tensor) in W.batch_ids:
        entry.from_loader = True
    if kind != "none":
        local.debug_hits = 0
        entry.bytes += tensor.numel() * tensor.element_size()
        host = tensor if kind == "h2d" else result
        if host is not None and hasattr(host, "is_pinned") and host.is_pinned():
            entry.pinned += 1
    if _non_blocking(args, kwargs):
        entry.non_blocking += 1
    W.waits[1] += ended - begun
    return True


def _non_blocking(args, kwargs):
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    for value in args:
        if value is True or value is False:
            return value
    return False


def note_sync(method, on_device, begun, ended, frame, tensor=None):
    """True when the call was counted."""
    if local.loader and not on_device:
        return False  # samplers draw their indices with item() and tolist(): that is the loader's time
    if tensor is not None and is_traced(tensor):
        return False
    if W.window is not None:
        local.debug_hits = 0
        W.window.called(begun, ended)
        return False
    entry = method.cache.get((id(frame.f_code), frame.f_lasti))
    if entry is None:
        entry = place_of(frame, method.cache, method.shown, W.syncs, SyncEntry)
        if entry is None:
            return False
    W.calls += 1
    entry.wrapped = True
    entry.add(ended - begun)
    if on_device:
        entry.on_device += 1
        if local.debug_hits:
            local.debug_hits = 0
            entry.debug = True
    W.waits[2] += ended - begun
    return True
