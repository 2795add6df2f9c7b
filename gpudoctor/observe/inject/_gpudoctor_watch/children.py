"""Runs one job in a forked child, watches over it, and tells how it ended."""

import json
import os
import select
import signal
import sys
import time

from _gpudoctor_watch import in_worker, state
from _gpudoctor_watch.state import W

_POLL_S = 0.1


def run(work, folder, settings, *, deadline_s, hang_s):
    """`work(mapped, folder)` in a forked child of its own process group; a dict with `value` or `fault`.

    settings: what its loader workers are told (see in_worker). A worker that stays at one row for `hang_s` seconds
    hangs; after `deadline_s` seconds the child is ended in any case, and with it all of its workers.
    """
    counters = os.path.join(folder, "counters")
    mapped = in_worker.create(counters)
    reading, writing = os.pipe()
    busy, shm, used, killed = _busy_s(), _shm(), _own_cpu_s(), _oom_kills()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(work, mapped, folder, {**settings, "folder": folder, "counters": counters}, writing)
    os.close(writing)
    try:
        raw, fault, peak = _wait(
            child, reading, mapped, folder, begun + deadline_s, hang_s, shm, settings.get("follow", True)
        )
    finally:
        os.close(reading)
    answer = json.loads(raw.decode()) if raw else {}
    if fault is not None:
        answer["fault"] = fault
    answer["oom_kills"] = _oom_kills() - killed
    wall = time.monotonic() - begun
    answer.update(told(mapped, folder), wall_s=wall, shm_bytes=peak)
    busy_now = _busy_s()
    if busy is not None and busy_now is not None:
        answer["foreign_cpu"] = max(0.0, busy_now - busy - (_own_cpu_s() - used)) / max(wall, 1e-3)
    mapped.close()
    return answer


