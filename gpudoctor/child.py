"""Runs a function in its own process with a deadline: JSON in, JSON out, and nothing left behind.

A hung driver call, a crashed CUDA context or a killed probe costs one call and not the run. The child leads its own
session, so the whole group (its helpers too) is ended together. Three things end it with its parent: the end of its
request pipe, PR_SET_PDEATHSIG, and a guard, a tiny fork in the same group that outlives a child which is busy or stuck
in C code and then kills the group.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from gpudoctor.errors import GpudoctorError

ChildStatus = Literal["ok", "error", "timeout", "crashed", "stuck"]
Progress = Callable[[Any], None]

TERM_WAIT_S = 0.5  # between SIGTERM and SIGKILL
KILL_WAIT_S = 2.0  # a process that is still there this long after SIGKILL is stuck in the kernel
CLOSE_WAIT_S = 2.0  # for a served child to leave by itself when its requests end
_SLICE_S = 0.1  # how often a wait looks whether the child still lives
_TAIL_BYTES = 4096
_PR_SET_PDEATHSIG = 1

# -P keeps the user's current directory (a torch.py there, say) off the path of the child.
_START = (
    "import json, sys; own = set(sys.path); sys.path += [p for p in json.loads(sys.argv[1]) if p not in own]; "
    "from gpudoctor import child; child.serve(int(sys.argv[2]))"
)


@dataclass
class ChildResult:
    """How one call ended. `value` is set for "ok"; `error` is one line for everything else.

    "timeout": over the deadline and ended. "crashed": ended by a signal or exit without an answer. "stuck": did not
    even end on SIGKILL (uninterruptible in the kernel); it is left behind under `pid`. `seconds` is wall time.
    """

    status: ChildStatus
    value: Any
    error: str | None
    pid: int | None
    seconds: float


def run(
    target: str, payload: dict[str, Any] | None = None, *, deadline_s: float, env: dict[str, str] | None = None
) -> ChildResult:
    """Call ``target`` ("package.module:function") with `payload` in a new process; see ChildResult for the outcomes.

    `env` is added to the environment of this process. The deadline includes the start of the interpreter.
    """
    with Server(env=env) as server:
        return server.call(target, payload, deadline_s=deadline_s)


class Server:
    """One child that serves a sequence of calls, so that a costly import is paid once.

    After a crash or a time-out the next call starts a new child. Not for use from several threads at once.
    """

    def __init__(self, *, env: dict[str, str] | None = None) -> None:
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._tail = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The pid of the child that serves now, or None before the first call and after a failed one."""
        return None if self._process is None else self._process.pid

    def call(
        self,
        target: str,
        payload: dict[str, Any] | None = None,
        *,
        deadline_s: float,
        on_progress: Progress | None = None,
    ) -> ChildResult:
        """Call one function in the child. It gets `payload`, and a progress function if it takes two arguments."""
        begin = time.monotonic()
        self._number += 1
        request = json.dumps({"call": self._number, "target": target, "payload": payload or {}}, allow_nan=False)
        self._tail.clear()
        try:
            if self._process is None or _has_ended(self._process):
                self._end(gentle=False)
                self._process = _start(self._env)
            process = self._process
            reply = self._exchange(process, request.encode() + b"\n", begin + deadline_s, on_progress)
        except OSError as error:
            self._end(gentle=False)
            text = _one_line(f"the child process did not start: {error}")
            return ChildResult("crashed", None, text, None, time.monotonic() - begin)
        except BaseException:  # Ctrl-C, or a progress function that raises: the child must not live on
            self._end(gentle=False)
            raise
        if reply is not None:
            status: ChildStatus = "ok" if "value" in reply else "error"
            return ChildResult(status, reply.get("value"), reply.get("error"), process.pid, time.monotonic() - begin)
        crashed = _has_ended(process)
        gone = self._end(gentle=False)
        seconds = time.monotonic() - begin
        if crashed:
            return ChildResult("crashed", None, self._last_words(process.returncode), process.pid, seconds)
        text = f"no answer within {deadline_s:g} s"
        if gone:
            return ChildResult("timeout", None, text, process.pid, seconds)
        text += f"; process {process.pid} does not end on SIGKILL{_kernel_state(process.pid)} and is left behind"
        return ChildResult("stuck", None, text, process.pid, seconds)

    def close(self) -> None:
        """End the child and its group; a child that works is not waited for longer than CLOSE_WAIT_S."""
        self._end(gentle=True)

    def _exchange(
        self, process: subprocess.Popen[bytes], request: bytes, deadline: float, on_progress: Progress | None
    ) -> dict[str, Any] | None:
        """The reply to this call, or None when the child ended or the deadline passed."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        out, err, into = process.stdout.fileno(), process.stderr.fileno(), process.stdin.fileno()
        pending = memoryview(request)
        buffered = bytearray()
        ended = False
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            selector.register(err, selectors.EVENT_READ)
            selector.register(into, selectors.EVENT_WRITE)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                ready = {key.fd for key, _ in selector.select(0 if ended else min(left, _SLICE_S))}
                if into in ready:
                    try:
                        pending = pending[os.write(into, pending[:65536]) :]
                    except BrokenPipeError:
                        pending = pending[:0]
                    if not pending:
                        selector.unregister(into)
                if err in ready and not self._read_stderr(err):
                    selector.unregister(err)
                if out in ready:
                    chunk = os.read(out, 1 << 20)
                    buffered += chunk
                    if not chunk:
                        selector.unregister(out)
                    if b"\n" in chunk:
                        *lines, rest = bytes(buffered).split(b"\n")
                        buffered = bytearray(rest)
                        reply = self._answer(lines, on_progress)
                        if reply is not None:
                            return reply
                if ended and not ready & {out, err}:
                    return None
                if not ended and _has_ended(process):
                    # What a dead child wrote before it died is still read; its helpers may hold the pipes open.
                    ended = True
                    deadline = min(deadline, time.monotonic() + TERM_WAIT_S)

    def _read_stderr(self, fd: int) -> bool:
        """Keep the tail of what the child wrote to stderr; False at the end of it."""
        chunk = os.read(fd, 1 << 16)
        self._tail += chunk
        del self._tail[:-_TAIL_BYTES]
        return bool(chunk)

    def _answer(self, lines: list[bytes], on_progress: Progress | None) -> dict[str, Any] | None:
        for line in lines:
            message = json.loads(line)
            if message["call"] != self._number:
                continue  # late progress of a call before this one
            if "progress" not in message:
                return dict(message)
            if on_progress is not None:
                on_progress(message["progress"])
        return None

    def _end(self, *, gentle: bool) -> bool:
        """End the child and its group. False when it does not go even on SIGKILL; then it is left behind."""
        process, self._process = self._process, None
        if process is None:
            return True
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if gentle:
            _wait(process, CLOSE_WAIT_S)
        elif not _has_ended(process):
            _signal_group(process.pid, signal.SIGTERM)
            _wait(process, TERM_WAIT_S)
        # The leader is not reaped yet, so its number cannot belong to another group. The guard and helpers go here.
        _signal_group(process.pid, signal.SIGKILL)
        gone = _wait(process, KILL_WAIT_S)
        if gone:
            with contextlib.suppress(OSError, ValueError):
                os.set_blocking(process.stderr.fileno(), False)
                self._read_stderr(process.stderr.fileno())
            process.wait()
        else:
            _left_behind.append(process)  # kept, so that nothing ever waits for it
        process.stdout.close()
        process.stderr.close()
        return gone

    def _last_words(self, returncode: int | None) -> str:
        if returncode is not None and returncode < 0:
            try:
                how = f"killed by {signal.Signals(-returncode).name}"
            except ValueError:
                how = f"killed by signal {-returncode}"
        else:
            how = f"exited with code {returncode} without an answer"
        tail = _one_line(" | ".join(self._tail.decode(errors="replace").strip().splitlines()[-3:]))
        return f"{how}: {tail}" if tail else how


_left_behind: list[subprocess.Popen[bytes]] = []


def _start(env: dict[str, str] | None) -> subprocess.Popen[bytes]:
    path = [entry for entry in sys.path if entry]
    package_root = str(Path(__file__).resolve().parent.parent)
    if package_root not in path:
        path.append(package_root)
    # PR_SET_PDEATHSIG follows the thread that started the child, not the process; elsewhere the guard must do.
    owner = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _START, json.dumps(path), str(owner)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """True once the child has exited; it is not reaped here, so its number stays taken."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    end = time.monotonic() + seconds
    pause = 0.001
    while not _has_ended(process):
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return True


