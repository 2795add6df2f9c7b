"""The profiler window after the watched steps, the warm-up before them, and what a wrapped call costs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from observe_support import LOOP, only, watch_text
from test_observe_scripts import EXPECTED, SCRIPTS, clean_environment, command_of

from gpudoctor.model import Watched, WatchPlan
from gpudoctor.observe import watch
from gpudoctor.observe.run import INJECT
from gpudoctor.read.traces import read_traces


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The injected package, imported here; gone again afterwards."""
    monkeypatch.syspath_prepend(str(INJECT))
    before = set(sys.modules)
    from _gpudoctor_watch import steady, window

    yield SimpleNamespace(steady=steady, window=window)
    for name in set(sys.modules) - before:
        if name.startswith("_gpudoctor_watch"):
            del sys.modules[name]


# --- warm-up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("walls", "warm_up"),
    [
        ([], 0),
        ([5.0], 0),
        ([5.0, 1.0], 1),
        ([50.0, 1, 1, 1, 1], 1),
        ([1.0] * 40, 1),
        ([90.0, 30, 12, 6, *[5.0, 5.1, 4.9, 5.05] * 20], 4),
        ([90.0, *[5.0] * 9, 40.0, *[5.0] * 40], 1),  # one odd step later is no warm-up
        ([90.0, 5, 5, 80, 70, 60, *[5.0] * 40], 6),  # a second compilation is
        ([0.4, 0.4, 0.4, *[9.0, 9.2, 8.9, 9.1] * 12], 3),  # a full prefetch queue makes the first steps short
        ([1.0, 20.0] * 30, 1),  # bursts all along are how this script runs
        ([5.0] * 20 + [30.0] * 20, 20),  # never more than half
    ],
)
def test_where_the_warm_up_ends(injected: Any, walls: list[float], warm_up: int) -> None:
    assert injected.steady.begin(walls, 500) == warm_up


def test_warm_up_is_sought_among_the_first_steps_only(injected: Any) -> None:
    assert injected.steady.begin([50.0] * 30 + [5.0] * 100, 10) == 10


def test_what_a_line_costs_is_told_for_the_steady_steps(tmp_path: Path) -> None:
    text = LOOP + (
        "import time\n"
        "def each(step):\n"
        "    time.sleep(0.3 if step < 4 else 0.01)\n"
        "    for _ in range(3 if step > 20 else 1):\n"
        "        loss_value = model.weight.sum().item()\n"
        "for _ in range(7): model.weight.sum().item()\n"
        "train(10, each)\n"
    )
    record = only(watch_text(tmp_path, text, steps=40))
    assert 4 <= record.steady_from <= 20  # a busy machine may disturb the steps behind the slow ones too
    inside, before = sorted((sync for sync in record.syncs if sync.function == "item"), key=lambda sync: sync.site)
    assert (before.calls, before.calls_in_steps, before.steady_calls, before.steady_waited_ms) == (7, 0, 0, 0.0)
    # the calls between two steps belong to the later one: those after step 20 first count in step 22
    assert (inside.calls, inside.steady_calls) == (39 + 2 * 19, 40 - record.steady_from + 2 * 19)
    assert inside.steady_waited_ms is not None
    assert 0 < inside.steady_waited_ms < inside.waited_ms
    (loader,) = record.loaders
    assert loader.steady_wait_ms is not None
    steady = sum(step.loader_wait_ms for step in record.steps[record.steady_from :])
    assert loader.steady_wait_ms == pytest.approx(steady)


# --- the window -------------------------------------------------------------------------------------------------


def windowed(folder: Path, text: str, **options: Any) -> Watched:
    (folder / "records").mkdir()
    return watch_text(folder, text, **{"record_dir": str(folder / "records"), "profiler_steps": 3, **options})


def test_the_window_comes_after_the_steps_and_counts_nowhere(tmp_path: Path) -> None:
    text = LOOP + "train(10, lambda step: model.weight.sum().item())\n"
    record = only(windowed(tmp_path, text, steps=12))
    assert (record.ended, len(record.steps), record.optimizer_steps, record.batches) == ("steps", 12, 12, 12)
    assert (record.backwards, record.counts_differ, record.notes) == (12, False, ())
    (sync,) = record.syncs
    assert sync.calls == 11
    window = record.window
    assert window is not None
    assert (window.steps, window.skipped, window.sync_ms) == (3, None, 0.0)
    assert window.events > 100
    assert window.trace is not None
    (job,) = read_traces([tmp_path / "records" / window.trace]).jobs
    (facts,) = job
    assert (facts.steps_from, facts.whole_steps, facts.truncated) == ("ProfilerStep", 3, False)
    assert facts.loader is not None
    assert facts.loader.calls == 4  # steps 15, 16 and 17, with an epoch's end in between, where it is asked in vain


