"""collect on recorded machines: NVML through a fake pynvml, /proc and /sys from a tree."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recorded

from gpudoctor import codec
from gpudoctor.collect import collect_case
from gpudoctor.model import Case, Gpu, Pair

PCIE_BOX, NVSWITCH_BOX, LOST_BOX, VM = (
    "nccl1439-8gpu-pix-phb-sys",
    "b300-8gpu-nvswitch",
    "h100-4gpu-one-lost",
    "h200-1gpu-vm",
)
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    """Collect a recorded machine, after edits of NVML's answers and of its tree."""

    def collect(
        name: str, edit: Edit | None = None, *, tree: dict[str, str] | None = None, timeout_s: float = 60
    ) -> Case:
        nvml = json.loads((recorded.MACHINES / name / "nvml.json").read_text())
        if edit is not None:
            edit(nvml)
        file = tmp_path / "nvml.json"
        file.write_text(json.dumps(nvml))
        for variable, value in recorded.nvml_environment(file).items():
            monkeypatch.setenv(variable, value)
        root = recorded.unpack((recorded.MACHINES / name / "tree.txt").read_text(), tmp_path / "root")
        for path, content in (tree or {}).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
        return collect_case(root=root, timeout_s=timeout_s)

    return collect


def pair(case: Case, a: str, b: str) -> Pair:
    return next(pair for pair in case.pairs if (pair.a, pair.b) == (a, b))


def matrix(name: str) -> dict[tuple[str, str], str]:
    """The cells of a recorded nvidia-smi topo -m, GPU rows only."""
    lines = re.sub(r"\x1b?\[\d*m", "", (recorded.MACHINES / name / "topo.txt").read_text()).splitlines()
    header = next(line.split() for line in lines if "GPU0" in line and "CPU" in line)
    columns = [word for word in header if re.fullmatch(r"GPU\d+|NIC\d+", word)]
    rows = [line.split() for line in lines if re.match(r"GPU\d+\s", line)]
    return {(row[0], column): cell for row in rows for column, cell in zip(columns, row[1:], strict=False)}


@pytest.mark.parametrize("name", recorded.NAMES)
def test_recorded_case_is_what_collect_gives(name: str, serve: Callable[..., Case]) -> None:
    """case.json is what others test with; after a change here: python tests/machines/build.py."""
    assert codec.encode(serve(name)) + "\n" == (recorded.MACHINES / name / "case.json").read_text()


@pytest.mark.parametrize("name", [PCIE_BOX, NVSWITCH_BOX, LOST_BOX])
def test_pairs_are_those_of_the_recorded_matrix(name: str, serve: Callable[..., Case]) -> None:
    case = serve(name)
    compared = 0
    for (row, column), cell in matrix(name).items():
        a, b = int(row[3:]), int(column[3:])
        if column.startswith("GPU"):
            if a >= b or case.gpus[a].lost or case.gpus[b].lost:
                continue
            found = pair(case, f"gpu:{a}", f"gpu:{b}")
            assert (f"NV{found.nvlinks}" if found.nvlinks else found.path) == cell
        else:
            assert pair(case, f"gpu:{a}", f"nic:{case.nics[b].name}").path == cell
        compared += 1
    assert compared >= 15
    assert case.conflicts == ()


