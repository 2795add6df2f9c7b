"""Copies between host and device, and synchronising calls, by the user's line.

A wrapper stands in for a method of torch.Tensor: it compares and hashes equal to the original, because torch looks
methods up in lists and dictionaries (lazy modules, __torch_function__ tables). Where CUDA exists, sync debug mode
names the calls that no wrapper knows.
"""

import functools
import sys
import types
import warnings

from _gpudoctor_watch import state
from _gpudoctor_watch.state import W, clock, local

getframe = sys._getframe
SAMPLE = 63  # one call in 64 is timed for the watcher's own cost
MESSAGE = "called a synchronizing"
_COPIES = ("to", "cuda", "cpu", "copy_", "numpy")
_SYNCS = {
    "item": "item",
    "tolist": "tolist",
    "nonzero": "nonzero",
    "__float__": "float",
    "__int__": "int",
    "__bool__": "bool",
    "__index__": "index",
    "__format__": "format",
    "__repr__": "repr",
}
_traced: dict = {}  # tensor type -> is it one that torch.compile and fake tensor tracing pass around?
_methods: list = []
_tensor = None
_debug_mode = False
_filterwarnings = warnings.filterwarnings


class Method:
    """A method of torch.Tensor that is watched."""

    __slots__ = ("cache", "name", "original", "shown")

    def __init__(self, original, name, shown):
        self.original, self.name, self.shown = original, name, shown
        self.cache = {}  # (id of the user's code, instruction, kind of copy) -> entry
        _methods.append(self)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

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


class Copy(Method):
    __slots__ = ()
    __doc__ = Method.__dict__["__doc__"]

    def __call__(self, tensor, /, *args, **kwargs):
        if local.call or not W.active:
            return self.original(tensor, *args, **kwargs)
        local.call = 1
        begun = clock()
        try:
            result = self.original(tensor, *args, **kwargs)
        finally:
            local.call = 0
        ended = clock()
        try:
            note_copy(self, tensor, result, args, kwargs, ended - begun, getframe(1))
            if not W.calls & SAMPLE:
                W.overhead += (clock() - ended) * (SAMPLE + 1)
        except Exception as error:
            W.failed(self.shown, error)
        return result


class Sync(Method):
    __slots__ = ()
    __doc__ = Method.__dict__["__doc__"]

    def __call__(self, tensor, /, *args, **kwargs):
        if local.call or not W.active:
            return self.original(tensor, *args, **kwargs)
        local.call = 1
        begun = clock()
        try:
            result = self.original(tensor, *args, **kwargs)
        finally:
            local.call = 0
        ended = clock()
        try:
            note_sync(self, tensor.is_cuda, ended - begun, getframe(1), tensor)
            if not W.calls & SAMPLE:
                W.overhead += (clock() - ended) * (SAMPLE + 1)
        except Exception as error:
            W.failed(self.shown, error)
        return result


class CopyEntry:
    """Calls at one line, by function and direction."""

    __slots__ = ("bytes", "calls", "from_loader", "in_steps", "non_blocking", "pending", "pinned", "waited")

    def __init__(self):
        self.calls = self.bytes = self.pinned = self.non_blocking = self.in_steps = self.pending = 0
        self.waited, self.from_loader = 0.0, False

    def facts(self, key):
        return {
            "site": key[0],
            "function": key[1],
            "kind": key[2],
            "calls": self.calls,
            "bytes": self.bytes,
            "pinned": self.pinned,
            "non_blocking": self.non_blocking,
            "waited_ms": self.waited * 1e3,
            "calls_in_steps": self.in_steps,
            "from_loader": self.from_loader,
        }


class SyncEntry:
    __slots__ = ("calls", "debug", "in_steps", "on_device", "pending", "waited", "wrapped")

    def __init__(self):
        self.calls = self.on_device = self.in_steps = self.pending = 0
        self.waited, self.wrapped, self.debug = 0.0, False, False

    def facts(self, key):
        return {
            "site": key[0],
            "function": key[1],
            "calls": self.calls,
            "on_device": self.on_device,
            "waited_ms": self.waited * 1e3,
            "calls_in_steps": self.in_steps,
            "detected_by": "both" if self.wrapped and self.debug else "wrapper" if self.wrapped else "sync-debug-mode",
        }


def install(torch):
    global _tensor
    _tensor = torch.Tensor
    if torch.version.cuda or getattr(torch.version, "hip", None):
        _keep_ours_first()
    for name in _COPIES:
        setattr(_tensor, name, Copy(getattr(_tensor, name), name, name))
    for name, shown in _SYNCS.items():
        setattr(_tensor, name, Sync(getattr(_tensor, name), name, shown))
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
    place = Method(original, shown, shown)

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
            note_sync(place, torch.cuda.is_initialized(), ended - begun, getframe(1))
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


