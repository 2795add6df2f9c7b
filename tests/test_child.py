"""child.py: whatever a function does in its own process, the parent gets one clear answer and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpudoctor import child

TESTS = Path(__file__).parent


def alive(pid: int) -> bool:
    """A zombie has ended; whether someone reaps it is not ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(*pids: int, within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def wait_for(file: Path) -> list[int]:
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end, f"{file} was not written"
        time.sleep(0.02)
    return [int(word) for word in file.read_text().split()]


def test_value_comes_back() -> None:
    payload = {"text": "grüß\n\x1b", "list": [1, 2.5, None, True], "nested": {"a": {}}}
    result = child.run("child_targets:echo", payload, deadline_s=60)
    assert (result.status, result.value, result.error) == ("ok", payload, None)


def test_child_is_its_own_group_and_light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('the directory of the user is on the path')")
    monkeypatch.chdir(tmp_path)
    result = child.run("child_targets:where", deadline_s=60, env={"CHILD_TEST": "given"})
    assert result.status == "ok"
    assert result.value["group"] == result.value["pid"] == result.pid != os.getpid()
    assert not result.value["torch"]
    assert result.value["variable"] == "given"
    assert not result.value["cwd_on_path"]
    assert gone(result.value["pid"])


def test_huge_payload_and_output() -> None:
    size = 5_000_000
    assert child.run("child_targets:echo", {"x": "y" * size}, deadline_s=60).value == {"x": "y" * size}
    assert len(child.run("child_targets:big", {"size": size}, deadline_s=60).value) == size


def test_prints_and_stdin_stay_away_from_the_protocol() -> None:
    assert child.run("child_targets:chatty", deadline_s=60).value == "real"
    assert child.run("child_targets:reads_stdin", deadline_s=60).value == ""


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("child_targets:fails", "ValueError: first line second [31mline"),
        ("child_targets:exits", "SystemExit: leaving"),
        ("child_targets:not_json", "TypeError: Object of type object is not JSON serializable"),
        ("child_targets:not_finite", "ValueError: Out of range float values are not JSON compliant"),
        ("child_targets:absent", "AttributeError: module 'child_targets' has no attribute 'absent'"),
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_exceptions_become_one_line(target: str, text: str) -> None:
    result = child.run(target, deadline_s=60)
    assert result.status == "error"
    assert result.value is None
    assert result.error is not None
    assert result.error.startswith(text)
    assert result.error.isprintable()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_signal_is_named(name: str) -> None:
    result = child.run("child_targets:kills_itself", {"signal": name}, deadline_s=60)
    assert result.status == "crashed"
    assert result.error is not None
    assert result.error.startswith(f"killed by {name}")


def test_exit_without_answer_tells_code_and_last_words() -> None:
    result = child.run("child_targets:vanishes", {"code": 7}, deadline_s=60)
    assert (result.status, result.error) == ("crashed", "exited with code 7 without an answer: last words")


def test_hang_is_ended_with_its_helpers(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with child.Server() as server:
        assert server.call("child_targets:echo", deadline_s=60).status == "ok"  # started: the deadline is the hang's
        result = server.call("child_targets:hangs", {"file": str(file)}, deadline_s=2)
    assert result.status == "timeout"
    assert result.error == "no answer within 2 s"
    assert gone(*wait_for(file))


def test_killed_from_outside(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    killer = threading.Thread(target=lambda: os.kill(wait_for(file)[0], signal.SIGKILL))
    killer.start()
    result = child.run("child_targets:hangs", {"file": str(file)}, deadline_s=120)
    killer.join()
    assert result.status == "crashed"
    assert result.error is not None
    assert result.error.startswith("killed by SIGKILL")
    assert gone(*wait_for(file))


def test_helper_of_a_good_call_goes_when_the_server_closes() -> None:
    with child.Server() as server:
        helper = server.call("child_targets:leaves_helper", deadline_s=60).value
        assert alive(helper)
    assert gone(helper)


def test_server_keeps_its_child_and_restarts_after_a_crash() -> None:
    with child.Server() as server:
        first = server.call("child_targets:where", deadline_s=60)
        second = server.call("child_targets:where", deadline_s=60)
        assert first.value["pid"] == second.value["pid"] == server.pid
        assert server.call("child_targets:fails", deadline_s=60).status == "error"
        assert server.call("child_targets:where", deadline_s=60).value["pid"] == server.pid
        assert server.call("child_targets:kills_itself", {"signal": "SIGKILL"}, deadline_s=60).status == "crashed"
        assert server.pid is None
        third = server.call("child_targets:where", deadline_s=60)
        assert third.status == "ok"
        assert third.value["pid"] != first.value["pid"]
        os.kill(third.value["pid"], signal.SIGKILL)  # between two calls
        assert gone(third.value["pid"])
        assert server.call("child_targets:where", deadline_s=60).status == "ok"
    assert server.pid is None
    server.close()


def test_progress_comes_in_order() -> None:
    seen: list[int] = []
    with child.Server() as server:
        result = server.call(
            "child_targets:reports", deadline_s=60, on_progress=lambda message: seen.append(message["number"])
        )
        assert server.call("child_targets:echo", {"a": 1}, deadline_s=60).value == {"a": 1}
    assert (result.value, seen) == ("done", [0, 1, 2])


def test_interrupt_in_the_parent_ends_the_child() -> None:
    def interrupt(message: object) -> None:
        raise KeyboardInterrupt

    with child.Server() as server:
        pid = server.call("child_targets:where", deadline_s=60).value["pid"]
        with pytest.raises(KeyboardInterrupt):
            server.call("child_targets:reports", deadline_s=60, on_progress=interrupt)
        assert server.pid is None
    assert gone(pid)


@pytest.mark.parametrize("in_thread", [False, True], ids=["main-thread", "other-thread"])
def test_parent_killed_leaves_nothing(tmp_path: Path, in_thread: bool) -> None:
    """SIGKILL gives the parent no chance to tidy up: the child ends by itself, and its helper with it."""
    file = tmp_path / "pids"
    call = f"child.run('child_targets:hangs', {{'file': {str(file)!r}}}, deadline_s=600)"
    if in_thread:
        call = f"threading.Thread(target=lambda: {call}).start()"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys, threading; sys.path.append({str(TESTS)!r})\nfrom gpudoctor import child\n{call}",
        ]
    )
    pids = wait_for(file)
    parent.kill()
    parent.wait()
    assert gone(*pids)


def test_child_of_a_finished_thread_serves_on() -> None:
    with child.Server() as server:
        starter = threading.Thread(target=lambda: server.call("child_targets:echo", deadline_s=60))
        starter.start()
        starter.join()
        pid = server.pid
        assert server.call("child_targets:where", deadline_s=60).value["pid"] == pid


def test_process_deaf_to_sigkill_is_reported_and_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninterruptible sleep cannot be made at will; signals that have no effect look the same to the parent."""
    real = os.killpg
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    monkeypatch.setattr(child, "KILL_WAIT_S", 0.2)
    file = tmp_path / "pids"
    with child.Server() as server:
        server.call("child_targets:echo", deadline_s=60)
        result = server.call("child_targets:hangs", {"file": str(file)}, deadline_s=1)
    assert result.status == "stuck"
    assert result.pid is not None
    assert result.error is not None
    assert f"process {result.pid} does not end on SIGKILL" in result.error
    (left,) = [process for process in child._left_behind if process.pid == result.pid]
    real(result.pid, signal.SIGKILL)
    left.wait()
    child._left_behind.remove(left)


def test_interpreter_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    result = child.run("child_targets:echo", deadline_s=5)
    assert result.status == "crashed"
    assert result.error is not None
    assert "did not start" in result.error