def test_affinity_is_that_of_the_recorded_matrix(serve: Callable[..., Case]) -> None:
    gpus = serve(PCIE_BOX).gpus
    assert [gpu.numa_node for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert gpus[0].local_cpus == (*range(14), *range(28, 42))
    assert gpus[7].local_cpus == (*range(14, 28), *range(42, 56))


def test_gpu_order_is_not_numa_order(serve: Callable[..., Case]) -> None:
    gpus = serve(LOST_BOX).gpus
    assert [(gpu.numa_node, gpu.local_cpus) for gpu in gpus] == [
        (3, (6, 14, 22, 30)),
        (1, (4, 12, 20, 28)),
        (7, (7, 15, 23, 31)),
        (5, (5, 13, 21, 29)),
    ]


def test_every_hop_up_to_the_root_port(serve: Callable[..., Case]) -> None:
    gpu = serve(PCIE_BOX).gpus[3]
    assert [(hop.bdf, hop.kind) for hop in gpu.pcie_path] == [
        ("0000:0c:00.0", "endpoint"),
        ("0000:0a:10.0", "switch-down"),
        ("0000:09:00.0", "switch-up"),
        ("0000:00:03.0", "root-port"),
    ]
    assert gpu.root == "pci0000:00"
    assert gpu.pcie is not None
    assert (gpu.pcie.generation, gpu.pcie.width, gpu.pcie.state) == (1, 16, "idle")
    assert (gpu.pcie.max_generation, gpu.pcie.port_max_generation, gpu.pcie.port_max_width) == (4, 3, 16)
    links = [hop.link for hop in gpu.pcie_path]
    assert [link.generation for link in links if link] == [1, 1, 3, 3]


def test_virtual_machine_does_not_tell_locality(serve: Callable[..., Case]) -> None:
    case = serve(VM)
    (gpu,) = case.gpus
    assert case.host.virtualization == "kvm"
    assert gpu.virtualization == "passthrough"
    assert (gpu.numa_node, gpu.numa_nodes, gpu.local_cpus) == (None, (0,), tuple(range(16)))
    assert case.gap(f"gpus[{gpu.bdf}].numa_node") is not None
    # no port is visible above it: not invented
    assert gpu.pcie is not None
    assert gpu.pcie.port_max_generation is None
    assert case.gap(f"gpus[{gpu.bdf}].pcie.port_max_generation") is not None
    assert (gpu.power_w, gpu.power_limit_w, gpu.temperature_slowdown_c) == (78.416, 700.0, 89)
    assert gpu.throttle_reasons == ("gpu_idle",)
    assert (gpu.mig, gpu.ecc, gpu.compute_mode, gpu.processes) == (False, True, "default", ())
    assert case.software.driver_flavour == "open"
    reasons = {gap.path: gap.reason for gap in case.gaps}
    assert reasons[f"gpus[{gpu.bdf}].nvlinks"] == "not supported"
    assert reasons[f"gpus[{gpu.bdf}].thermal_violation_ms"] == "not probed"  # the recorder did not ask


def test_lost_gpu_loses_only_itself(serve: Callable[..., Case]) -> None:
    case = serve(LOST_BOX)
    assert [gpu.lost for gpu in case.gpus] == [False, False, True, False]
    lost = case.gpus[2]
    assert lost.lost_reason == "GPU is lost"
    assert lost.bdf == "0000:83:00.0"  # NVML does not tell; bus order does
    assert case.gap("gpus[0000:83:00.0].power_w") is not None
    assert all(gpu.name and gpu.power_w for gpu in case.gpus if not gpu.lost)
    assert pair(case, "gpu:0", "gpu:3").nvlinks == 6
    assert pair(case, "gpu:0", "gpu:2").nvlinks is None
    assert pair(case, "gpu:0", "gpu:2").path == "SYS"
    assert sum(not link.active for link in case.gpus[0].nvlinks) == 6


def test_gpu_lost_in_the_middle_of_its_calls_keeps_what_it_said(serve: Callable[..., Case]) -> None:
    def lose(nvml: dict[str, Any]) -> None:
        nvml["devices"][5]["calls"]["nvmlDeviceGetPowerUsage"] = [{"args": [], "error": "GpuIsLost"}]

    case = serve(NVSWITCH_BOX, lose)
    assert [gpu.index for gpu in case.gpus if gpu.lost] == [5]
    assert case.gpus[5].name == "NVIDIA B300 SXM6 AC"
    assert case.gpus[5].power_w is None
    assert case.gap(f"gpus[{case.gpus[5].bdf}].power_w") is not None
    assert pair(case, "gpu:0", "gpu:7").nvlinks == 18


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("NotSupported", "not supported"),
        ("NoPermission", "no permission"),
        ("FunctionNotFound", "not supported"),
        ("NotFound", "not present"),
        ("Unknown", "not probed"),
        ("Timeout", "not probed"),
    ],
)
def test_each_field_on_its_own(serve: Callable[..., Case], error: str, reason: str) -> None:
    """Every single call of one GPU refused: every fact is a gap with the reason, and the other GPUs are whole."""

    def refuse(nvml: dict[str, Any]) -> None:
        for entries in nvml["devices"][1]["calls"].values():
            entries[:] = [{"args": entry["args"], "error": error} for entry in entries]

    case = serve(PCIE_BOX, refuse)
    refused = case.gpus[1]
    assert not refused.lost
    assert refused.name is None
    gaps = {gap.path: gap.reason for gap in case.gaps}
    key = f"gpus[{refused.bdf}]" if refused.bdf else "gpus[1]"
    for fact in ("name", "uuid", "power_w", "pstate", "memory_bytes", "processes", "throttle_reasons"):
        assert gaps[f"{key}.{fact}"] == reason
    assert all(gpu.name and gpu.pstate == 8 for gpu in case.gpus if gpu.index != 1)