def _entry(table, key, make):
    entry = table.get(key)
    if entry is None:
        if len(table) > 5000:
            W.note("more than 5000 call sites: the rest is not listed")
            return None
        entry = table[key] = make()
    return entry


def _place(frame, cache, function, table, make, *kind):
    """The entry for the user's line; kept by code object and instruction where the caller is that line itself."""
    site = state.user_site(frame)
    if site is None:
        return None
    entry = _entry(table, (site, function, *kind), make)
    if entry is not None and state.kind_of(frame) == state.USER and state.is_kept(frame):
        cache[(id(frame.f_code), frame.f_lasti, *kind)] = entry
    return entry


def note_copy(method, tensor, result, args, kwargs, spent, frame):
    from_device, to_device = tensor.is_cuda, getattr(result, "is_cuda", False)
    if method.shown == "copy_":
        source = args[0] if args else kwargs.get("src", kwargs.get("other"))
        from_device, to_device = getattr(source, "is_cuda", False), tensor.is_cuda
        tensor = source
    if from_device == to_device:
        if local.loader or method.shown == "copy_":
            return
        kind = "none"
    else:
        kind = "d2h" if from_device else "h2d"
        if not _debug_mode:
            enable_sync_debug_mode()
    if is_traced(tensor):
        return
    entry = method.cache.get((id(frame.f_code), frame.f_lasti, kind))
    if entry is None:
        entry = _place(frame, method.cache, method.shown, W.copies, CopyEntry, kind)
        if entry is None:
            return
    W.calls += 1
    entry.calls += 1
    entry.waited += spent
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
    if not entry.pending:
        W.touched.append(entry)
    entry.pending += 1
    W.waits[1] += spent


def _non_blocking(args, kwargs):
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    for value in args:
        if value is True or value is False:
            return value
    return False


def note_sync(method, on_device, spent, frame, tensor=None):
    if local.loader and not on_device:
        return  # samplers draw their indices with item() and tolist(): that is the loader's time
    if tensor is not None and is_traced(tensor):
        return
    entry = method.cache.get((id(frame.f_code), frame.f_lasti))
    if entry is None:
        entry = _place(frame, method.cache, method.shown, W.syncs, SyncEntry)
        if entry is None:
            return
    W.calls += 1
    entry.calls += 1
    entry.wrapped = True
    entry.waited += spent
    if on_device:
        entry.on_device += 1
        if local.debug_hits:
            local.debug_hits = 0
            entry.debug = True
    if not entry.pending:
        W.touched.append(entry)
    entry.pending += 1
    W.waits[2] += spent


# --- sync debug mode --------------------------------------------------------------------------------------------


def enable_sync_debug_mode():
    """Once CUDA is in use by the script (asking earlier would create a context)."""
    global _debug_mode
    torch = W.torch
    if _debug_mode or torch is None or not torch.cuda.is_initialized():
        return
    _debug_mode = True
    try:
        local.call += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it tells of itself that it is a prototype
                torch.cuda.set_sync_debug_mode("warn")
        finally:
            local.call -= 1
        before = warnings.showwarning

        def showwarning(message, category, filename, lineno, file=None, line=None):
            if MESSAGE not in str(message):
                return before(message, category, filename, lineno, file, line)
            try:
                _debug_warning(sys._getframe(1))
            except Exception as error:
                W.failed("sync debug mode", error)

        warnings.showwarning = showwarning
        _ours_first()
    except Exception as error:
        W.failed("sync debug mode", error)


def _ours_first():
    """The script's own filters must neither hide our warnings nor turn them into errors."""
    if _debug_mode:
        _filterwarnings("always", message=".*" + MESSAGE)


def _keep_ours_first():
    """Whenever the script sets a filter, ours goes before it again."""
    for name in ("filterwarnings", "simplefilter", "resetwarnings"):
        original = getattr(warnings, name)

        def changed(*args, _original=original, **kwargs):
            _original(*args, **kwargs)
            _ours_first()

        setattr(warnings, name, functools.wraps(original)(changed))


def _debug_warning(frame):
    if local.call:
        local.debug_hits += 1  # inside one of our wrappers: that line is noted there
        return
    if not W.active:
        return
    site = state.user_site(frame)  # warnings.py and _py_warnings.py are standard library: walked past
    if site is None:
        return
    entry = _entry(W.syncs, (site, "sync"), SyncEntry)
    if entry is not None:
        entry.calls += 1
        entry.on_device += 1
        entry.debug = True
        if not entry.pending:
            W.touched.append(entry)
        entry.pending += 1
