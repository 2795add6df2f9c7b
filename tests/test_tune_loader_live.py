"""tune-loader on real loaders: each event ends the trial and not the tool, and its cause is named.

Rates are never compared here: the host may be busy. Every command is ended with all of its processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from observe_support import alive

from gpudoctor.collect import collect_case
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Envelope, LoaderStudy, LoaderTrial
from gpudoctor.observe.candidates import Candidates, target_command
from gpudoctor.tune.loader import result, targets
from gpudoctor.tune.loader.live import LiveRunner, read_preflight
from gpudoctor.tune.loader.search import Setting
from gpudoctor.tune.loader.session import Options, Session

SCRIPTS = Path(__file__).parent / "scripts" / "loader"


def study(*words: str, budget_s: float = 4.0, cwd: Path = SCRIPTS, **options: Any) -> tuple[LoaderStudy, Envelope]:
    """The whole of tune-loader on one target."""
    target = targets.parse(words, cwd=cwd)
    session = Session(options=Options(target=target, cwd=cwd, budget_s=budget_s, **options), machine=collect_case())
    found = session.run()
    assert found is not None
    return found, result.envelope(found, session.machine, cwd=cwd, errors=session.errors, notes=session.notes)


def codes(envelope: Envelope) -> dict[str, str]:
    return {finding.rule: finding.severity for finding in envelope.findings}


def trials(name: str, *workers: int, hang_s: float = 20.0) -> list[LoaderTrial]:
    """Short trials of one dataset, with these numbers of workers, each row followed."""
    with Candidates([target_command(f"events.py:{name}", {})], cwd=SCRIPTS) as candidates:
        hello = candidates.connect(180)[0]
        runner = LiveRunner(candidates, deadline=time.monotonic() + 120, start_method=hello["start_method"])
        runner.follow, runner.hang_least_s, runner.least_epochs = True, hang_s, 1
        return [runner.trial(Setting(workers=count), 0.1, "ladder") for count in workers]


def test_an_iterable_that_is_not_split_is_scored_by_its_distinct_rows() -> None:
    plain, doubled = trials("unsplit", 0, 2)
    assert (plain.hashed, plain.distinct) == (600, 600)
    assert (doubled.hashed, doubled.distinct) == (1200, 600)
    assert doubled.rate == pytest.approx(doubled.samples / doubled.seconds / 2)
    assert plain.rate == pytest.approx(plain.samples / plain.seconds)


FIRST_ROWS = """\
import os
import torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    seen = 0
    def __len__(self):
        return 10000
    def __getitem__(self, index):
        if self.seen != os.getpid():
            self.seen = os.getpid()
            with open("first", "a") as file:
                file.write(f"{index}\\n")
        return torch.zeros(4)
def make():
    return DataLoader(Rows(), batch_size=8, shuffle=True)
"""


def test_trials_do_not_all_draw_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "first_rows.py").write_text(FIRST_ROWS)
    with Candidates([target_command("first_rows.py:make", {})], cwd=tmp_path) as candidates:
        hello = candidates.connect(180)[0]
        runner = LiveRunner(candidates, deadline=time.monotonic() + 120, start_method=hello["start_method"])
        for _ in range(3):
            assert runner.trial(Setting(workers=0), 0.05, "ladder").rate
    assert len(set((tmp_path / "first").read_text().split())) == 3


def test_a_few_dear_rows_are_uneven_and_a_disturbed_one_is_not() -> None:
    def variation(target: str) -> float:
        with Candidates([target_command(target, {})], cwd=SCRIPTS) as candidates:
            candidates.connect(180)
            look = {"do": "preflight", "seconds": 3.0, "deadline_s": 60.0, "hang_s": 20.0}
            found = read_preflight(candidates.ask(look, deadline_s=70)[0])
        assert found.row_variation is not None
        return found.row_variation

    assert variation("six.py:heavy_tail") > 1.5  # one row in twenty costs sixty times the others
    assert variation("events.py:disturbed") < 0.5  # one row slept, once


def test_a_hang_is_told_with_row_line_and_stack() -> None:
    (found,) = trials("hangs", 2, hang_s=1.0)
    line = next(n for n, text in enumerate((SCRIPTS / "events.py").read_text().splitlines(), 1) if "3600" in text)
    assert found.fault is not None
    assert (found.fault.kind, found.fault.index, found.fault.site) == ("hang", 100, f"events.py:{line}")
    assert "__getitem__" in found.fault.stack[0]


def test_a_worker_that_is_killed_ends_its_trial_only() -> None:
    before, killed, after = trials("dies", 0, 2, 0)
    assert killed.fault is not None
    assert killed.fault.kind == "killed"
    assert before.rate
    assert after.rate


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_its_row_and_line(workers: int) -> None:
    (found,) = trials("raises_late", workers)
    line = next(n for n, text in enumerate((SCRIPTS / "events.py").read_text().splitlines(), 1) if "no such l" in text)
    assert found.fault is not None
    assert (found.fault.kind, found.fault.index, found.fault.site) == ("exception", 100, f"events.py:{line}")
    assert "KeyError" in found.fault.text


def test_an_epoch_that_ends_early_without_an_error() -> None:
    plain, workers = trials("stops", 0, 2)
    assert plain.stopped_at == workers.stopped_at == 200
    assert (plain.epoch_batches, plain.expected_batches) == (25, 50)


def test_workers_without_a_shard_are_counted() -> None:
    (found,) = trials("one_shard", 3)
    made = [counts.batches for counts in found.per_worker]
    assert made[0] > 0
    assert made[1:] == [0, 0]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("shared", {"LDR012": "error", "LDR018": "warning"}),
        ("with_lambda", {"LDR015": "error"}),
    ],
)
def test_causes_that_a_trial_or_a_look_shows(name: str, wanted: dict[str, str]) -> None:
    _, envelope = study(f"events.py:{name}", budget_s=4.0)
    found = codes(envelope)
    assert {code: found.get(code) for code in wanted} == wanted


@pytest.mark.parametrize(("name", "words"), [("ragged", "equal size"), ("raises", "row 37 is broken"), ("empty", "")])
def test_preflight(name: str, words: str) -> None:
    with Candidates([target_command(f"events.py:{name}", {})], cwd=SCRIPTS) as candidates:
        candidates.connect(180)
        request = {"do": "preflight", "seconds": 2.0, "deadline_s": 20.0, "hang_s": 10.0}
        found = read_preflight(candidates.ask(request, deadline_s=30)[0])
    assert words in (found.fault.text if found.fault else "")
    assert (found.rows == 0) == (name == "empty")


def test_a_script_is_stopped_at_its_training_loader_and_its_step_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that forks the workers never touches the dataset; the check loop before training is passed by."""
    work = tmp_path / "work"  # what is written below it may vanish with the overlay
    work.mkdir()
    shutil.copy(SCRIPTS / "train.py", work)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    found, envelope = study("train.py", budget_s=6.0, cwd=work)
    line = next(n for n, text in enumerate((work / "train.py").read_text().splitlines(), 1) if "shuffle" in text)
    assert found.site == f"train.py:{line}"
    assert found.step_from == "observed"
    assert found.step_ms is not None
    assert 3.5 < found.step_ms < 200
    touched = set((tmp_path / "notes").read_text().split())
    assert (tmp_path / "notes.main").read_text() not in touched
    assert envelope.prescription is not None
    assert "num_workers" in envelope.prescription.loader[0].arguments