def test_hung_call_costs_one_gpu(serve: Callable[..., Case]) -> None:
    def hang(nvml: dict[str, Any]) -> None:
        nvml["devices"][1]["calls"]["nvmlDeviceGetPowerUsage"] = [{"args": [], "hang": True}]

    case = serve(LOST_BOX, hang, timeout_s=3)
    assert [gpu.lost for gpu in case.gpus] == [False, True, True, False]
    assert case.gpus[1].lost_reason == "NVML: no answer within 3 s"
    assert case.gpus[3].power_w is not None
    assert pair(case, "gpu:0", "gpu:3").p2p_read == "OK"
    assert case.software.driver == "560.35.03"


def test_crash_of_the_driver_library_costs_one_gpu(serve: Callable[..., Case]) -> None:
    def crash(nvml: dict[str, Any]) -> None:
        nvml["devices"][0]["calls"]["nvmlDeviceGetNvLinkState"] = [{"args": [0], "crash": True}]

    case = serve(LOST_BOX, crash)
    assert [gpu.lost for gpu in case.gpus] == [True, False, True, False]
    assert case.gpus[0].lost_reason is not None
    assert "SIGABRT" in case.gpus[0].lost_reason


@pytest.mark.parametrize(
    ("init", "timeout_s", "reason", "text"),
    [
        ({"init_error": "DriverNotLoaded"}, 60, "not present", "Driver Not Loaded"),
        ({"init_error": "NoPermission"}, 60, "no permission", "Insufficient Permissions"),
        ({"init_error": "LibRmVersionMismatch"}, 60, "not probed", "version mismatch"),
        ({"init": {"hang": True}}, 2, "not probed", "no answer within 2 s"),
        ({"init": {"crash": True}}, 60, "not probed", "SIGABRT"),
    ],
)
def test_without_nvml_the_bus_still_tells(
    serve: Callable[..., Case], init: dict[str, Any], timeout_s: float, reason: str, text: str
) -> None:
    case = serve(LOST_BOX, lambda nvml: nvml["system"].update(init), timeout_s=timeout_s)
    assert case.host.gpus_on_bus == 4
    assert [(gpu.index, gpu.bdf, gpu.lost) for gpu in case.gpus] == [
        (0, "0000:03:00.0", True),
        (1, "0000:43:00.0", True),
        (2, "0000:83:00.0", True),
        (3, "0000:c3:00.0", True),
    ]
    assert case.gpus[0].numa_node == 3
    assert case.gpus[0].pcie_path[-1].kind == "root-port"
    gap = case.gap("software.nvml")
    assert gap is not None
    assert gap.detail is not None
    assert (gap.reason, text in gap.detail) == (reason, True)
    assert pair(case, "gpu:0", "gpu:1").path == "SYS"


def test_gpu_on_the_bus_without_a_driver(serve: Callable[..., Case]) -> None:
    tree = {"proc/driver/nvidia/version": ""}
    case = serve(VM, lambda nvml: nvml["system"].update(init_error="DriverNotLoaded"), tree=tree)
    assert case.host.gpus_on_bus == 1
    assert case.software.driver is None
    gap = case.gap("software.driver")
    assert gap is not None
    assert gap.detail is not None
    assert "Driver Not Loaded" in gap.detail


def test_nvml_is_not_asked(serve: Callable[..., Case], tmp_path: Path) -> None:
    serve(VM)
    case = collect_case(root=tmp_path / "root", nvml=False)
    assert [(gpu.bdf, gpu.lost, gpu.name) for gpu in case.gpus] == [("0000:00:06.0", False, None)]


def test_sources_that_disagree_are_both_kept(serve: Callable[..., Case]) -> None:
    def disagree(nvml: dict[str, Any]) -> None:
        calls = nvml["devices"][0]["calls"]
        calls["nvmlDeviceGetCurrPcieLinkWidth"] = [{"args": [], "value": 1}]
        calls["nvmlDeviceGetTopologyCommonAncestor"][0]["value"] = 50
        calls["nvmlDeviceGetMemoryAffinity"][0]["value"] = [2, 0, 0, 0]
        calls["nvmlDeviceGetCpuAffinityWithinScope"][0]["value"] = [1 << 14, 0, 0, 0]
        nvml["system"]["driver_version"] = "550.1.2"

    case = serve(PCIE_BOX, disagree)
    found = {conflict.path: {value.value for value in conflict.values} for conflict in case.conflicts}
    assert found == {
        "gpus[0000:03:00.0].pcie.width": {"1", "16"},
        "pairs[gpu:0,gpu:1].path": {"SYS", "PIX"},
        "gpus[0000:03:00.0].numa_node": {"0", "1"},
        "gpus[0000:03:00.0].local_cpus": {"0-13,28-41", "14"},
        "software.driver": {"515.105.01", "550.1.2"},
    }