@pytest.mark.parametrize(
    ("name", "planned"),
    [("torch.compile", 8), ("GradScaler", 6), ("gradient accumulation", 4), ("Lightning", 4), ("accelerate", 4)],
)
def test_steps_and_window_of_frameworks(tmp_path: Path, name: str, planned: int) -> None:
    (expected,) = [expected for expected in EXPECTED if expected.name == name]
    (tmp_path / "records").mkdir()
    plan = WatchPlan(record_dir=str(tmp_path / "records"), steps=planned, profiler_steps=2)
    watched = watch(command_of(expected, tmp_path), plan, cwd=SCRIPTS, env=clean_environment(), deadline_s=120)
    record = only(watched)
    assert (watched.stopped, record.ended, len(record.steps)) == ("steps", "steps", planned), watched.stderr_tail
    assert record.notes == ()
    assert record.window is not None
    assert (record.window.steps, record.window.skipped) == (2, None)
    (job,) = read_traces([tmp_path / "records" / str(record.window.trace)]).jobs
    assert job[0].whole_steps == 2


def test_ranks_leave_the_window_together(tmp_path: Path) -> None:
    (expected,) = [expected for expected in EXPECTED if expected.ranks == 2]
    (tmp_path / "records").mkdir()
    plan = WatchPlan(record_dir=str(tmp_path / "records"), steps=5, profiler_steps=2)
    watched = watch(command_of(expected, tmp_path), plan, cwd=SCRIPTS, env=clean_environment(), deadline_s=120)
    assert watched.stopped == "steps"
    assert [(record.rank, len(record.steps)) for record in watched.records] == [(0, 5), (1, 5)]
    windows = [record.window for record in watched.records]
    assert [window.steps if window else None for window in windows] == [2, 2], watched.stderr_tail
    (job,) = read_traces([tmp_path / "records" / str(window.trace) for window in windows if window]).jobs
    assert [facts.rank for facts in job] == [0, 1]


def test_steps_that_are_batches_go_on_in_the_window(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "w = torch.zeros(8, requires_grad=True)\n"
        "for x, in DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4):\n"
        "    (x @ w).sum().backward()\n"
        "    w.data -= 0.1 * w.grad\n"
    )
    record = only(windowed(tmp_path, text, steps=6, profiler_steps=2))
    assert (record.step_source, len(record.steps), record.batches) == ("loader", 6, 6)
    assert record.window is not None
    assert record.window.steps == 2


@pytest.mark.parametrize(("epochs", "whole"), [(2, 0), (3, 3)])
def test_a_script_that_ends_in_the_window(tmp_path: Path, epochs: int, whole: int) -> None:
    # 4 steps an epoch; 7 are watched, one is recorded to count its events, one is not, three are to follow
    watched = windowed(tmp_path, LOOP + f"train({epochs})\n", steps=7)
    record = only(watched)
    assert (record.ended, len(record.steps)) == ("steps", 7)
    assert record.window is not None
    assert record.window.steps == whole
    if not whole:
        assert (watched.exit_code, record.window.skipped) == (0, "the command ended first")


def test_a_script_with_a_profiler_of_its_own_keeps_it(tmp_path: Path) -> None:
    text = LOOP + (
        "from torch.profiler import profile\n"
        "with profile() as own:\n"
        "    train(4)\n"
        "print('steps', sum(event.count for event in own.key_averages() if 'Optimizer.step' in event.key))\n"
    )
    output = tmp_path / "output"
    watched = windowed(tmp_path, text, steps=12, output=output)
    record = only(watched)
    assert record.window is not None
    assert (record.window.steps, record.window.skipped) == (0, "the script runs torch.profiler itself")
    assert watched.stopped == "steps"


def test_warnings_as_errors_are_not_met_by_the_profiler(tmp_path: Path) -> None:
    strict = "import warnings\nwarnings.simplefilter('error')\n"
    record = only(windowed(tmp_path, strict + LOOP + "train(9)\n", steps=9))
    assert record.window is not None
    assert (record.ended, record.window.steps, record.notes) == ("steps", 3, ())


# --- waits that only the profiler times -------------------------------------------------------------------------


class Event:
    """As much of a kineto event as is read."""

    def __init__(self, name: str, begin_us: float, length_us: float, device: str = "cpu") -> None:
        self.facts = (name, begin_us, length_us, device)

    def name(self) -> str:
        return self.facts[0]

    def start_ns(self) -> int:
        return int(self.facts[1] * 1000)

    def duration_ns(self) -> int:
        return int(self.facts[2] * 1000)

    def device_type(self) -> str:
        return self.facts[3]


