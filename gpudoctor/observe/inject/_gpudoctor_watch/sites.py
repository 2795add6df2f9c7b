"""Lines of code that copy or wait: what is counted there, in all, in steps, and in the steady steps."""

from array import array

from _gpudoctor_watch import state
from _gpudoctor_watch.state import W

MOST_SITES = 5000
EARLY = 500  # steps of which each entry keeps its own counts: warm-up is looked for among them


class Tally:
    """Calls and waiting of one place. `pending` is of the step that runs; `early` holds (step, calls, seconds)."""

    __slots__ = ("calls", "early", "in_steps", "pending", "pending_waited", "stepped", "stepped_waited", "waited")

    def __init__(self):
        self.calls = self.in_steps = 0
        self.waited = 0.0
        self.forget_steps()

    def forget_steps(self):
        self.in_steps = self.stepped = self.pending = 0
        self.stepped_waited = self.pending_waited = 0.0
        self.early = array("d")

    def add(self, spent):
        self.calls += 1
        self.waited += spent
        if not self.pending:
            W.touched.append(self)
        self.pending += 1
        self.pending_waited += spent

    def settle(self, number):
        """Step `number` (from 0) has ended."""
        if number:
            self.in_steps += self.pending
        self.stepped += self.pending
        self.stepped_waited += self.pending_waited
        if number < EARLY:
            self.early.extend((number, self.pending, self.pending_waited))
        self.pending, self.pending_waited = 0, 0.0

    def steady(self, begin):
        """(calls, seconds) in the steps from number `begin` on."""
        calls, waited = self.stepped, self.stepped_waited
        for place in range(0, len(self.early), 3):
            if self.early[place] >= begin:
                break
            calls -= int(self.early[place + 1])
            waited -= self.early[place + 2]
        return calls, max(0.0, waited)


class CopyEntry(Tally):
    """Calls at one line, by function and direction."""

    __slots__ = ("bytes", "from_loader", "non_blocking", "pinned")

    def __init__(self):
        super().__init__()
        self.bytes = self.pinned = self.non_blocking = 0
        self.from_loader = False

    def facts(self, key, begin):
        calls, waited = self.steady(begin)
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
            "steady_calls": calls,
            "steady_waited_ms": waited * 1e3,
            "from_loader": self.from_loader,
        }


class SyncEntry(Tally):
    """`window`: milliseconds a step of waiting in the profiler window, where nothing else times the call."""

    __slots__ = ("debug", "on_device", "via", "window", "wrapped")

    def __init__(self):
        super().__init__()
        self.on_device = 0
        self.window = self.via = None
        self.wrapped = self.debug = False

    def facts(self, key, begin):
        calls, waited = self.steady(begin)
        return {
            "site": key[0],
            "function": key[1],
            "calls": self.calls,
            "on_device": self.on_device,
            "waited_ms": self.waited * 1e3,
            "calls_in_steps": self.in_steps,
            "steady_calls": calls,
            "steady_waited_ms": waited * 1e3,
            "window_waited_ms": self.window,
            "via": self.via,
            "detected_by": "both" if self.wrapped and self.debug else "wrapper" if self.wrapped else "sync-debug-mode",
        }


def entry_of(table, key, make):
    """The entry of a line, made when it is new; None beyond MOST_SITES."""
    entry = table.get(key)
    if entry is None:
        if len(table) > MOST_SITES:
            W.note(f"more than {MOST_SITES} call sites: the rest is not listed")
            return None
        entry = table[key] = make()
    return entry


def place_of(frame, cache, function, table, make, *kind):
    """The entry for the user's line; kept by code object and instruction where the caller is that line itself."""
    site = state.user_site(frame)
    if site is None:
        return None
    new = (site, function, *kind) not in table
    entry = entry_of(table, (site, function, *kind), make)
    if entry is None:
        return None
    if state.kind_of(frame) != state.USER:
        if new and make is SyncEntry:
            entry.via = state.called_by_user(frame)
    elif state.is_kept(frame):
        cache[(id(frame.f_code), frame.f_lasti, *kind)] = entry
    return entry
