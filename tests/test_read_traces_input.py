"""Traces in every layout, cut off, damaged, of old and foreign make; exports of Nsight Systems; what is refused."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import trace_support as support

from gpudoctor.model import TraceFacts
from gpudoctor.read import kineto_names, kineto_stream, read_artifacts
from gpudoctor.read.kineto import read_kineto
from gpudoctor.read.traces import read_traces


def comparable(facts: TraceFacts) -> dict[str, Any]:
    """What must not depend on the layout of the file."""
    return {
        name: getattr(facts, name)
        for name in TraceFacts.__dataclass_fields__
        if name not in ("file", "events", "notes", "rank_from", "truncated")
    }


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short file is read in many pieces."""
    monkeypatch.setattr(kineto_stream, "PIECE_BYTES", 3000)


def as_kineto(events: list[dict[str, Any]]) -> str:
    lines = []
    for event in events:
        event = dict(event)
        arguments = event.pop("args", None)
        body = json.dumps(event)[1:-1]
        if arguments is not None:
            body += ',\n    "args": {\n      ' + json.dumps(arguments)[1:-1] + "\n    }"
        lines.append("\n  {\n    " + body + "\n  }")
    return '\n{\n  "schemaVersion": 1,\n  "traceEvents": [' + ",".join(lines) + '\n  ],\n  "traceName": "t.json"\n}\n'


