"""Sync debug mode: torch warns of each call that waits for the device, also of those that no wrapper knows.

The warning comes when the call is over, so that it names the line but not the time.
"""

import functools
import sys
import warnings

from _gpudoctor_watch import state
from _gpudoctor_watch.sites import SyncEntry, entry_of
from _gpudoctor_watch.state import W, clock, local

MESSAGE = "called a synchronizing"
_on = False
_filterwarnings = warnings.filterwarnings


def install(torch):
    """Switches the mode on as soon as the script has initialised CUDA: doing it earlier would create a context."""
    _keep_ours_first()
    original = torch.cuda._lazy_init

    @functools.wraps(original)
    def _lazy_init():
        original()
        if not _on:
            switch_on()

    torch.cuda._lazy_init = _lazy_init


def switch_on():
    global _on
    torch = W.torch or sys.modules.get("torch")
    if _on or torch is None or not W.active or not torch.cuda.is_initialized():
        return
    _on = True
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
                _warned(sys._getframe(1))
            except Exception as error:
                W.failed("sync debug mode", error)

        warnings.showwarning = showwarning
        _ours_first()
    except Exception as error:
        W.failed("sync debug mode", error)


def _ours_first():
    """The script's own filters must neither hide our warnings nor turn them into errors."""
    if _on:
        _filterwarnings("always", message=".*" + MESSAGE)


def _keep_ours_first():
    """Whenever the script sets a filter, ours goes before it again."""
    for name in ("filterwarnings", "simplefilter", "resetwarnings"):
        original = getattr(warnings, name)

        def changed(*args, _original=original, **kwargs):
            _original(*args, **kwargs)
            _ours_first()

        setattr(warnings, name, functools.wraps(original)(changed))


def _warned(frame):
    W.warned += 1
    if local.call:
        local.debug_hits += 1  # inside one of our wrappers: that line is noted there
        return
    if not W.active:
        return
    now = clock()
    site = state.user_site(frame)  # warnings.py and _py_warnings.py are standard library: walked past
    if site is None:
        return
    if W.window is not None:
        W.window.warned(W.syncs.get((site, "sync")), now)
        return
    new = (site, "sync") not in W.syncs
    entry = entry_of(W.syncs, (site, "sync"), SyncEntry)
    if entry is not None:
        if new:
            entry.via = state.called_by_user(frame)
        entry.on_device += 1
        entry.debug = True
        entry.add(0.0)
