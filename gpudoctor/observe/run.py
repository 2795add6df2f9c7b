"""Runs the watched command in a session of its own and ends it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from gpudoctor import codec
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Watched, WatchPlan
from gpudoctor.observe import processes, records

INJECT = Path(__file__).resolve().parent / "inject"
POLL_S = 0.05
TAIL_BYTES = 8000
Stopped = Literal["steps", "deadline", "exit", "interrupted"]
Progress = Callable[[int, int | None, float], None]


def watch(
    command: Sequence[str],
    plan: WatchPlan,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    deadline_s: float | None = None,
    output: Path | None = None,
    on_progress: Progress | None = None,
) -> Watched:
    """Runs `command` under `plan` until it ends, its steps are done, or `deadline_s` seconds are over.

    command: what the user would type; it is never edited. cwd, env: as for the command itself (default: ours).
    output: file to which the command's stdout and stderr are appended; without it they are dropped, but for the
    tail of stderr. on_progress(steps so far, steps planned, seconds) is called about once a second.
    An empty plan.record_dir means a temporary directory, removed afterwards.

    Returns the records of the processes that made steps (of all watched ones if none did), sorted by rank. Whatever
    happens, no process of the command is left running; Ctrl-C ends it too and returns stopped="interrupted".
    Raises GpudoctorError when the command cannot be started.
    """
    folder = Path(cwd) if cwd is not None else Path.cwd()
    own_folder = not plan.record_dir
    record_dir = Path(tempfile.mkdtemp(prefix="gpudoctor-watch-") if own_folder else plan.record_dir)
    try:
        record_dir.mkdir(parents=True, exist_ok=True)
        plan = dataclasses.replace(plan, record_dir=str(record_dir), write_root=plan.write_root or str(folder))
        return _Run(list(command), plan, folder, env, deadline_s, on_progress).run(output)
    finally:
        if own_folder:
            shutil.rmtree(record_dir, ignore_errors=True)


def environment(plan: WatchPlan, plan_file: Path, base: Mapping[str, str] | None) -> dict[str, str]:
    """The command's environment: the injected package first on PYTHONPATH, and what a proof forces before start."""
    result = {**(os.environ if base is None else base), **plan.environment}
    result["GPUDOCTOR_WATCH_PLAN"] = str(plan_file)
    before = result.get("PYTHONPATH")
    result["PYTHONPATH"] = f"{INJECT}{os.pathsep}{before}" if before else str(INJECT)
    if plan.proof is not None:
        result["PYTHONHASHSEED"] = str(plan.proof.seed % 2**32)
        result.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return result


class _Run:
    """One watched command, from its start to the end of its last process."""

    def __init__(
        self,
        command: list[str],
        plan: WatchPlan,
        cwd: Path,
        env: Mapping[str, str] | None,
        deadline_s: float | None,
        on_progress: Progress | None,
    ) -> None:
        self.command, self.plan, self.cwd = command, plan, cwd
        self.deadline_s, self.on_progress = deadline_s, on_progress
        self.record_dir = Path(plan.record_dir)
        self.plan_file = self.record_dir / "plan.json"
        self.env = environment(plan, self.plan_file, env)
        self.tail = b""
        self.begun = time.monotonic()
        self.told = 0.0

    def run(self, output: Path | None) -> Watched:
        raw = {**codec.to_builtins(self.plan), "command_cwd": str(self.cwd), "parent_pid": os.getpid()}
        self.plan_file.write_text(json.dumps(raw), encoding="utf-8")
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(output.open("ab")) if output is not None else None
            process = self._start(log)
            try:
                stopped = self._wait(process, log)
            except KeyboardInterrupt:
                stopped = "interrupted"
            finally:
                # before anything else, and again after a second Ctrl-C
                with contextlib.suppress(KeyboardInterrupt):
                    processes.end_all(process, str(self.plan_file))
                processes.end_all(process, str(self.plan_file))
            self._drain(process, log)
        exit_code = None if stopped != "exit" else process.returncode
        found = records.read_records(self.record_dir, {process.pid: exit_code})
        return Watched(
            command=tuple(self.command),
            cwd=str(self.cwd),
            records=found,
            exit_code=exit_code,
            stopped=stopped,
            stderr_tail=self.tail.decode("utf-8", errors="replace"),
            writes=records.read_writes(self.record_dir),
        )

    def _start(self, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
        if not self.command:
            raise GpudoctorError("there is no command to run", "give one after `--`, such as: python train.py")
        try:
            return subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log if log is not None else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_die_with_parent() if sys.platform == "linux" else None,  # noqa: PLW1509
            )
        except FileNotFoundError:
            if not self.cwd.is_dir():
                raise GpudoctorError(f"cannot run the command: the directory {self.cwd} does not exist") from None
            raise GpudoctorError(
                f"cannot run {self.command[0]!r}: no such program", "check the spelling and PATH, or give a full path"
            ) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise GpudoctorError(f"cannot run {self.command[0]!r}: {reason}") from None

    def _wait(self, process: subprocess.Popen[bytes], log: IO[bytes] | None) -> Stopped:
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stderr, selectors.EVENT_READ)
            while True:
                if selector.get_map():
                    for _ in selector.select(POLL_S):
                        if self._read(process, log) == b"":
                            selector.unregister(process.stderr)
                else:
                    time.sleep(POLL_S)
                if records.all_stopped(self.record_dir):
                    return "steps"
                if process.poll() is not None:
                    return "exit"
                seconds = time.monotonic() - self.begun
                if self.deadline_s is not None and seconds >= self.deadline_s:
                    return "deadline"
                self._tell(seconds)

    def _read(self, process: subprocess.Popen[bytes], log: IO[bytes] | None) -> bytes | None:
        """Passes on what stderr holds now: b"" at its end, None when it holds nothing yet."""
        assert process.stderr is not None
        part: bytes | None = process.stderr.read(65536)
        if part:
            self.tail = (self.tail + part)[-TAIL_BYTES:]
            if log is not None:
                log.write(part)
                log.flush()
        return part

    def _drain(self, process: subprocess.Popen[bytes], log: IO[bytes] | None) -> None:
        """What the pipe still holds; a process that could not be ended may keep it open, so this never waits."""
        assert process.stderr is not None
        while self._read(process, log):
            continue
        process.stderr.close()

    def _tell(self, seconds: float) -> None:
        if self.on_progress is None or seconds - self.told < 1.0:
            return
        self.told = seconds
        self.on_progress(records.steps_so_far(self.record_dir), self.plan.steps, seconds)


def _die_with_parent() -> Callable[[], None]:
    """For the child, between fork and exec: the kernel kills it when we die (PR_SET_PDEATHSIG)."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def before_exec() -> None:
        libc.prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
