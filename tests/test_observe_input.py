"""Commands that go wrong: each ends with what was seen, a reason, and no process left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from observe_support import LOOP, alive, only, watch_command, watch_text

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import WatchPlan, WatchRecord
from gpudoctor.observe import processes, records, watch


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(GpudoctorError, match="'no-such-program': no such program"):
        watch(["no-such-program"], WatchPlan(record_dir=""), cwd=tmp_path)


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(GpudoctorError, match="the directory"):
        watch(["true"], WatchPlan(record_dir=""), cwd=tmp_path / "gone")


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("no program")
    with pytest.raises(GpudoctorError, match="Permission denied"):
        watch([str(tmp_path / "train")], WatchPlan(record_dir=""), cwd=tmp_path)


def test_an_empty_command() -> None:
    with pytest.raises(GpudoctorError, match="no command"):
        watch([], WatchPlan(record_dir=""))


def test_a_script_that_raises_keeps_what_was_seen(tmp_path: Path) -> None:
    text = LOOP + "def each(step):\n    if step == 5:\n        raise ValueError('bad\\nbatch')\ntrain(3, each)\n"
    watched = watch_text(tmp_path, text)
    record = only(watched)
    assert (watched.stopped, watched.exit_code, record.ended, record.exit_code) == ("exit", 1, "exception", 1)
    assert record.exception == "ValueError: bad (train.py:22)"
    assert len(record.steps) == 5
    assert "ValueError: bad" in watched.stderr_tail


def test_a_script_that_exits_early(tmp_path: Path) -> None:
    watched = watch_text(tmp_path, LOOP + "train(1)\nraise SystemExit(7)\n", steps=100)
    record = only(watched)
    assert (watched.stopped, watched.exit_code, record.ended, len(record.steps)) == ("exit", 7, "exit", 4)


def test_a_script_that_wants_arguments(tmp_path: Path) -> None:
    text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()\n"
    watched = watch_text(tmp_path, text)
    assert (watched.exit_code, watched.records) == (2, ())
    assert "--data" in watched.stderr_tail


def test_arguments_reach_the_script(tmp_path: Path) -> None:
    output = tmp_path / "log"
    text = "import sys\nprint(sys.argv, __name__, sys.path[0])\nassert not any('inject' in p for p in sys.path)\n"
    watched = watch_text(tmp_path, text, "--lr", "0.1", output=output)
    assert watched.exit_code == 0, watched.stderr_tail
    assert output.read_text() == f"['train.py', '--lr', '0.1'] __main__ {os.path.realpath(tmp_path)}\n"


def test_binary_output_is_kept_as_it_is(tmp_path: Path) -> None:
    output = tmp_path / "log"
    text = "import os\nos.write(1, bytes(range(256)))\nos.write(2, b'\\xff\\xfe\\x00 bad')\n"
    watched = watch_text(tmp_path, text, output=output)
    assert sorted(output.read_bytes()) == sorted(bytes(range(256)) + b"\xff\xfe\x00 bad")
    assert "bad" in watched.stderr_tail
    json.dumps(watched.stderr_tail)


def test_only_the_tail_of_much_stderr_is_kept(tmp_path: Path) -> None:
    text = "import sys\nfor n in range(200000):\n    print('line', n, file=sys.stderr)\n"
    watched = watch_text(tmp_path, text)
    assert watched.exit_code == 0
    assert watched.stderr_tail.endswith("line 199999\n")
    assert len(watched.stderr_tail) <= 8000


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.02)


LEAVES_PROCESSES = """\
import os, subprocess, sys
sleeper = "import time; time.sleep(600)"
pids = [subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=new).pid for new in (False, True)]
pids += [subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"]).pid]
open("pids", "w").write(" ".join(map(str, pids)))
"""


def test_processes_that_the_script_started_are_ended_too(tmp_path: Path) -> None:
    watched = watch_text(tmp_path, LEAVES_PROCESSES)
    assert watched.exit_code == 0
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert not any(map(alive, pids))


def test_loader_workers_end_with_the_steps(tmp_path: Path) -> None:
    text = LOOP.replace("shuffle=True", "num_workers=2, worker_init_fn=note")
    text = "import os\ndef note(n):\n    open(f'worker-{n}', 'w').write(str(os.getpid()))\n" + text + "train(9)\n"
    watched = watch_text(tmp_path, text, steps=3)
    assert (watched.stopped, len(only(watched).steps)) == ("steps", 3)
    pids = [int((tmp_path / f"worker-{n}").read_text()) for n in range(2)]
    assert not any(map(alive, pids))
    assert watched.writes == ("worker-0", "worker-1")


def test_a_script_that_runs_for_ever_without_a_step(tmp_path: Path) -> None:
    text = "import signal, os\nsignal.signal(15, signal.SIG_IGN)\nopen('pid', 'w').write(str(os.getpid()))\n"
    watched = watch_text(tmp_path, text + "while True: pass\n", deadline_s=6.0)
    assert (watched.stopped, watched.records, watched.exit_code) == ("deadline", (), None)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_script_that_hangs_keeps_every_step_made(tmp_path: Path) -> None:
    text = LOOP + "import time\ntrain(3, lambda step: step == 9 and time.sleep(600))\n"
    watched = watch_text(tmp_path, text, deadline_s=30.0, steps=50)
    record = only(watched)
    assert (watched.stopped, record.ended, len(record.steps)) == ("deadline", "unknown", 9)
    assert record.steps_per_s is not None


def test_a_killed_script_keeps_every_step_made(tmp_path: Path) -> None:
    text = LOOP + "import os\ntrain(3, lambda step: step == 9 and os.kill(os.getpid(), 9))\n"
    watched = watch_text(tmp_path, text)
    record = only(watched)
    assert (watched.exit_code, record.exit_code, len(record.steps)) == (-9, -9, 9)


def test_stopping_runs_no_finally_and_no_except(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_text("precious")
    text = LOOP + (
        "import atexit\natexit.register(lambda: open('checkpoint.pt', 'w').write('atexit'))\n"
        "while True:\n    try:\n        train(3)\n    except:\n        pass\n"
        "    finally:\n        open('checkpoint.pt', 'w').write('half trained')\n"
    )
    watched = watch_text(tmp_path, text, steps=5)
    assert (watched.stopped, len(only(watched).steps)) == ("steps", 5)
    assert (tmp_path / "checkpoint.pt").read_text() == "precious"


def test_what_was_printed_before_the_stop_is_there(tmp_path: Path) -> None:
    output = tmp_path / "log"
    watch_text(tmp_path, LOOP + "train(3, lambda step: print('step', step))\n", steps=3, output=output)
    assert output.read_text() == "step 1\nstep 2\n"  # the third step ends in the optimizer, before its line is printed


def test_a_script_that_imports_torch_and_makes_no_step(tmp_path: Path) -> None:
    record = only(watch_text(tmp_path, "import torch\n"))
    assert (record.step_source, record.steps, record.watched_s) == ("none", (), None)


def test_an_isolated_interpreter_leaves_no_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('plain', file=sys.stderr)\n")
    watched = watch_command(tmp_path, [sys.executable, "-I", "train.py"])
    assert (watched.exit_code, watched.records, watched.stderr_tail) == (0, (), "plain\n")


def test_ctrl_c_ends_the_script_and_keeps_its_steps(tmp_path: Path) -> None:
    def interrupt(steps: int, planned: int | None, seconds: float) -> None:
        if steps >= 4:
            raise KeyboardInterrupt

    text = LOOP + "import time, os\nopen('pid', 'w').write(str(os.getpid()))\ntrain(900, lambda s: time.sleep(0.01))\n"
    watched = watch_text(tmp_path, text, on_progress=interrupt)
    assert watched.stopped == "interrupted"
    assert len(only(watched).steps) >= 4
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_script_ends_when_gpudoctor_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    code = (
        "import sys\nfrom gpudoctor.model import WatchPlan\nfrom gpudoctor.observe import watch\n"
        "watch([sys.executable, 'train.py'], WatchPlan(record_dir=''))\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # what a killed gpudoctor leaves there
    doctor = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env)
    file = tmp_path / "pid"
    wait_until(lambda: file.exists() and file.read_text() != "")
    doctor.kill()
    doctor.wait()
    wait_until(lambda: not alive(int(file.read_text())))


def test_a_broken_record_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "record-1.json").write_text("{")
    (tmp_path / "record-2.json").write_text(json.dumps({"pid": 2, "surprise": 1}))
    (tmp_path / "record-3.json").write_text(json.dumps({"pid": 3, "rank": 1}))
    (tmp_path / "record-4.json").write_text(json.dumps({"pid": 4, "rank": 0}))
    assert [record.pid for record in records.read_records(tmp_path, {})] == [4, 3]


def test_no_process_of_an_earlier_session_is_taken_for_ours() -> None:
    assert processes.members(2**22 + 1, "/no/such/plan.json") == []


def test_the_injected_code_writes_the_fields_of_the_record(tmp_path: Path) -> None:
    """Field names are written by hand there: this keeps the two together."""
    (tmp_path / "records").mkdir()
    watch_text(tmp_path, LOOP + "train(1)\n", steps=2, record_dir=str(tmp_path / "records"))
    (path,) = (tmp_path / "records").glob("record-*.json")
    written = json.loads(path.read_text())
    filled_in_outside = {"exit_code", "bound", "verdict"}
    assert set(written) | filled_in_outside == {field.name for field in dataclasses.fields(WatchRecord)}