def _child(work, mapped, folder, job, writing):
    """Never returns. Its own process group, so that it and its workers can be ended together."""
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        W.active = False
        os.environ[in_worker.ENVIRONMENT] = json.dumps(job)
        quiet = os.open(os.devnull, os.O_RDWR)
        errors = os.open(os.path.join(folder, "stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for source, target in ((quiet, 0), (quiet, 1), (errors, 2)):
            os.dup2(source, target)
        import faulthandler

        dump = open(os.path.join(folder, f"stack-{os.getpid()}"), "w")  # noqa: SIM115 - open as long as we live
        faulthandler.register(in_worker.DUMP_SIGNAL, file=dump, all_threads=False)
        _own_multiprocessing()
        W.torch.set_num_threads(1)
        raw = json.dumps(_answer(work, mapped, folder)).encode()
        while raw:
            raw = raw[os.write(writing, raw) :]
    finally:
        os._exit(0)


def _answer(work, mapped, folder):
    """torch raises for a worker that died from its SIGCHLD handler, wherever this process stands: also in here."""
    try:
        try:
            return {"value": work(mapped, folder)}
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except BaseException as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return {"fault": {"kind": "exception", **in_worker.describe_error(error)}}


def _own_multiprocessing():
    """What multiprocessing remembers of the parent's children is not this process's."""
    import multiprocessing.process

    multiprocessing.process._children.clear()
    server = sys.modules.get("multiprocessing.forkserver")
    if server is not None:
        server._forkserver = server.ForkServer()
        for name in ("ensure_running", "get_inherited_fds", "connect_to_new_process", "set_forkserver_preload"):
            setattr(server, name, getattr(server._forkserver, name))


def _wait(child, reading, mapped, folder, deadline, hang_s, shm, follow):
    """(answer, fault, peak of shared memory): until the child has answered, died, hung, or run out of time."""
    raw, fault, peak, begun = b"", None, 0, time.monotonic()
    while True:
        if select.select([reading], [], [], _POLL_S)[0]:
            part = os.read(reading, 65536)
            if part:
                raw += part
                continue
            if raw:
                break
            fault = _ended(child)
            break
        used = _shm()
        if used is not None and shm is not None:
            peak = max(peak, used - shm)
        stuck = _stuck(mapped, hang_s)
        if stuck is not None:
            fault = {"kind": "hang", **_describe_stuck(child, stuck, mapped, folder, follow)}
            break
        if time.monotonic() > deadline:
            fault = {"kind": "timeout", **_describe_late(child, mapped, folder, begun)}
            break
    _end_group(child)
    return raw if fault is None else b"", fault, peak


def _stuck(mapped, hang_s):
    """The slot of a worker that has been at one row for too long, or None."""
    now = time.monotonic()
    for slot in range(1, in_worker.SLOTS):
        if in_worker.get(mapped, slot, in_worker.PID) == 0:
            break
        since = in_worker.get(mapped, slot, in_worker.BUSY_SINCE)
        if since and now - since > hang_s:
            return slot
    return None


def _describe_stuck(child, slot, mapped, folder, follow):
    pid = int(in_worker.get(mapped, slot, in_worker.PID))
    index = in_worker.get(mapped, slot, in_worker.INDEX)
    since = time.monotonic() - in_worker.get(mapped, slot, in_worker.BUSY_SINCE)
    where = "" if follow or index < 0 else f", somewhere in the batch that begins with row {index:.0f}"
    who = "the process itself" if pid == child else f"worker {slot - 1}"
    return {
        "text": f"{who} makes no progress for {since:.0f} s{where}",
        "index": int(index) if index >= 0 else None,
        "worker": slot - 1,
        **_stack(pid, folder),
    }


def _describe_late(child, mapped, folder, begun):
    batches = in_worker.get(mapped, 0, in_worker.BATCHES)
    pids = [int(in_worker.get(mapped, slot, in_worker.PID)) for slot in range(1, in_worker.SLOTS)]
    pid = next((pid for pid in pids if pid), child)
    return {"text": f"{batches:.0f} batches came in {time.monotonic() - begun:.0f} s", **_stack(pid, folder)}


def _stack(pid, folder):
    """Where a process stands: its Python frames, and what it waits for in the kernel."""
    found = {"stack": [], "waits_in": None, "site": None}
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
            found["waits_in"] = file.read().strip() or None
        os.kill(pid, in_worker.DUMP_SIGNAL)
        path = os.path.join(folder, f"stack-{pid}")
        for _ in range(20):
            time.sleep(0.05)
            if os.path.getsize(path):
                break
        time.sleep(0.05)
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = _fetching_thread(file.read())
    except OSError:
        return found
    found["stack"] = lines[:20]
    for line in lines:
        name, _, rest = line.removeprefix("File ").strip('"').partition('", line ')
        if "/torch/" not in name and not name.startswith(state._STDLIB):
            found["site"] = f"{state.shown_path(os.path.realpath(name))}:{rest.split(' ')[0]}"
            break
    return found


def _fetching_thread(text):
    """The frames of the thread that fetches, innermost first, without ours."""
    blocks = [block for block in text.replace("Current thread", "Thread").split("Thread 0x") if "File " in block]
    chosen = [block for block in blocks if "_utils/fetch.py" in block or "_worker_loop" in block] or blocks
    lines = [line.strip() for line in (chosen[0] if chosen else "").splitlines() if line.startswith("  File ")]
    return [line for line in lines if state._OWN not in line]


def _ended(child):
    """How a child ended that gave no answer."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return {"kind": "killed", "text": f"the process that asked for batches was ended by {name}"}
    return {"kind": "lost", "text": f"it ended with code {os.WEXITSTATUS(status)} without an answer"}


def _end_group(child):
    """SIGKILL to the child and its workers; the child is collected, so that its CPU time is counted."""
    _collected(child, 0.2)
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    _collected(child, 5.0)


def _collected(child, seconds):
    deadline = time.monotonic() + seconds
    while True:
        try:
            if os.waitpid(child, os.WNOHANG)[0]:
                return True
        except ChildProcessError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)


def told(mapped, folder):
    """Workers' counters, hashes of rows and faults that were left in the trial's folder."""
    workers = []
    for slot in range(1, in_worker.SLOTS):
        values = in_worker.slot_of(mapped, slot)
        if not values[in_worker.PID]:
            break
        random = int(values[in_worker.RANDOM])
        workers.append(
            {
                "worker": slot - 1,
                "batches": int(values[in_worker.BATCHES]),
                "samples": int(values[in_worker.SAMPLES]),
                "fetch_ms": 1e3 * values[in_worker.FETCH_S],
                "collate_ms": 1e3 * values[in_worker.COLLATE_S],
                "cpus": int(values[in_worker.CPUS]) or None,
                "threads_started": int(max(0.0, values[in_worker.THREADS_LAST] - values[in_worker.THREADS_FIRST])),
                "grown_bytes": int(values[in_worker.GROWN]),
                "grown_over": int(values[in_worker.GROWN_OVER]),
                "grown_steps": int(values[in_worker.GROWN_STEPS]),
                "copied_bytes": int(values[in_worker.COPIED]),
                "copied_over": int(values[in_worker.COPIED_OVER]),
                "copied_steps": int(values[in_worker.COPIED_STEPS]),
                "private_bytes": int(values[in_worker.PRIVATE]) or None,
                "random_state": f"{random:012x}" if random else None,
            }
        )
    stopped = [in_worker.get(mapped, slot, in_worker.STOPPED_AT) for slot in range(1, len(workers) + 1)]
    seen, total, plain = set(), 0, True  # of the first epoch: a later one gives the same rows again
    faults = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith("hashes-0-"):
            with open(path, "rb") as file:
                raw = file.read()
            parts = [raw[place : place + 8] for place in range(0, len(raw) - 7, 8)]
            plain = plain and b"\0" * 8 not in parts
            total += len(parts)
            seen.update(parts)
        elif name.startswith("fault-") and name.endswith(".json"):
            with open(path, encoding="utf-8") as file:
                faults.append(json.load(file))
    return {
        "workers": workers,
        "stopped_at": next((int(value) - 1 for value in stopped if value), None),
        "hashed": total if plain else 0,
        "distinct": len(seen) if plain and total else None,
        "faults": faults,
        "stderr": _tail(os.path.join(folder, "stderr")),
    }


def _tail(path):
    try:
        with open(path, "rb") as file:
            return file.read()[-4000:].decode("utf-8", "replace")
    except OSError:
        return ""


def _busy_s():
    """CPU seconds that the CPUs on which this process may run have been busy."""
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    try:
        with open("/proc/stat", encoding="ascii") as file:
            for row in file:
                name, *fields = row.split()
                if name in own:
                    values = [int(field) for field in fields[:8]]
                    ticks += sum(values) - values[3] - values[4]
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_cpu_s():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _oom_kills():
    """Processes of this control group that the kernel has killed for want of memory; 0 where it is not told."""
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as file:
            group = next(line.split(":", 2)[2].strip() for line in file if line.startswith("0::"))
        with open(f"/sys/fs/cgroup{group}/memory.events", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, ValueError, StopIteration):
        return 0


def _shm():
    from _gpudoctor_watch import trial

    return trial.shm_used()
