"""What the watcher's modules share: the plan, the counters, the clock, and where user code stands on the stack."""

import json
import os
import sys
import threading
import time

clock = time.perf_counter
KEEP_STEPS = 20000  # kept one by one

DEFAULTS = {
    "record_dir": "",
    "steps": None,
    "max_seconds": None,
    "least_steps": 1,
    "step_at": None,
    "loaders": (),
    "patched": (),
    "watch_calls": True,
    "probe_fetch": False,
    "loader_search": None,
    "end_loop_after": None,
    "proof": None,
    "watch_ranks": False,
    "profiler_steps": 0,
    "guard_writes": "list",
    "write_root": None,
    "command_cwd": None,
    "parent_pid": None,
}


class Local(threading.local):
    """Per thread: how deep we are in our own wrappers, and in a loader."""

    call = 0
    loader = 0
    making = 0  # an iterator is being made: the indices drawn now belong to its first batches
    debug_hits = 0
    guard = 0  # the write guard is at work: what it opens itself is not the user's


class Watch:
    """All counters of this process. `begin` fills it; a forked child starts again from zero."""

    def __init__(self):
        self.active = False
        self.plan = dict(DEFAULTS)
        self.cwd = ""
        self.process_age = 0.0
        self.reset()

    def reset(self):
        self.pid = os.getpid()
        self.t0 = clock()
        self.paused = 0.0  # seconds of our own (fetch probe) that max_seconds does not count
        self.stopping = False
        self.ended = "unknown"
        self.exception = None
        self.notes = []
        self.compiled = False
        self.torch = None
        # steps
        self.source_rank = 0
        self.steps = []
        self.step_count = 0
        self.step_thread = threading.main_thread().ident
        self.first_activity = None  # (time, waits until then) of the first forward or backward with an optimizer
        self.first_step_end = None
        self.last_step_end = None
        self.step_begin = None
        self.begin_totals = (0.0, 0.0, 0.0, 0.0)
        self.waits = [0.0, 0.0, 0.0, 0.0]  # loader, copy, sync, other ranks: seconds, all together
        self.optimizer_steps = 0
        self.optimizer_steps_all = 0
        self.skipped_steps = 0
        self.optimizers_made = 0
        self.optimizers = {}  # id -> weak reference (strong in proof mode)
        self.first_optimizer = None
        self.backwards = 0
        self.module_calls = 0
        self.last_loader = None
        # sites
        self.loaders = []
        self.copies = {}
        self.syncs = {}
        self.touched = []
        self.batch_ids = frozenset()
        # proof, patched text, writes
        self.batch_hashes = []
        self.epochs = []
        self.forced = []
        self.patched_lines = {}
        self.writes = []
        self.overhead = 0.0
        self.calls = self.warned = 0
        self.window = None
        self.frozen = None  # the record as it was when the profiler window began

    def note(self, text):
        if len(self.notes) < 50 and text not in self.notes:
            self.notes.append(text)

    def failed(self, where, error):
        """A failure of ours: told in the record, never to the user's code."""
        self.note(f"watcher: {where}: {type(error).__name__}: {error}")


W = Watch()
local = Local()


def load_plan(path):
    with open(path, encoding="utf-8") as file:
        return {**DEFAULTS, **json.load(file)}


def begin(plan):
    W.plan = plan
    W.cwd = os.path.realpath(plan["command_cwd"] or os.getcwd())
    W.process_age = _process_age()
    W.reset()
    W.active = True
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork():
    # A forked child counts for itself: its own steps make its own record, a loader worker makes none.
    age = W.process_age + (clock() - W.t0)
    active, loaders, torch = W.active, W.loaders, W.torch
    W.reset()
    W.process_age = age
    W.active, W.torch = active, torch
    W.loaders = loaders
    for info in loaders:
        info.forget_counts()
    local.call = local.loader = local.making = 0
    from _gpudoctor_watch import calls, record

    calls.forget_entries()
    record.after_fork()


