"""A user's process that has stopped at its loader and tries candidates there, asked over a socket.

The other end is `_gpudoctor_watch.candidates`, injected into the command: one JSON line a request, one a reply. A
command of several ranks answers with one reply a rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpudoctor import codec
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import LoaderSearchPlan, WatchPlan, WatchRecord
from gpudoctor.observe import processes, records
from gpudoctor.observe.run import _die_with_parent, environment

TARGET_MODULE = "_gpudoctor_watch.target"
POLL_S = 0.1
TAIL_BYTES = 8000
JOIN_WAIT_S = 20.0  # other ranks reach their loader about when the first one does

Reply = dict[str, Any]


class Candidates:
    """The processes of one or several commands (one a rank), from their start until `close`.

    commands: one for a script, or one a rank for `module:callable` targets; environments: what each of them gets
    beside ours; wrap: the command as it is really started, given our folder, which must stay writable. Use as a
    context manager: whatever happens, no process is left running.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        cwd: Path,
        site: str | None = None,
        environments: Sequence[Mapping[str, str]] = (),
        wrap: Callable[[Sequence[str], Path], Sequence[str]] = lambda command, _: command,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpudoctor-loader-"))
        self.cwd = cwd
        self.output = self.folder / "output"
        self.plan_file = self.folder / "plan.json"
        self.plan = WatchPlan(
            record_dir=str(self.folder),
            watch_calls=False,
            loader_search=LoaderSearchPlan(socket=str(self.folder / "socket"), site=site),
            write_root=str(cwd),
        )
        self.channels: list[_Channel] = []
        self.running: list[subprocess.Popen[bytes]] = []
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.listening.bind(str(self.folder / "socket"))
            self.listening.listen(64)
            self.listening.setblocking(False)
            raw = {**codec.to_builtins(self.plan), "command_cwd": str(cwd), "parent_pid": os.getpid()}
            self.plan_file.write_text(json.dumps(raw), encoding="utf-8")
            for number, command in enumerate(commands):
                wrapped = wrap(command, self.folder)
                self.running.append(self._start(wrapped, environments[number] if environments else {}))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, command: Sequence[str], extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
        env = environment(self.plan, self.plan_file, {**os.environ, **extra})
        with self.output.open("ab") as log:
            try:
                return subprocess.Popen(
                    list(command),
                    cwd=self.cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_die_with_parent() if sys.platform == "linux" else None,  # noqa: PLW1509
                )
            except OSError as error:
                reason = "no such program" if isinstance(error, FileNotFoundError) else error.strerror
                raise GpudoctorError(
                    f"cannot run {command[0]!r}: {reason}", "check the spelling and PATH, or give a full path"
                ) from None

    def connect(self, deadline_s: float) -> list[Reply]:
        """The greeting of every local rank that has reached its loader, by local rank.

        GpudoctorError when the command ends, or the time is over, before any loader is iterated.
        """
        greetings: list[tuple[_Channel, Reply]] = []
        begun = time.monotonic()
        deadline = begun + deadline_s
        wanted = len(self.running)
        while len(greetings) < wanted and time.monotonic() < deadline:
            channel = self._accept()
            if channel is not None:
                hello = channel.reply(min(10.0, max(0.1, deadline - time.monotonic()))).get("hello")
                if hello is None:
                    continue  # it ended at once: what it printed tells why
                greetings.append((channel, hello))
                wanted = max(wanted, int(hello["local_ranks"])) if len(self.running) == 1 else wanted
                if len(greetings) < wanted:
                    deadline = min(deadline, time.monotonic() + JOIN_WAIT_S)
                continue
            if not greetings and all(process.poll() is not None for process in self.running):
                raise GpudoctorError(*self._ended_early())
        if not greetings:
            raise GpudoctorError(
                f"no loader was iterated within {deadline_s:.0f} s",
                "name its line with --loader FILE:LINE, if it has many",
            )
        greetings.sort(key=lambda pair: pair[1].get("local_rank") or 0)
        self.channels = [channel for channel, _ in greetings]
        return [hello for _, hello in greetings]

    def ask(self, request: Reply, *, deadline_s: float) -> list[Reply]:
        """The reply of every rank to one request; a rank that died or does not answer replies with a fault."""
        message = json.dumps(request).encode() + b"\n"
        for channel in self.channels:
            channel.send(message)
        deadline = time.monotonic() + deadline_s
        return [channel.reply(max(0.1, deadline - time.monotonic())) for channel in self.channels]

    def next_messages(self, deadline_s: float) -> list[Reply]:
        """What every rank says next by itself: the steps it was allowed to make."""
        deadline = time.monotonic() + deadline_s
        return [channel.reply(max(0.1, deadline - time.monotonic())) for channel in self.channels]

    @property
    def alive(self) -> bool:
        """Whether every rank still serves."""
        return bool(self.channels) and all(channel.fault is None for channel in self.channels)

    def finish(self) -> tuple[WatchRecord, ...]:
        """Let every rank write its record and end."""
        if self.alive:
            self.ask({"do": "end"}, deadline_s=5.0)
        return records.read_records(self.folder, {})

    def written(self) -> tuple[str, ...]:
        """Files below the working directory that the commands wrote."""
        return records.read_writes(self.folder)

    def last_words(self) -> str:
        """The last lines that the commands printed."""
        try:
            raw = self.output.read_bytes()[-TAIL_BYTES:]
        except OSError:
            return ""
        return raw.decode("utf-8", errors="replace").strip()

    def close(self) -> None:
        """End every process of the commands and remove what they wrote for us."""
        for channel in self.channels:
            channel.close()
        self.listening.close()
        for process in self.running:
            with contextlib.suppress(KeyboardInterrupt):
                processes.end_all(process, str(self.plan_file))
            processes.end_all(process, str(self.plan_file))  # again after a second Ctrl-C
        shutil.rmtree(self.folder, ignore_errors=True)

    def _accept(self) -> _Channel | None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.listening, selectors.EVENT_READ)
            if not selector.select(POLL_S):
                return None
        try:
            connection, _ = self.listening.accept()
        except BlockingIOError:
            return None
        return _Channel(connection)

    def _ended_early(self) -> tuple[str, str]:
        code = self.running[0].returncode
        lines = self.last_words().splitlines()
        last = lines[-1].strip() if lines else "it printed nothing"
        if last.startswith("gpudoctor: "):
            return last.removeprefix("gpudoctor: "), "see `gpudoctor tune-loader --help`"
        if code == 0:
            return "the command ended without iterating a loader", "name the loader's line with --loader FILE:LINE"
        return f"the command failed before its loader was iterated: {last}", "run it alone first"


