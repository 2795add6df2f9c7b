"""Runs one step of a benchmark in a box of time: its own session, what it printed in files, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MARK = "BENCH_STEP"  # in the environment of a step's processes: launchers give their ranks sessions of their own
TERM_WAIT_S = 8.0  # a command that is asked to end prints what it measured so far
NEVER_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """`code` is None when the box's time ran out."""

    code: int | None
    seconds: float
    out: Path
    err: Path

    @property
    def ok(self) -> bool:
        return self.code == 0

    def why(self) -> str:
        """How it ended, with the last line that it wrote to stderr."""
        said = [line for line in self.err.read_text(errors="replace").splitlines() if line.strip()]
        head = f"over its {self.seconds:.0f} s" if self.code is None else f"exit code {self.code}"
        return f"{head}: {said[-1][:300]}" if said else head


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with this gpudoctor last on the path, NVLink multicast kept off, and `more`."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    return {**os.environ, "PYTHONPATH": path, **(more or {}), **NEVER_MULTICAST}


def run(
    words: Sequence[str], *, limit_s: float, out: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Ran:
    """Run `words` for at most limit_s; stdout goes to `out`, stderr beside it. At the end nothing of it is left."""
    err = out.with_name(f"{out.stem}.err.txt")
    mark = uuid.uuid4().hex
    begun = time.monotonic()
    code: int | None = None
    with out.open("wb") as to, err.open("wb") as errors:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env={**environment(env), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=to,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=TERM_WAIT_S)
        finally:
            _end_all(process, mark)
    return Ran(code=code, seconds=round(time.monotonic() - begun, 1), out=out, err=err)


def _end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the session, and every process that carries the step's mark wherever it went."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(3):  # a process may fork while the list is read
        left = marked(mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.2)


def marked(mark: str) -> list[int]:
    """The living processes that were started with this mark; Linux only, elsewhere none."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found