def test_affinity_clipped_by_the_cpuset_is_no_conflict(serve: Callable[..., Case]) -> None:
    def clip(nvml: dict[str, Any]) -> None:
        nvml["devices"][0]["calls"]["nvmlDeviceGetCpuAffinityWithinScope"][0]["value"] = [3, 0, 0, 0]
        nvml["devices"][1]["calls"]["nvmlDeviceGetCpuAffinityWithinScope"][0]["value"] = [0, 0, 0, 0]

    case = serve(PCIE_BOX, clip)
    assert case.conflicts == ()
    assert case.gpus[0].local_cpus == case.gpus[1].local_cpus == (*range(14), *range(28, 42))


@pytest.mark.parametrize(
    ("utilization", "pstate", "state"),
    [(97, 0, "load"), (0, 0, "idle"), (4, 8, "unknown"), (0, 8, "idle"), (None, 0, "unknown"), (None, 8, "idle")],
)
def test_state_of_a_link_reading(serve: Callable[..., Case], utilization: int | None, pstate: int, state: str) -> None:
    def work(nvml: dict[str, Any]) -> None:
        calls = nvml["devices"][0]["calls"]
        known = {"value": {"gpu": utilization, "memory": 0}} if utilization is not None else {"error": "NotSupported"}
        calls["nvmlDeviceGetUtilizationRates"] = [{"args": [], **known}]
        calls["nvmlDeviceGetPerformanceState"] = [{"args": [], "value": pstate}]

    gpu = serve(VM, work).gpus[0]
    assert gpu.pcie is not None
    assert (gpu.pcie.state, gpu.throttle_state) == (state, state)


def test_processes_are_named(serve: Callable[..., Case]) -> None:
    def run(nvml: dict[str, Any]) -> None:
        running = [{"pid": 4242, "usedGpuMemory": 1 << 30}, {"pid": 17, "usedGpuMemory": None}]
        nvml["devices"][0]["calls"]["nvmlDeviceGetComputeRunningProcesses"] = [{"args": [], "value": running}]
        nvml["system"]["calls"] = {"nvmlSystemGetProcessName": [{"args": [4242], "value": "python3"}]}

    found = serve(VM, run).gpus[0].processes
    assert found is not None
    assert [(process.pid, process.name, process.memory_bytes) for process in found] == [
        (17, None, None),
        (4242, "python3", 1 << 30),
    ]


def test_held_by_the_driver_but_not_listed(serve: Callable[..., Case]) -> None:
    case = serve(NVSWITCH_BOX, lambda nvml: nvml["devices"].pop())
    assert [(gpu.index, gpu.bdf, gpu.lost) for gpu in case.gpus][6:] == [
        (6, "0000:a3:00.0", False),
        (7, "0000:bb:00.0", True),
    ]


def test_lost_gpu_that_bus_order_cannot_place(serve: Callable[..., Case]) -> None:
    """Two GPUs on the bus are unaccounted for and one of them is the lost one: which is not guessed."""
    case = serve(LOST_BOX, lambda nvml: nvml["devices"].pop())
    assert [(gpu.bdf, gpu.lost) for gpu in case.gpus][2:] == [(None, True)]
    assert case.gap("gpus[2].name") is not None


def test_hidden_from_a_container_is_not_lost(serve: Callable[..., Case]) -> None:
    case = serve(NVSWITCH_BOX, lambda nvml: nvml["devices"].pop(), tree={".dockerenv": ""})
    assert case.host.container == "docker"
    assert case.host.gpus_on_bus == 8
    assert [gpu.lost for gpu in case.gpus] == [False] * 7


def test_odd_answer_of_one_gpu(serve: Callable[..., Case]) -> None:
    """A binding that returns another type than the model knows costs one GPU, not the run."""

    def confuse(nvml: dict[str, Any]) -> None:
        nvml["devices"][2]["calls"]["nvmlDeviceGetName"] = [{"args": [], "value": 7}]

    case = serve(PCIE_BOX, confuse)
    assert [gpu.index for gpu in case.gpus if gpu.lost] == [2]
    assert all(isinstance(gpu, Gpu) and gpu.bdf for gpu in case.gpus)