class _Channel:
    """One rank's end of the dialogue."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.setblocking(False)
        self.pending = b""
        self.fault: Reply | None = None

    def send(self, message: bytes) -> None:
        try:
            self.connection.setblocking(True)
            self.connection.sendall(message)
        except OSError:
            self.fault = {"kind": "lost", "text": "the process ended"}
        finally:
            self.connection.setblocking(False)

    def reply(self, deadline_s: float) -> Reply:
        deadline = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            while self.fault is None:
                line, found, rest = self.pending.partition(b"\n")
                if found:
                    self.pending = rest
                    return dict(json.loads(line))
                left = deadline - time.monotonic()
                if left <= 0:
                    self.fault = {"kind": "timeout", "text": f"the process did not answer within {deadline_s:.0f} s"}
                    break
                if selector.select(left):
                    self._read()
        return {"fault": self.fault}

    def _read(self) -> None:
        try:
            part = self.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self.fault = {"kind": "killed", "text": "the process that holds the loader ended"}
        self.pending += part

    def close(self) -> None:
        self.connection.close()


def target_command(target: str, arguments: Mapping[str, object]) -> list[str]:
    """The command that makes the loader of a `module:callable` or `file.py:callable` target."""
    return [sys.executable, "-m", TARGET_MODULE, target, json.dumps(dict(arguments))]


__all__ = ["Candidates", "Reply", "target_command"]
