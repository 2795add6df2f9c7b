"""Ends every process of a watched command: its session, and whoever left it but still carries its plan."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path


def end_all(process: subprocess.Popen[bytes], plan_file: str, *, term_wait_s: float) -> None:
    """SIGTERM to all, up to `term_wait_s` seconds for them to end in order, then SIGKILL until none is left.

    torchrun starts its ranks in sessions of their own and daemons leave theirs, so processes are also found by the
    plan's unique path in their environment. A process stuck in the kernel is given up after five seconds.
    """
    if term_wait_s > 0:
        _signal(process, plan_file, signal.SIGTERM)
        deadline = time.monotonic() + term_wait_s
        while time.monotonic() < deadline and (process.poll() is None or members(process.pid, plan_file)):
            time.sleep(0.02)
    deadline = time.monotonic() + 5.0
    while True:
        _signal(process, plan_file, signal.SIGKILL)
        if process.poll() is not None and not members(process.pid, plan_file):
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _signal(process: subprocess.Popen[bytes], plan_file: str, number: signal.Signals) -> None:
    for pid in members(process.pid, plan_file):
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue
    if process.poll() is None:
        process.send_signal(number)


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