def test_ranks_are_measured_at_once() -> None:
    found, _ = study("events.py:sleeps", ranks=2)
    assert found.ranks == 2
    assert any(trial.rate for trial in found.trials)


def test_a_target_that_gives_no_loader_is_one_clear_line() -> None:
    with pytest.raises(GpudoctorError, match="gave int"):
        study("events.py:no_loader")
    with pytest.raises(GpudoctorError, match="nothing here"):
        study("events.py:exits")
    with pytest.raises(GpudoctorError, match="no file"):
        study("missing.py:make")


def command_line(*words: str, **options: Any) -> subprocess.Popen[str]:
    # A shell that runs the suite in the background lets it ignore Ctrl-C, which children would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "gpudoctor", "tune-loader", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_command_writes_nothing_and_prints_a_diff_that_applies(tmp_path: Path) -> None:
    script = tmp_path / "data.py"
    script.write_text(
        "import time\n"
        "from torch.utils.data import DataLoader, Dataset\n\n\n"
        "class Sleeps(Dataset):\n"
        "    def __len__(self):\n        return 4000\n\n"
        "    def __getitem__(self, index):\n        time.sleep(0.004)\n        return index\n\n\n"
        "def make():\n    return Sleeps()\n\n\n"
        'if __name__ == "__main__":\n'
        "    for batch in DataLoader(make(), batch_size=4):\n        pass\n"
    )
    before = script.read_text()
    process = command_line("data.py:make", "--budget", "5", "--json", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    document = json.loads(out)
    (loader,) = document["prescription"]["loader"]
    assert loader["site"] == "data.py:19"
    assert isinstance(loader["arguments"]["num_workers"], int)
    assert script.read_text() == before
    assert {path.name for path in tmp_path.iterdir()} <= {"data.py", "__pycache__"}
    if document["prescription"]["patch"]:
        subprocess.run(["patch", "-p1"], input=document["prescription"]["patch"], text=True, cwd=tmp_path, check=True)
        assert f"num_workers={loader['arguments']['num_workers']}" in script.read_text()


def test_ctrl_c_prints_what_was_measured_and_leaves_no_process() -> None:
    process = command_line("events.py:sleeps", "--budget", "60", "--json", cwd=SCRIPTS)
    deadline = time.monotonic() + 60
    pids: set[int] = set()
    while len(pids) < 2 and time.monotonic() < deadline:  # the command and the child that makes a trial
        pids |= {pid for pid in _below(process.pid) if pid != process.pid}
        time.sleep(0.2)
    time.sleep(0.5)
    pids |= _below(process.pid)
    assert process.poll() is None, "it ended before it could be interrupted"
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(out)["status"] == "failed"
    assert not [pid for pid in pids if pid != process.pid and alive(pid)]


def _below(pid: int) -> set[int]:
    """The process and all of its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, pending = {pid}, [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        found.update(children)
        pending += children
    return found