def test_waits_go_to_the_line_that_sync_debug_mode_names_next(injected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = injected.window
    torch = SimpleNamespace(autograd=SimpleNamespace(DeviceType=SimpleNamespace(CPU="cpu")))
    monkeypatch.setattr(module.W, "torch", torch)
    window = module.Window.__new__(module.Window)
    window.marks = [1.0, 1.010, 1.020]  # two steps on the watcher's clock; the profiler's is ahead by 4 s
    window.found = [
        Event("ProfilerStep#0", 5_000_000, 10_000),
        Event("cudaStreamSynchronize", 5_001_000, 500),  # inside a wrapped call
        Event("cudaStreamSynchronize", 5_003_000, 2_000),  # then the mask's line is named
        Event("cudaMemcpyAsync", 5_011_000, 300),  # nobody names a line soon after
        Event("cudaLaunchKernel", 5_012_000, 900),
        Event("Memcpy DtoH (Device -> Pageable)", 5_012_000, 900, "cuda"),
        Event("cudaDeviceSynchronize", 5_021_000, 5_000),  # after the last step
    ]
    mask, other = SimpleNamespace(window=None), SimpleNamespace(window=None)
    window.intervals = [(1.0009, 1.0016)]
    window.warnings = [(1.00505, mask), (1.0190, other)]
    total, unknown = window._join()
    assert total == pytest.approx(2.8e-3)
    assert unknown == pytest.approx(0.3e-3)
    assert mask.window == pytest.approx(1.0)  # milliseconds a step
    assert other.window == 0.0


# --- what a wrapped call costs ----------------------------------------------------------------------------------

CUDA_BUILD = """\
import json, sys
import torch
torch.version.cuda = "12.0"
sys.path.insert(0, INJECT)
from _gpudoctor_watch import calls, cost, debug_mode, state
state.W.torch, state.W.active = torch, True
entered = []
debug_mode.switch_on = lambda: entered.append(True)
torch.cuda._lazy_init = lambda: None
calls.install(torch)
number, row = torch.tensor(3), torch.arange(6.0)
for _ in range(100):
    assert number.item() == 3 and [0, 1, 2, 5][number] == 5 and int(number) == 3 and bool(number)
    assert row.to(torch.float64).dtype == torch.float64 and row.numpy()[2] == 2 and row.tolist()[1] == 1
torch.cuda._lazy_init()
W = state.W
print(json.dumps([sorted(W.syncs), sorted(W.copies), W.calls, calls.passed_calls(), calls.passed_calls(),
    cost.total() > 0, entered, W.waits, W.notes, torch.Tensor.item == torch.Tensor.__base__.item]))
"""


def test_calls_on_cpu_tensors_return_at_once_where_torch_can_use_cuda(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"INJECT = {str(INJECT)!r}\n{CUDA_BUILD}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    syncs, copies, counted, passed, again, cost, entered, waits, notes, equal = json.loads(done.stdout)
    assert (syncs, copies, counted, waits, notes) == ([], [], 0, [0.0, 0.0, 0.0, 0.0], [])
    assert (passed, again) == (600, 600)  # numpy() is not wrapped: it takes CPU tensors only
    assert (cost, entered, equal) == (True, [True], True)


def test_the_cost_of_watching_is_told(tmp_path: Path) -> None:
    text = LOOP + "train(5, lambda step: [model.weight.sum().item() for _ in range(50)])\n"
    watched = only(watch_text(tmp_path, text, steps=20))
    idle = only(watch_text(tmp_path, LOOP + "train(5)\n", steps=20))
    assert watched.overhead_ms is not None
    assert idle.overhead_ms is not None
    assert watched.overhead_ms > 0  # how much is a matter of the host: tests/bench/bench_watch.py
    assert idle.overhead_ms > 0
    assert dataclasses.asdict(watched)["window"] is None


def test_a_call_inside_a_library_is_told_as_such(tmp_path: Path) -> None:
    text = LOOP + (
        "from torch import amp\n"
        "scaler = amp.GradScaler('cpu')\n"
        "def step(number):\n"
        "    scaler.scale(model.weight.sum()).backward()\n"
        "    scaler.step(optimizer)  # scaler\n"
        "    scaler.update()\n"
        "    model.weight.sum().item()\n"
        "train(4, step)\n"
    )
    record = only(watch_text(tmp_path, text))
    found = {sync.site: sync.via for sync in record.syncs}
    (line,) = [f"train.py:{n}" for n, row in enumerate(text.splitlines(), 1) if row.endswith("# scaler")]
    assert found[line] is not None
    assert found[line].startswith("torch.amp.grad_scaler.")
    assert [via for site, via in found.items() if site != line] == [None]
