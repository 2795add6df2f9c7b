"""Ends every process of a watched command: its session, and whoever left it but still carries its plan."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
CLEANER_WAIT_S = 2.0
GIVE_UP_S = 5.0


def end_all(process: subprocess.Popen[bytes], plan_file: str) -> None:
    """SIGKILL to all, until none is left.

    Not SIGTERM: a script's handler for it may overwrite a checkpoint. torchrun starts its ranks in sessions of their
    own and daemons leave theirs, so processes are also found by the plan's unique path in their environment. The
    helpers that remove shared memory end by themselves after the others, and get two seconds for it. A process stuck
    in the kernel is given up after five.
    """
    begun = time.monotonic()
    while True:
        found = members(process.pid, plan_file)
        waited = time.monotonic() - begun
        if process.poll() is None:
            process.kill()
        elif not found:
            return
        if waited > GIVE_UP_S:
            return
        for pid in found:
            if waited > CLEANER_WAIT_S or not _cleans_up(pid):
                _kill(pid)
        time.sleep(0.01)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _cleans_up(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in CLEANERS)


def members(session: int, plan_file: str) -> list[int]:
    """Living processes in the session, or with the plan in their environment; zombies are not living."""
    found = []
    marker = b"GPUDOCTOR_WATCH_PLAN=" + os.fsencode(plan_file)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state, own_session = _state(entry)
            if state in "ZX":
                continue
            if own_session == session or marker in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (OSError, ValueError, IndexError):
            continue  # ended meanwhile, or another user's
    return found


def _state(entry: Path) -> tuple[str, int]:
    fields = (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[3])