def _process_age():
    """Seconds since this process began, from /proc; 0 where it cannot be read."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            begun = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        with open("/proc/uptime", encoding="ascii") as file:
            return max(0.0, float(file.read().split()[0]) - begun)
    except Exception:
        return 0.0


def launched(name):
    """A number that a launcher has set in the environment, or None."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None


def ranks():
    """(rank, number of ranks): from torch.distributed when the script has joined a group, else from the launcher."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
    except Exception as error:
        W.failed("ranks", error)
    return launched("RANK"), launched("WORLD_SIZE")


def seconds_since_start():
    return W.process_age + (clock() - W.t0) - W.paused


# --- where user code stands ------------------------------------------------------------------------------------

USER, PACKAGE, OURS = 2, 1, 0  # a line of the user; of an installed package; of torch, the standard library or us

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.realpath(os.__file__)) + os.sep
_codes: dict = {}  # id(code) -> (code kept alive, kind, file shown)
_sites: dict = {}  # (id(code), last instruction) -> FILE:LINE


def _classify(frame):
    code = frame.f_code
    name = code.co_filename
    shown = name
    if name.startswith("<"):
        # `python -c` and stdin are the user's; other nameless code is generated
        kind = USER if name in ("<string>", "<stdin>") and frame.f_globals.get("__name__") == "__main__" else OURS
    else:
        path = os.path.realpath(name)
        inside = path.replace("\\", "/")
        if path.startswith(_OWN):
            kind = OURS
        elif "/site-packages/" in inside or "/dist-packages/" in inside:
            kind = OURS if "/torch/" in inside or "/torchdata/" in inside else PACKAGE
        elif path.startswith(_STDLIB) or _torch_folder(path):
            kind = OURS
        else:
            kind = USER
        shown = shown_path(path)
    found = (code, kind, shown)
    if len(_codes) < 50000:
        _codes[id(code)] = found  # keeps the code object, so that its id stays its own
    return found


def is_kept(frame):
    return id(frame.f_code) in _codes


def _torch_folder(path):
    torch = sys.modules.get("torch")
    folder = os.path.dirname(getattr(torch, "__file__", None) or "")
    return bool(folder) and path.startswith(os.path.realpath(folder) + os.sep)


def shown_path(path):
    """Relative to the directory of the command when below it, else absolute."""
    root = W.cwd.rstrip(os.sep) + os.sep
    return path.removeprefix(root)


def site_of(frame):
    key = (id(frame.f_code), frame.f_lasti)
    site = _sites.get(key)
    if site is None:
        found = _codes.get(key[0]) or _classify(frame)
        site = f"{found[2]}:{frame.f_lineno or 0}"
        if key[0] in _codes:
            _sites[key] = site
    return site


def user_site(frame):
    """The innermost line of the user's own; else of an installed package; else None."""
    package = None
    while frame is not None:
        found = _codes.get(id(frame.f_code))
        if found is None:
            found = _classify(frame)
        if found[1] == USER:
            return site_of(frame)
        if found[1] == PACKAGE and package is None:
            package = frame
        frame = frame.f_back
    return site_of(package) if package is not None else None


def kind_of(frame):
    found = _codes.get(id(frame.f_code))
    return (found if found is not None else _classify(frame))[1]


def called_by_user(frame):
    """The library function that the user's line called and in which `frame` stands, such as
    torch.amp.grad_scaler.GradScaler.step; None when it is the user's line itself."""
    found = None
    while frame is not None and kind_of(frame) != USER:
        module = frame.f_globals.get("__name__") or ""
        if module not in ("warnings", "_py_warnings") and not module.startswith("_gpudoctor_watch"):
            found = f"{module}.{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
        frame = frame.f_back
    return found if frame is not None else None


def next_outer(frame):
    """The first frame outward that is not torch's, the standard library's or ours."""
    while frame is not None and kind_of(frame) == OURS:
        frame = frame.f_back
    return frame
