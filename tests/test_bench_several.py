"""bench_several_gpus where no GPU is: formulas, boxes of time, recordings, and a rehearsal."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from several import boxed, figures, machine_steps, nccl_tests, record
from several.bench import Bench

from gpudoctor import codec

BENCH = Path(__file__).parent / "bench"


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """A line of an all_reduce_perf run on 8 GPUs: 8 GiB in 63897 us, algbw 134.43, busbw 235.26."""
    seconds, size = 63897e-6, 8589934592
    assert figures.algbw_gb_s(size, seconds) == pytest.approx(134.43, abs=0.01)
    assert figures.all_reduce_busbw_gb_s(size, seconds, 8) == pytest.approx(235.26, abs=0.01)
    assert figures.all_reduce_busbw_gb_s(size, seconds, 2) == figures.algbw_gb_s(size, seconds)
    assert figures.all_reduce_busbw_gb_s(size, seconds, 1) == 0


@pytest.mark.parametrize(
    ("gpus", "wanted"), [(0, (1,)), (1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (8, (1, 2, 4, 8))]
)
def test_counts_of_ranks(gpus: int, wanted: tuple[int, ...]) -> None:
    assert figures.counts(gpus) == wanted


def test_sizes_that_only_one_tool_has_are_left_out() -> None:
    ours = [{"bytes": 1, "busbw": 10.0}, {"bytes": 4, "busbw": 30.0}, {"bytes": 16, "busbw": 5.0}]
    table = figures.beside(ours, {4: 40.0, 16: 0.0, 64: 1.0})
    assert table == [{"bytes": 4, "torch": 30.0, "nccl_tests": 40.0, "ratio": 0.75}]


def test_scaling_table() -> None:
    rates = {"untuned": {1: [3.0, 3.2, 2.8], 2: [2.4, 2.4]}, "tuned": {1: [20.0], 2: [18.0, 19.0]}}
    one, two = figures.scaling_rows(rates)
    assert (one["untuned"]["rate"], one["untuned"]["efficiency"], one["gain"]) == (3.0, 1.0, 6.667)
    assert (two["untuned"]["rate"], two["untuned"]["efficiency"]) == (4.8, 0.8)
    assert (two["tuned"]["rate"], two["tuned"]["efficiency"]) == (37.0, 0.925)
    assert two["gain"] == 7.708
    lines = figures.scaling_text([one, two]).splitlines()
    assert lines[2].split() == ["2", "4.80", "80%", "37.00", "92%", "7.71"]


def test_scaling_table_with_a_version_that_failed() -> None:
    rows = figures.scaling_rows({"untuned": {2: [4.0]}, "tuned": {}})
    assert rows == [{"ranks": 2, "untuned": {"rate": 8.0, "efficiency": 1.0, "runs": [4.0]}}]
    assert figures.scaling_text(rows).splitlines()[1].split() == ["2", "8.00", "100%", "-", "-", "-"]


LAUNCHER = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(rank.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_box_ends_ranks_in_sessions_of_their_own(tmp_path: Path) -> None:
    ran = boxed.run([sys.executable, "-c", LAUNCHER], limit_s=5, out=tmp_path / "step.txt")
    assert ran.code is None
    assert "over its" in ran.why()
    rank = int((tmp_path / "step.txt").read_text())
    deadline = time.monotonic() + 10
    while alive(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(rank)


def test_a_box_tells_how_a_command_failed_and_keeps_multicast_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    code = "import os, sys; print(os.environ['NCCL_NVLS_ENABLE'], os.environ['NVSHMEM_DISABLE_NVLS']); sys.exit('no')"
    ran = boxed.run([sys.executable, "-c", code], limit_s=60, out=tmp_path / "step.txt", env={"NCCL_NVLS_ENABLE": "1"})
    assert (ran.code, ran.out.read_text()) == (1, "0 1\n")
    assert ran.why() == "exit code 1: no"


def test_recorded_calls_are_what_the_fake_nvml_serves() -> None:
    fields = [{"fieldId": 164, "scopeId": 3, "nvmlReturn": 0, "value": {"uiVal": 26562}},
              {"fieldId": 164, "scopeId": 4, "nvmlReturn": 3, "value": {"uiVal": 0}}]  # fmt: skip
    lines = [
        {"call": "nvmlInit", "args": [], "value": None},
        {"call": "nvmlSystemGetDriverVersion", "args": [], "value": "580.1"},
        {"call": "nvmlSystemGetCudaDriverVersion_v2", "args": [], "value": 13000},
        {"call": "nvmlDeviceGetCount", "args": [], "value": 2},
        {"call": "nvmlDeviceGetName", "args": [{"device": 1}], "value": "B"},
        {"call": "nvmlDeviceGetName", "args": [{"device": 0}], "value": "A"},
        {"call": "nvmlDeviceGetNumaNodeId", "args": [{"device": 0}], "error": "NVMLError_NotSupported"},
        {"call": "nvmlDeviceGetP2PStatus", "args": [{"device": 0}, {"device": 1}, 0], "value": 5},
        {"call": "nvmlDeviceGetP2PStatus", "args": [{"device": 0}, {"device": 1}, 0], "value": 0},
        {"call": "nvmlDeviceGetFieldValues", "args": [{"device": 0}, [[164, 3], [164, 4]]], "value": fields},
    ]
    machine = record.nvml_json(json.dumps(line) for line in lines)
    assert machine["system"]["driver_version"] == "580.1"
    assert machine["system"]["device_count"] == 2
    assert machine["system"]["calls"] == {"nvmlSystemGetCudaDriverVersion_v2": [{"args": [], "value": 13000}]}
    first, second = machine["devices"]
    assert second["calls"] == {"nvmlDeviceGetName": [{"args": [], "value": "B"}]}
    assert first["calls"]["nvmlDeviceGetNumaNodeId"] == [{"args": [], "error": "NotSupported"}]
    assert first["calls"]["nvmlDeviceGetP2PStatus"] == [{"args": [{"device": 1}, 0], "value": 0}]
    assert first["fields"] == {"164/3": 26562}


def test_a_recorded_tree_reads_like_the_machine(tmp_path: Path) -> None:
    import recorded

    from gpudoctor.collect.files import Files

    real = tmp_path / "real"
    device = real / "sys/devices/pci0000:00/0000:00:01.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    driver = real / "sys/bus/pci/drivers/nvidia"
    driver.mkdir(parents=True)
    (device / "driver").symlink_to("../../../bus/pci/drivers/nvidia")
    (real / "sys/bus/pci/devices").mkdir(parents=True)
    (real / "sys/bus/pci/devices/0000:00:01.0").symlink_to("../../../devices/pci0000:00/0000:00:01.0")
    (real / "proc/1").mkdir(parents=True)
    (real / "proc/1/environ").write_text("TOKEN=x")
    (real / "proc/cpuinfo").write_text("processor : 0\nflags : a\n")

    def ask(files: Files) -> tuple[object, ...]:
        base = "sys/bus/pci/devices/0000:00:01.0"
        return (files.names("sys/bus/pci/devices"), files.number(f"{base}/vendor"), files.read("proc/cpuinfo").text,
                files.real(base), files.real(f"{base}/driver"))  # fmt: skip

    tree = record.Tree(real)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "listing", "real"):
            patch.setattr(Files, name, getattr(Files, name))  # put back at the end
        record.watch_files(tree)
        Files(real).read("proc/1/environ")
        seen = ask(Files(real))
    assert seen[1] == 0x10DE
    assert "TOKEN" not in tree.text()
    assert ask(Files(recorded.unpack(tree.text(), tmp_path / "again"))) == seen


def test_no_sources_of_nccl_tests(tmp_path: Path) -> None:
    build = nccl_tests.Build(tmp_path, tmp_path / "log.txt")
    assert build.wait(1) == f"{tmp_path} holds no nccl-tests"
    build.stop()
    assert not build.work.exists()


def test_rehearsal_without_a_gpu(tmp_path: Path) -> None:
    """Every step that needs a GPU says so, the others give their part, and the files are there."""
    words = [sys.executable, str(BENCH / "bench_several_gpus.py"), "--out", str(tmp_path), "--limit-s", "250"]
    done = subprocess.run(
        [*words, "--ranks", "0", "--only", "record,all_reduce,bench_pcie,nccl_tests,tune,race,profile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "several.json").read_text())
    status = {name: step["status"] for name, step in said["steps"].items()}
    assert status.pop("record") == "done", done.stdout
    assert set(status.values()) == {"skipped"}
    assert said["steps"]["all_reduce"]["reason"] == "0 GPUs: an all-reduce needs two"
    assert (tmp_path / "raw.tar.gz").stat().st_size > 0
    assert (tmp_path / "raw" / "machine" / "tree.txt").read_text().startswith("proc/")


def test_time_that_is_left_decides_what_is_run(tmp_path: Path) -> None:
    words = [sys.executable, str(BENCH / "bench_several_gpus.py"), "--out", str(tmp_path), "--limit-s", "5"]
    done = subprocess.run([*words, "--ranks", "2", "--only", "all_reduce"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    step = json.loads((tmp_path / "several.json").read_text())["steps"]["all_reduce"]
    assert step["status"] == "skipped"
    assert step["reason"].endswith("s were left, it needs 30")


NCCL_TESTS = """\
# nThread 1 nGpus 2 minBytes 1048576 maxBytes 1073741824 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1
# Using devices
#  Rank  0 Group  0 Pid   1234 on        box device  0 [0000:06:00] NVIDIA H200
#  Rank  1 Group  0 Pid   1234 on        box device  1 [0000:07:00] NVIDIA H200
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    25.00   41.94   41.94      0    24.00   43.69   43.69      0
  1073741824     268435456     float     sum      -1  3250.00  330.38  330.38      0  3240.00  331.40  331.40      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 186.8