def _signal_group(pid: int, number: signal.Signals) -> None:
    # PermissionError: macOS gives it for a group of zombies only
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _kernel_state(pid: int) -> str:
    """The scheduler state of a process, as text for a message; empty where /proc does not tell."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""
    return " (uninterruptible in the kernel, state D)" if state == "D" else f" (state {state})"


def _one_line(text: str, limit: int = 500) -> str:
    line = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


# ---- in the child ----------------------------------------------------------------------------------------------------


def serve(owner: int) -> None:
    """The child's main loop (started by Server): one JSON request a line on stdin, one JSON reply a line on stdout.

    `owner` is the parent's pid when the parent's thread is safe for PR_SET_PDEATHSIG, else 0.
    """
    if owner:
        _die_with_parent(owner)
    _start_guard()
    # The protocol moves to private descriptors, closed on exec. What functions print, also from C, goes to stderr.
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    lock = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message, allow_nan=False).encode() + b"\n")
        with lock:
            while data:
                data = data[os.write(replies, data) :]

    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            request = json.loads(line)
            call = {"call": request["call"]}

            def progress(item: Any, call: dict[str, Any] = call) -> None:
                send({**call, "progress": item})

            try:
                send({**call, "value": _call(request["target"], request["payload"], progress)})
            except BrokenPipeError:
                return
            except BaseException as error:  # noqa: BLE001  # SystemExit too: the parent is told, and decides
                send({**call, "error": _describe(error)})


def _call(target: str, payload: dict[str, Any], progress: Progress) -> Any:
    module_name, _, function_name = target.partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    if len(inspect.signature(function).parameters) > 1:
        return function(payload, progress)
    return function(payload)


def _describe(error: BaseException) -> str:
    if isinstance(error, GpudoctorError):
        return _one_line(error.message)
    text = _one_line(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _die_with_parent(owner: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # a C library without prctl: the pipe and the guard remain
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner:  # it died before the call
        os._exit(1)


def _start_guard() -> None:
    """Fork the guard. Forked twice, so that a function that waits for its own children never meets it."""
    worker = os.getpid()
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    if os.fork():
        os._exit(0)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it goes last, with the SIGKILL of the group
        os.closerange(1, 256)
        hang_up = select.poll()
        hang_up.register(0, 0)
        hang_up.poll()  # returns when the parent closed its end of the request pipe, or died
        end = time.monotonic() + TERM_WAIT_S + CLOSE_WAIT_S + 1  # the parent, if it lives, is served first
        while time.monotonic() < end and _exists(worker):
            time.sleep(0.02)
        os.killpg(worker, signal.SIGKILL)
    finally:
        os._exit(0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
