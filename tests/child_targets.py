"""Functions that tests/test_child.py runs in children: the good, the slow and the broken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def echo(payload: dict[str, Any]) -> dict[str, Any]:
    return payload


def where(payload: dict[str, Any]) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "torch": "torch" in sys.modules,
        "variable": os.environ.get("CHILD_TEST"),
        "cwd_on_path": "" in sys.path or str(Path.cwd()) in sys.path,
    }


def big(payload: dict[str, Any]) -> str:
    return "x" * payload["size"]


def chatty(payload: dict[str, Any]) -> str:
    print('{"call": 1, "value": "forged"}')
    sys.stdout.flush()
    os.write(1, b'\x00\xff{"call": 1, "value": "forged"}\n')
    os.write(2, b"\x1b[31m" + b"noise " * 100_000)
    return "real"


def reads_stdin(payload: dict[str, Any]) -> str:
    return sys.stdin.read()


def fails(payload: dict[str, Any]) -> None:
    raise ValueError("first line\nsecond \x1b[31mline")


def exits(payload: dict[str, Any]) -> None:
    sys.exit("leaving")


def not_json(payload: dict[str, Any]) -> object:
    return object()


def not_finite(payload: dict[str, Any]) -> float:
    return float("nan")


def vanishes(payload: dict[str, Any]) -> None:
    print("last words")
    sys.stderr.flush()
    os._exit(payload["code"])


def kills_itself(payload: dict[str, Any]) -> None:
    os.kill(os.getpid(), getattr(signal, payload["signal"]))
    time.sleep(60)


def reports(payload: dict[str, Any], progress: Callable[[Any], None]) -> str:
    for number in range(3):
        progress({"number": number})
    return "done"


def hangs(payload: dict[str, Any]) -> None:
    """Hang, deaf to SIGTERM, with a helper that is deaf too; pids go to the file."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    file = Path(payload["file"])
    file.with_suffix(".new").write_text(f"{os.getpid()} {helper.pid}")
    file.with_suffix(".new").rename(file)
    time.sleep(600)


def leaves_helper(payload: dict[str, Any]) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
