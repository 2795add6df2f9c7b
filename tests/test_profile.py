"""`gpudoctor profile`: the command as a user runs it, and the verdict from watched and profiled steps."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from observe_support import LOOP

from gpudoctor import profiles
from gpudoctor.model import (
    Bound,
    Case,
    CopySite,
    DeviceWindow,
    Envelope,
    Finding,
    Step,
    SyncSite,
    TraceFacts,
    TraceIdle,
    TraceLane,
    TraceLoader,
    TraceStep,
    TraceTimeline,
    Watched,
    WatchedLoader,
    WatchRecord,
)
from gpudoctor.report import render
from gpudoctor.rules import run_rules
from gpudoctor.tune import watched as measured
from gpudoctor.tune.verdict import as_watched, breakdown, judge


def loader(**more: object) -> WatchedLoader:
    fields: dict[str, object] = {
        "site": "train.py:45",
        "ordinal": 0,
        "role": "train",
        "loader_class": "DataLoader",
        "dataset_class": "Images",
        "iterable_dataset": False,
        "batches": 50,
        "wait_ms": 1000.0,
    }
    return WatchedLoader(**{**fields, **more})  # type: ignore[arg-type]


def record(
    *, wall: float = 20.0, load: float = 0.0, copy: float = 0.0, sync: float = 0.0, ranks: float = 0.0, **more: object
) -> WatchRecord:
    """Fifty steady steps after a first one that took a second."""
    step = Step(wall_ms=wall, loader_wait_ms=load, copy_wait_ms=copy, sync_wait_ms=sync, communication_ms=ranks)
    fields: dict[str, object] = {
        "pid": 7,
        "rank": 0,
        "cuda": True,
        "step_source": "optimizer",
        "steps": (Step(wall_ms=1000.0), *[step] * 50),
        "steady_from": 1,
        "window": DeviceWindow(steps=3, trace="trace-7.json"),
    }
    return WatchRecord(**{**fields, **more})  # type: ignore[arg-type]


def trace(
    *,
    compute: float = 0.0,
    communication: float = 0.0,
    copy: float = 0.0,
    loader_waited: float | None = None,
    **idle: float,
) -> TraceFacts:
    """Three profiled steps; all arguments are milliseconds a step."""
    parts = {name: 3 * value for name, value in idle.items()}
    window = 3 * (compute + communication + copy) + sum(parts.values())
    return TraceFacts(
        file="trace-7.json",
        format="kineto",
        rank=0,
        whole_steps=3,
        steps=tuple(TraceStep(name=f"ProfilerStep#{n}", wall_ms=window / 3) for n in range(3)),
        window_ms=window,
        idle_pct=100 * sum(parts.values()) / window,
        compute_ms=3 * compute,
        exposed_communication_ms=3 * communication,
        exposed_copy_ms=3 * copy,
        idle=TraceIdle(**parts),
        kernels_per_step=900.0,
        median_kernel_us=4.2,
        loader=TraceLoader(name="DataLoader", workers=False, calls=3, waited_ms=3 * loader_waited)
        if loader_waited is not None
        else None,
        timeline=TraceTimeline(
            step="ProfilerStep#1",
            wall_ms=window / 3,
            lanes=(
                TraceLane(name="operators", occupied=(1.0,) * 48 + (0.0,) * 48),
                TraceLane(name="compute", occupied=(0.0,) * 48 + (1.0,) * 48),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("seen", "facts", "bound", "words"),
    [
        (  # the profiler made the host slower: the idle time is what the watched step leaves
            record(wall=20, load=0),
            trace(compute=8, host_ms=30, launch_ms=2),
            "host",
            (
                "host bound: the GPU idles 12 of 20 ms a step (60 %) because work is launched late: at most 2.50x"
                " with fewer or larger launches (900 kernels a step, median 4.2 us)"
            ),
        ),
        (
            record(wall=20, sync=6, copy=1),
            trace(compute=8, host_ms=10, sync_ms=10),
            "host",
            ", of which all waits for the GPU together at most 1.54x",  # 7 ms of waits, of 12 that it idles
        ),
        (  # min(host, device): the host works 3 ms, so that no more can run beside the device
            record(wall=20, sync=17),
            trace(compute=8, host_ms=1, sync_ms=20),
            "host",
            ", of which all waits for the GPU together at most 1.18x",
        ),
        (
            record(wall=300, load=260, loaders=(loader(),)),
            trace(compute=30, loader_ms=270, loader_waited=270),
            "loader",
            (
                "loader bound: the GPU idles 260 of 300 ms a step (87 %) while the step waits for a batch"
                " at train.py:45: at most 7.50x from loading ahead"
            ),
        ),
        (  # the batches of the profiled steps lay ready: the wait counts as idle time as far as there is any
            record(wall=30, load=20),
            trace(compute=14, host_ms=3, loader_waited=0.0),
            "loader",
            "loader bound: the GPU idles 16 of 30 ms a step (53 %) while the step waits for a batch: at most 2.14x",
        ),
        (  # the device works on while the host waits for the batch
            record(wall=30, load=20),
            trace(compute=28, host_ms=1, loader_ms=1, loader_waited=20),
            "device",
            (
                "device bound: the GPU computes 28 of 30 ms a step (93 %)"
                "; it idles 7 %, mostly while the step waits for a batch: at most 1.07x"
            ),
        ),
        (record(wall=30), trace(compute=29.5, host_ms=1), "device", "device bound: the GPU computes 29.5 of 30 ms"),
        (
            record(wall=30),
            trace(compute=10, communication=15, kernel_ms=5),
            "communication",
            "communication bound: the GPU only communicates in 15 of 30 ms a step (50 %): at most 2.00x",
        ),
        (record(wall=30), trace(compute=5, copy=20, kernel_ms=5), "copy", "copy bound: the GPU only copies in 20 of"),
        (
            record(wall=30),
            trace(compute=5, kernel_ms=25),
            "unknown",
            "the GPU idles 25 of 30 ms a step (83 %)",
        ),
        (  # kernels that take longer than the step are cut to it
            record(wall=30),
            trace(compute=40, host_ms=1),
            "device",
            "device bound: the GPU computes 30 of 30 ms a step (100 %)",
        ),
        (record(wall=20, load=15), None, "loader", "at most 4.00x from loading ahead; what the GPU does meanwhile was"),
        (
            record(wall=20, sync=15),
            None,
            "device",
            "the host waits 15 of 20 ms a step (75 %) for the GPU: at most",
        ),
        (record(wall=20), None, "unknown", "the host works 20 of 20 ms a step (100 %); what the GPU does meanwhile"),
        (record(wall=20, cuda=False), None, "host", "host bound: no GPU is used; the CPU computes 20 of 20 ms a step"),
        (record(wall=20, ranks=15, cuda=False), None, "communication", "communication bound: the step waits 15 of 20"),
    ],
)
def test_verdict(seen: WatchRecord, facts: TraceFacts | None, bound: Bound, words: str) -> None:
    item = breakdown(seen, facts)
    assert item is not None
    assert (item.steps, item.warm_up) == (50, 1)
    told, text = judge(item, loader_site=seen.loaders[0].site if seen.loaders else None)
    assert told == bound, text
    assert words in text
    if item.device is not None:
        assert item.device.busy + item.device.idle == pytest.approx(item.step)
        assert item.gain_loader <= item.device.idle + 1e-9
        assert item.gain_waits <= min(item.device.idle, item.device.busy, item.waits) + 1e-9


def test_no_step_no_breakdown() -> None:
    assert breakdown(WatchRecord(pid=1), None) is None


def test_hidden_waits_count_as_waits() -> None:
    hidden = SyncSite(site="train.py:9", function="sync", calls=50, window_waited_ms=4.0, detected_by="sync-debug-mode")
    item = breakdown(record(wall=20, sync=2, syncs=(hidden,)), trace(compute=10, sync_ms=10))
    assert item is not None
    assert (item.waits, item.host, item.gain_waits) == (6.0, 14.0, 6.0)


def test_the_trace_is_told_with_the_watched_step() -> None:
    facts = trace(compute=8, host_ms=30, launch_ms=10, kernel_ms=4, loader_ms=2, loader_waited=4)
    item = breakdown(record(wall=20, load=2), facts)
    assert item is not None
    told = as_watched(facts, item)
    assert told.idle is not None
    assert (told.window_ms, told.median_step_ms, told.whole_steps) == (60.0, 20.0, 3)
    assert (told.idle_pct, told.compute_pct) == (60.0, 40.0)
    assert told.idle.loader_ms == 3.0  # half of the wait, as in the trace
    parts = [getattr(told.idle, field.name) for field in dataclasses.fields(TraceIdle)]
    assert sum(parts) == pytest.approx(36.0, abs=1e-3)
    assert told.idle.host_ms == pytest.approx(3 * told.idle.launch_ms, rel=1e-3)
    assert {(step.wall_ms, step.loader_wait_ms, step.idle_ms) for step in told.steps} == {(20.0, 2.0, 12.0)}


def profiled(seen: WatchRecord, facts: TraceFacts | None) -> Case:
    traces = {seen.pid: facts} if facts is not None else {}
    watched, shown = measured.judged(Watched(command=("python", "train.py"), cwd="", records=(seen,)), traces)
    return Case(watched=watched, traces=shown, measurements=measured.measurements(watched, traces))


def test_measurements_hold_what_the_rules_judge() -> None:
    case = profiled(record(wall=20, load=1, sync=6), trace(compute=8, host_ms=30, sync_ms=10))
    values = {(item.metric, item.settings.get("cause")): item for item in case.measurements}
    assert {item.subject for item in case.measurements} == {"rank:0"}
    step = values["step.ms", None]
    assert (step.value, step.samples, step.settings["warm_up"], step.settings["steps"]) == (20.0, 50, 1, 51)
    assert values["step.device_busy", None].value == 0.4
    assert values["step.host_ms", None].value == 13.0
    assert values["step.kernels", None].value == 900.0
    assert values["step.gain_bound", "waits"].value == pytest.approx(20 / 14, abs=1e-3)
    assert values["step.gain_bound", "host"].value == pytest.approx(20 / (20 - 11), abs=1e-3)
    without = {item.metric for item in profiled(record(), None).measurements}
    assert "step.host_ms" in without
    assert not {name for name in without if name.startswith("step.device")}


SITES = (
    SyncSite(
        site="train.py:72",
        function="item",
        calls=60,
        on_device=60,
        waited_ms=9999.0,
        calls_in_steps=51,
        steady_calls=50,
        steady_waited_ms=300.0,
    ),
    SyncSite(
        site="train.py:9",
        function="sync",
        calls=60,
        on_device=60,
        steady_calls=100,
        steady_waited_ms=0.0,
        window_waited_ms=1.5,
        detected_by="sync-debug-mode",
    ),
    SyncSite(site="setup.py:3", function="item", calls=9, on_device=9, waited_ms=50.0, steady_calls=0),
)
COPIES = (
    CopySite(
        site="train.py:43",
        function="to",
        kind="h2d",
        calls=100,
        bytes=100 << 20,
        steady_calls=100,
        steady_waited_ms=50.0,
    ),
)


@pytest.mark.parametrize("width", [60, 200, None])
@pytest.mark.parametrize("unicode", [True, False])
def test_what_the_report_shows(width: int | None, unicode: bool) -> None:
    case = profiled(
        record(wall=20, sync=6, copy=1, syncs=SITES, copies=COPIES, loaders=(loader(),)),
        trace(compute=8, host_ms=30, sync_ms=10),
    )
    envelope = Envelope(
        version="0", command="profile", status="clean", exit_code=0, case=case, measurements=case.measurements
    )
    told = render(envelope, "human", width=width, unicode=unicode, color=False)
    plain = " ".join(told.split())
    for part in (
        "51 steps",
        "the first is warm-up",
        "host bound: the GPU idles 12 of 20 ms a step (60 %)",
        "waiting for copies 1.00 ms/step 5 %",
        "waiting for the GPU 7.50 ms/step 38 %",
        "the GPU computes 8.00 ms/step 40 %",
        "it idles: work is launched late 9.00 ms/step 45 %",
        "900 kernels a step, median 4.20 us, in 3 profiled steps",
        "one step (ProfilerStep#1, 48.0 ms)",
        "train.py:72 item() 6.00 ms/step",
        "train.py:9 hidden sync 1.50 ms/step",
        "2x a step, 1 MiB each, not pinned",
        "covers for the later ones",
    ):
        assert part in plain, part
    assert "setup.py" not in told
    assert unicode or told.isascii()
    assert width is None or max(map(len, told.splitlines())) <= width
    markdown = render(envelope, "markdown", width=None, unicode=True, color=False)
    assert "train.py:72" in markdown
    assert "one step" in markdown
    assert json.loads(render(envelope, "json", width=None, unicode=True, color=False))["case"]["traces"]


# --- the command ------------------------------------------------------------------------------------------------


def profile(folder: Path, text: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "gpudoctor", "profile", *options, "--", sys.executable, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, **env},
    )


SLOW_LOADER = LOOP.replace(
    "loader = DataLoader(data,",
    "import time\n"
    "class Slow(TensorDataset):\n"
    "    def __getitem__(self, index):\n"
    "        time.sleep(0.002)\n"
    "        return super().__getitem__(index)\n"
    "data = Slow(*data.tensors)\n"
    "loader = DataLoader(data,",
)


def test_profile_on_a_machine_without_gpu(tmp_path: Path) -> None:
    done = profile(tmp_path, SLOW_LOADER + "train(9)\n", "--steps", "20", "-o", "out.json", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "loader bound: the step waits" in told
    assert "for a batch at train.py:13" in told
    envelope = json.loads((tmp_path / "out.json").read_text())
    (seen,) = envelope["case"]["watched"]["records"]
    assert (seen["bound"], len(seen["steps"]), seen["window"]) == ("loader", 20, None)
    metrics = {item["metric"] for item in envelope["measurements"]}
    assert {"step.ms", "step.host_ms", "step.gain_bound"} <= metrics
    assert "LDR001" in {finding["rule"] for finding in envelope["findings"]}
    assert not list(tmp_path.glob("trace*"))


def test_profile_of_a_command_that_ends_before_its_steps(tmp_path: Path) -> None:
    done = profile(tmp_path, LOOP + "train(2)\n", "--steps", "50")
    assert done.returncode == 0, done.stderr
    assert "the command ended after 8 of 50 steps" in done.stderr


def test_profile_of_a_command_that_fails_in_the_middle(tmp_path: Path) -> None:
    text = LOOP + "def each(step):\n    assert step < 6, 'broken'\ntrain(9, each)\n"
    done = profile(tmp_path, text)
    assert done.returncode == 2
    assert "6 steps" in done.stdout
    assert "AssertionError: broken" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_profile_without_any_step(tmp_path: Path) -> None:
    done = profile(tmp_path, "print('hello')\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no step was ever seen" in done.stderr


# --- the rules --------------------------------------------------------------------------------------------------


def findings(seen: WatchRecord, facts: TraceFacts | None) -> dict[tuple[str, str], Finding]:
    case = profiled(seen, facts)
    case = dataclasses.replace(case, profile=profiles.for_case(case))
    return {(item.rule, item.subject): item for item in run_rules(case).findings}


READ = SyncSite(
    site="train.py:72",
    function="item",
    calls=51,
    on_device=51,
    calls_in_steps=50,
    steady_calls=50,
    steady_waited_ms=200.0,
)


def test_a_gain_is_stated_for_all_waits_together() -> None:
    copies = (dataclasses.replace(COPIES[0], calls_in_steps=100),)
    seen = record(wall=20, sync=4, copy=1, syncs=(READ,), copies=copies)
    found = findings(seen, trace(compute=8, host_ms=10, sync_ms=10))
    read, copy = found["SYN001", "train.py:72"], found["CPY001", "train.py:43"]
    assert (read.severity, copy.severity) == ("warning", "warning")
    assert read.gain == copy.gain
    assert read.gain is not None
    assert read.gain.high == pytest.approx(20 / 15, abs=1e-3)
    assert "all waits together" in read.gain.source
    assert "4.0 of 20.0 ms a step (20 %)" in read.message
    without = findings(seen, None)["SYN001", "train.py:72"]
    assert without.gain is not None
    assert without.gain.high == pytest.approx(20 / 15, abs=1e-3)


def test_waits_of_a_busy_gpu_are_no_warning() -> None:
    found = findings(record(wall=20, sync=4, syncs=(READ,)), trace(compute=19.8, host_ms=1))
    read = found["SYN001", "train.py:72"]
    assert read.severity == "info"
    assert "the GPU works through nearly all that is waited" in read.message
    assert read.gain is not None
    assert read.gain.high < 1.02
    assert not {rule for rule, _ in found if found[rule, _].severity == "warning"}


def test_the_window_of_a_watched_command_is_not_told_twice() -> None:
    found = findings(
        record(wall=300, load=260, loaders=(loader(batches=51, wait_ms=13000.0),)),
        trace(compute=30, loader_ms=270, loader_waited=270),
    )
    assert [key for key in found if key[0] == "LDR001"] == [("LDR001", "train.py:45")]


def test_many_short_kernels_make_a_launch_bound_step() -> None:
    found = findings(record(wall=20), trace(compute=8, host_ms=30, launch_ms=2))
    launch = found["SYN011", "rank:0"]
    assert launch.gain is not None
    assert launch.gain.high == pytest.approx(2.5, abs=1e-3)  # of the watched step, not of the profiled one