EVENTS = support.events()
HOSTILE = [
    dict(event, name=event["name"] + '"},{"ph": [{]}') if event["cat"] == "kernel" else event for event in EVENTS
]
NESTED = [
    dict(event, args={**event["args"], "Input Dims": [[1, 2], []], "more": [{"a": {}}, {"b": [{}, {}]}]})
    if "args" in event
    else event
    for event in EVENTS
]
LAYOUTS = {
    "kineto's own": as_kineto(EVENTS),
    "minified": json.dumps(support.document(EVENTS), separators=(",", ":")),
    "on one line": json.dumps(support.document(EVENTS)),
    "indented": json.dumps(support.document(EVENTS), indent=2),
    "a bare array": json.dumps(EVENTS, separators=(",", ":")),
    "metadata behind": json.dumps({"traceEvents": EVENTS, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}),
    "long metadata behind": json.dumps({"traceEvents": EVENTS, "deviceProperties": [], "x": [{"y": "z" * 90}] * 200}),
    "nested arguments": json.dumps(support.document(NESTED), separators=(",", ":")),
    "braces in names": json.dumps(support.document(HOSTILE), separators=(",", ":")),
    "braces in names, kineto's own": as_kineto(HOSTILE),
    "a mark in front": "\ufeff" + json.dumps(support.document(EVENTS)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_does_not_matter(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = comparable(support.facts(support.write(tmp_path / "plain.json", EVENTS)))
    small_pieces(monkeypatch)
    path = tmp_path / "trace.json"
    path.write_text(LAYOUTS[layout], encoding="utf-8")
    found = comparable(support.facts(path))
    for name in ("kernels", "device_name"):
        found.pop(name)
        expected.pop(name, None)
    assert found == expected
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(LAYOUTS[layout].encode()))
    assert support.facts(packed).idle_pct == expected["idle_pct"]


def test_memory_stays_bounded_without_kinetos_indentation(tmp_path: Path) -> None:
    """What is added for more of the file is the columns only, a fifth of the text."""
    peaks, sizes = [], []
    for copies in (200, 800):
        path = support.write(tmp_path / "long.json", [event for _ in range(copies) for event in EVENTS])
        tracemalloc.start()
        try:
            recording = read_kineto(path, name="long.json")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        sizes.append(path.stat().st_size)
        assert recording.events == copies * len(EVENTS)
    assert peaks[1] - peaks[0] < 0.3 * (sizes[1] - sizes[0])


def test_old_category_names_and_events_without_a_category(tmp_path: Path) -> None:
    """As of 2021: Operator, Runtime, Kernel, ranges among operators, threads as text, [memory] without a category."""
    old = {"cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}
    old["gpu_memcpy"] = "Memcpy"
    found = []
    for event in EVENTS:
        event = dict(event, cat=old.get(event["cat"], "async"))
        if isinstance(event.get("tid"), int):
            event["tid"] = str(event["tid"])
        found += [event, {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 7, "ts": 0, "args": {"Bytes": 4}}]
    assert comparable(support.facts(support.write(tmp_path / "old.json", found))) == comparable(
        support.facts(support.write(tmp_path / "new.json", EVENTS))
    )


def test_names_of_hip_categories_to_come_and_numbers_as_text(tmp_path: Path) -> None:
    found = []
    for event in EVENTS:
        event = dict(event, name=event["name"].replace("cuda", "hip"))
        if event["cat"] == "cuda_runtime":
            event["cat"] = "new_vendor_runtime"  # learned by its ending
        if "args" in event and "correlation" in event["args"]:
            event["args"] = {**event["args"], "correlation": str(event["args"]["correlation"]), "stream": "7"}
        found += [event, {"ph": "X", "cat": "never_seen", "name": "x", "ts": event["ts"], "dur": 1, "pid": 0, "tid": 0}]
    facts = support.facts(support.write(tmp_path / "hip.json", found))
    plain = support.facts(support.write(tmp_path / "plain.json", EVENTS))
    assert (facts.idle_pct, facts.compute_pct) == (plain.idle_pct, plain.compute_pct)
    assert [wait.call for wait in facts.waits] == ["hipStreamSynchronize", "hipMemcpyAsync"]
    assert support.recorded("amd_mi250").waits[0].call == "hipMemcpyWithStream"


def test_nanoseconds_and_a_base_time(tmp_path: Path) -> None:
    plain = support.facts(support.write(tmp_path / "us.json", support.events(base=1000.0)))
    whole = [
        dict(event, ts=int(event["ts"]), dur=int(event.get("dur", 0)))
        for event in support.events(base=1000.0, scale=1000.0)
    ]
    for event in whole:
        event["ts"] += 1_700_000_000_000_000_000
    nanoseconds = support.facts(support.write(tmp_path / "ns.json", whole))
    assert nanoseconds.median_step_ms == pytest.approx(plain.median_step_ms, abs=0.001)
    assert nanoseconds.idle_pct == pytest.approx(plain.idle_pct, abs=0.05)  # 64-bit floats: steps of 256 ns there
    based = support.write(tmp_path / "base.json", support.events(base=5.25), baseTimeNanoseconds=1_700_000_000 * 10**9)
    assert 0 <= read_kineto(based, name="x").base_ns - 1_700_000_000 * 10**9 < 10_000_000
    assert support.facts(based).idle_pct == plain.idle_pct


def test_events_that_make_no_sense_are_counted_and_cost_nothing_else(tmp_path: Path) -> None:
    odd: list[Any] = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": "soon", "dur": 1, "args": {}},
        {"ph": "X", "cat": "kernel", "name": 7, "ts": 1, "dur": 1},
        {"ph": "X", "cat": ["kernel"], "name": "k", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "o", "ts": 1, "dur": None},
        {"ph": "X", "cat": "kernel", "name": "no arguments", "ts": EVENTS[0]["ts"], "dur": 5},
    ]
    facts = support.facts(support.write(tmp_path / "odd.json", [*EVENTS, *odd]))
    assert "4 events were not understood" in facts.notes
    assert facts.idle_pct == support.facts(support.write(tmp_path / "plain.json", EVENTS)).idle_pct


def test_launch_numbers_that_repeat(tmp_path: Path) -> None:
    """As in traces that were glued together: each activity belongs to the last call with its number before it."""
    later = [dict(event, ts=event["ts"] + 40_000) for event in EVENTS]
    for event in later:
        event["name"] = event["name"].replace("ProfilerStep#", "ProfilerStep#1")
    facts = support.facts(support.write(tmp_path / "twice.json", [*EVENTS, *later]))
    assert facts.whole_steps == 7
    assert facts.idle is not None
    assert facts.idle.dependency_ms == facts.idle.unknown_ms == 0
    assert facts.activities == 7 * 6


def test_cut_off_files_tell_what_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = as_kineto(EVENTS).encode()
    packed = gzip.compress(text)
    small_pieces(monkeypatch)
    for name, content in (("cut.json", text[: len(text) * 2 // 3]), ("cut.json.gz", packed[: len(packed) * 2 // 3])):
        path = tmp_path / name
        path.write_bytes(content)
        result = read_traces([path])
        (error,) = result.errors
        assert "is cut off or damaged: the first" in error
        assert result.artifacts[0].truncated
        facts = result.jobs[0][0]
        assert facts.truncated
        assert any("cut off" in note for note in facts.notes)
        assert facts.steps


def test_garbage_never_becomes_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    chance = random.Random(5)
    text = bytearray(as_kineto(EVENTS).encode())
    path = tmp_path / "trace.json"
    for _ in range(60):
        damaged = bytearray(text)
        for _ in range(chance.randrange(1, 30)):
            place = chance.randrange(60, len(damaged))
            damaged[place : place + chance.randrange(4)] = bytes(
                chance.randrange(256) for _ in range(chance.randrange(4))
            )
        path.write_bytes(damaged if chance.random() < 0.7 else gzip.compress(damaged)[: chance.randrange(20, 4000)])
        result = read_artifacts([str(path)])
        assert len(result.cases) + len(result.errors) >= 1
        assert all("\n" not in error for error in result.errors)


REFUSED = {
    "pickle.pkl": (pickle.dumps({"traceEvents": []}), "never loaded"),
    "archive.pt": (b"PK\x03\x04" + b"\0" * 60, "never loaded"),
    "other.json.gz": (gzip.compress(b'{"a": 1}'), "no profiler trace is in it"),
    "damaged.json.gz": (b"\x1f\x8b\x08\x00garbage", "gzip"),
    "report.nsys-rep": (b"NVIDIA Nsight Systems report" + b"\0" * 50, "only its own program reads"),
    "nothing.json": (b'{"traceEvents": []}', "without events"),
    "no.json": (b'{"traceEvents": nonsense', "no profiler trace"),
    "wrong.json": (b'{"traceEvents": {"a": 1}}', "traceEvents"),
    "empty.sqlite": (b"SQLite format 3\0" + b"\0" * 200, "cannot read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_clear_line(name: str, tmp_path: Path) -> None:
    content, words = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(content)
    result = read_artifacts([str(path)])
    assert result.cases == ()
    (error,) = result.errors
    assert words in error
    assert name in error


def test_without_gpu_events_the_host_still_tells(tmp_path: Path) -> None:
    found = [event for event in EVENTS if event["cat"] in ("user_annotation", "cpu_op")]
    (case,) = read_artifacts([str(support.write(tmp_path / "cpu.json", found))]).cases
    facts = case.traces[0]
    assert facts.window_ms is None
    assert facts.steps[0].loader_wait_ms == 2
    assert any(note.startswith("no GPU events: record with ProfilerActivity.CUDA") for note in facts.notes)
    assert {item.metric for item in case.measurements} == {"step.ms", "step.loader_wait_ms"}
    assert case.gap("traces[0].window_ms") is not None


def test_without_marked_steps(tmp_path: Path) -> None:
    found = [event for event in EVENTS if "ProfilerStep" not in event["name"]]
    facts = support.facts(support.write(tmp_path / "none.json", found))
    assert (facts.steps_from, facts.whole_steps, facts.steps, facts.timeline) == ("none", 0, (), None)
    assert any(note.startswith("no steps are marked") for note in facts.notes)
    assert facts.bound == "loader"
    ends = [
        {**EVENTS[0], "name": "Optimizer.step#Adam.step", "ts": EVENTS[0]["ts"] + 10_000 * step, "dur": 100}
        for step in range(1, 5)
    ]
    counted = support.facts(support.write(tmp_path / "optimizer.json", [*found, *ends]))
    assert (counted.steps_from, counted.whole_steps, counted.median_step_ms) == ("optimizer", 3, 10)


def test_ranks_without_numbers_and_other_jobs_apart(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    for name in ("a_worker3.json", "b.json", "c.json"):
        support.write(folder / name, EVENTS)
    (folder / "notes.txt").write_text("see the wiki\n")
    result = read_artifacts([str(folder)])
    assert result.errors == ()
    (case,) = result.cases
    assert [(facts.rank, facts.rank_from) for facts in case.traces] == [(0, "order"), (1, "order"), (3, "name")]
    assert [artifact.kind for artifact in result.artifacts] == ["unknown", *["kineto-trace"] * 3]
    day = 86_400_000_000
    other = support.write(tmp_path / "later.json", [dict(event, ts=event["ts"] + day) for event in EVENTS])
    assert len(read_artifacts([str(folder / "b.json"), str(other)]).cases) == 2
    first, second = (
        support.write(tmp_path / f"{rank}.json", EVENTS, distributedInfo={"rank": 0, "world_size": rank + 2})
        for rank in range(2)
    )
    assert len(read_artifacts([str(first), str(second)]).cases) == 2


def test_standard_input(tmp_path: Path) -> None:
    result = read_artifacts(["-"], io.BytesIO(json.dumps(support.document(EVENTS)).encode()))
    assert result.errors == ()
    assert result.cases[0].traces[0].file == "stdin"
    assert result.cases[0].traces[0].whole_steps == 3


@pytest.mark.parametrize("schema", ["new", "old"])
def test_nsys_export(schema: str, tmp_path: Path) -> None:
    path = support.nsys_export(tmp_path / "report.sqlite", schema=schema)
    facts = support.facts(path)
    assert (facts.format, facts.device_name, facts.steps_from, facts.whole_steps) == ("nsys", "NVIDIA H200", "nvtx", 3)
    assert facts.median_step_ms == 10
    assert [step.loader_wait_ms for step in facts.steps] == [2, 2, 2]
    (copies,) = facts.copies
    assert (copies.kind, copies.memory, copies.calls, copies.gb_s) == ("h2d", "pageable", 3, 10)
    assert [(wait.call, wait.copy) for wait in facts.waits] == [
        ("cudaStreamSynchronize", None),
        ("cudaMemcpyAsync", "h2d"),
    ]
    assert facts.kernels[0].name == "gemm<float>(int)"
    assert facts.bound == "loader"


def test_nsys_export_of_two_processes(tmp_path: Path) -> None:
    (job,) = read_traces([support.nsys_export(tmp_path / "report.sqlite", processes=2)]).jobs
    assert [(facts.rank, facts.device, facts.whole_steps) for facts in job] == [(0, 0, 3), (1, 1, 3)]


def test_other_databases_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE users (id INT)")
    connection.close()
    (error,) = read_artifacts([str(path)]).errors
    assert "no export of Nsight Systems" in error
    whole = support.nsys_export(tmp_path / "report.sqlite").read_bytes()
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(whole[: len(whole) // 2])
    assert read_artifacts([str(cut)]).errors


def test_user_frames() -> None:
    user = {"train.py(45): <module>", "/home/me/project/model.py(12): forward", "mypkg/loop.py(3): fit"}
    library = {
        "torch/nn/modules/module.py(1527): _call_impl",
        "/opt/conda/lib/python3.11/site-packages/transformers/trainer.py(1): train",
        "threading.py(973): _bootstrap",
        "<built-in method item of Tensor object at 0x7f>",
        "<frozen runpy>(88): _run_code",
        "nn.Module: ResNet_0",
    }
    assert {frame for frame in user | library if kineto_names.user_frame(frame)} == user


def test_python_ranges_name_the_function(tmp_path: Path) -> None:
    base = EVENTS[0]["ts"]
    frames = [
        {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 7, "ts": base, "dur": 39_000, "args": {}}
        for name in ("train.py(9): main", "torch/_tensor.py(1): item")
    ]
    facts = support.facts(support.write(tmp_path / "stacks.json", [*EVENTS, *frames]))
    assert facts.waits[0].site == "train.py (main)"