"""


def bench_of(tmp_path: Path, gpus: int, **options: object) -> Bench:
    return Bench(argparse.Namespace(**options), gpus, time.monotonic() + 120, tmp_path)


def program(path: Path, output: str) -> Path:
    path.with_suffix(".out").write_text(output)
    path.write_text(f'#!/bin/sh\ncat "{path.with_suffix(".out")}"\n')
    path.chmod(0o755)
    return path


def test_torch_beside_nccl_tests(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 2)
    bench.building = nccl_tests.Build(tmp_path, tmp_path / "log.txt")
    bench.building.problem = None  # as if it had been built
    bench.building.program = program(tmp_path / "all_reduce_perf", NCCL_TESTS)
    bench.sweep = [{"bytes": 1048576, "busbw": 37.0}, {"bytes": 1073741824, "busbw": 330.0}]
    said = machine_steps.other_tool(bench)
    assert [row["ratio"] for row in said["beside"]] == [0.847, 0.996]  # the better of out of place and in place
    assert [figure["value"] for figure in said["figures"]] == [43.69, 331.4]
    assert all(figure["expected"] is None for figure in said["figures"])  # no profile is for two GPUs
    bench.building.stop()


def test_copies_beside_nvbandwidth(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "artifacts" / "tools" / "nvbandwidth-peers.txt").read_text()
    bench = bench_of(tmp_path, 8, nvbandwidth=program(tmp_path / "nvbandwidth", text))
    bench.copies = [
        {"metric": "p2p_read", "subject": "gpu:0-gpu:1", "value": 25.0},
        {"metric": "pcie_replays", "subject": "gpu:0", "value": 0.0},
    ]
    said = machine_steps.nvbandwidth(bench)
    assert [(row["metric"], row["subject"]) for row in said["beside"]] == [("p2p_read", "gpu:0-gpu:1")]
    row = said["beside"][0]
    assert row["ratio"] == round(25.0 / row["nvbandwidth"], 3)
    assert any(line.startswith("p2p_read gpu:1-gpu:0") for line in said["only_nvbandwidth"])


def test_a_figure_is_judged_by_the_profile_of_as_many_gpus(tmp_path: Path) -> None:
    row = {"bytes": 1 << 30, "busbw": 300.0}
    eight = machine_steps.collective(bench_of(tmp_path, 8), "torch", 8, "NVIDIA H200", row)
    assert eight["expected"]["basis"] == "measured"
    assert eight["verdict"] == "bad"
    assert machine_steps.collective(bench_of(tmp_path, 4), "torch", 4, "NVIDIA H200", row)["verdict"] is None
    two = machine_steps.collective(bench_of(tmp_path, 2), "torch", 2, "NVIDIA H200", row)
    assert (two["expected"]["low"], two["verdict"]) == (326.5, "low")


def test_the_bound_is_what_the_links_of_one_gpu_carry() -> None:
    case = codec.decode_case(
        (Path(__file__).parent / "machines" / "h200-2gpu-nvlink-vm" / "case.json").read_text(), what="the machine"
    )[0]
    assert machine_steps.nvlink_bound(case) == "18 NVLinks up, 450 GB/s one way in theory"
    assert machine_steps.nvlink_bound(None) is None
