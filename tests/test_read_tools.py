"""Readers of the outputs of tools: the facts of real pastes, and what damage and merging may do to them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpudoctor import checkup
from gpudoctor.model import Case, Measurement
from gpudoctor.read import identify, read_artifacts, texts

TOOLS = Path(__file__).parent / "artifacts" / "tools"
KINDS = {
    "p2p-refused.txt": "p2pBandwidthLatencyTest",
    "p2p-cut.txt": "p2pBandwidthLatencyTest",
    "nvbandwidth-gh200.txt": "nvbandwidth-text",
    "nvbandwidth-peers.txt": "nvbandwidth-text",
    "nvbandwidth-noise.txt": "nvbandwidth-json",
    "bandwidthTest.txt": "bandwidthTest",
    "bandwidthTest-node1.txt": "bandwidthTest",
    "nvlink.txt": "nvidia-smi-nvlink",
    "topo-p2p.txt": "nvidia-smi-topo-p2p",
    "numactl.txt": "numactl-hardware",
    "simpleP2P.txt": "simpleP2P",
    "osu_bw_HD.txt": "osu-bw",
    "gpu_copy.txt": "superbench-gpu-copy",
    "all_reduce_perf.txt": "nccl-tests",
    "lspci-vvv.txt": "lspci",
    "lspci-tv.txt": "lspci-tree",
}
ACS = "\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-\n"


def read(*names: str) -> Case:
    result = read_artifacts([str(TOOLS / name) for name in names])
    assert result.errors == ()
    (case,) = result.cases
    return case


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def rates(case: Case) -> dict[tuple[str, str], float]:
    return {(item.metric, item.subject): item.value for item in case.measurements}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_kind_by_content_and_every_line_understood(name: str, kind: str) -> None:
    text = (TOOLS / name).read_text()
    assert identify(text, "paste") == kind
    (artifact,) = read_artifacts([str(TOOLS / name)]).artifacts
    assert (artifact.kind, artifact.lines_not_understood) == (kind, 0)


def test_refused_access_makes_both_matrices_staged() -> None:
    case = read("p2p-refused.txt")
    assert [gpu.bdf for gpu in case.gpus] == ["0000:21:00.0", "0000:61:00.0"]
    assert case.pairs[0].p2p_read == "NS"
    found = rates(case)
    assert found["p2p_staged", "gpu:0-gpu:1"] == 38.24  # of the disabled matrix; the enabled one is the same copies
    assert not {metric for metric, _ in found} & {"p2p_write", "p2p_sum", "p2p_latency"}
    assert found["d2d", "gpu:0"] == pytest.approx(1516.99 / 2)  # bytes counted once
    assert found["p2p_staged_latency", "gpu:1-gpu:0"] == 12.75  # of the GPU's table, not of the CPU's


def test_a_matrix_that_stops_inside_a_number() -> None:
    (artifact,) = read_artifacts([str(TOOLS / "p2p-cut.txt")]).artifacts
    assert artifact.truncated
    found = rates(read("p2p-cut.txt"))
    assert found["p2p_write", "gpu:1-gpu:0"] == 2.12
    assert found["p2p_staged", "gpu:1-gpu:2"] == 22.20
    assert ("p2p_staged_sum", "gpu:1-gpu:2") not in found  # "27" may be the beginning of 27.84


def test_nvbandwidth_text_and_json() -> None:
    grace = read("nvbandwidth-gh200.txt")
    found = rates(grace)
    assert (grace.gpus[0].name, grace.gpus[0].bdf) == ("NVIDIA GH200 480GB", "0009:01:00.0")
    assert grace.software.driver == "550.54.15"
    assert found["h2d", "gpu:0"] == 369.36
    assert found["h2d_while_d2h", "gpu:0"] == 176.92
    assert found["d2h.sm", "gpu:0"] == 351.93
    (latency,) = [item for item in grace.measurements if item.metric == "host_device_latency"]
    assert (latency.value, latency.unit) == (772.58, "ns")
    peers = rates(read("nvbandwidth-peers.txt"))
    assert len(peers) == 30
    assert peers["p2p_read", "gpu:3-gpu:0"] == 21.95  # row 0 reads from column 3
    noise = rates(read("nvbandwidth-noise.txt"))
    assert (noise["h2d", "gpu:0"], noise["d2h_while_h2d", "gpu:0"]) == (12.3964, 11.329)


def test_bandwidth_test_units_node_and_accounting() -> None:
    new, old = rates(read("bandwidthTest.txt")), rates(read("bandwidthTest-node1.txt"))
    assert new == {("h2d", "gpu:0"): 26.8, ("d2h", "gpu:0"): 26.3, ("d2d", "gpu:0"): 4374.1 / 2}
    # MB/s, and bound by numactl to node 1: a figure of that node, not of the link
    assert old == pytest.approx({("h2d_node", "gpu:0"): 3.7834, ("d2h_node", "gpu:0"): 2.5392})
    (item, *_) = read("bandwidthTest-node1.txt").measurements
    assert item.settings["node"] == 1


def test_other_tools() -> None:
    nvlink = read("nvlink.txt")
    assert [len(gpu.nvlinks) for gpu in nvlink.gpus] == [4, 4, 0]
    assert all(link.active and link.version == 3 for link in nvlink.gpus[0].nvlinks)
    assert nvlink.gap("gpus[GPU-00000000-0000-0000-0000-000000000002].nvlinks") is not None
    assert read("topo-p2p.txt").pairs[0].p2p_read == "GNS"
    (node,) = read("numactl.txt").numa_nodes
    assert (node.cpus, node.memory_bytes, node.distances) == (tuple(range(24)), 128295 << 20, (10,))
    assert rates(read("simpleP2P.txt")) == {("p2p_write", "gpu:0-gpu:1"): 19.87, ("p2p_check", "gpu:0-gpu:1"): 1.0}
    copy = rates(read("gpu_copy.txt"))
    assert (copy["d2h", "gpu:0"], copy["d2h.sm", "gpu:0"], copy["d2d", "gpu:0"]) == (25.8516, 5.67346, 657.332)
    assert copy["p2p_read", "gpu:1-gpu:0"] == 275.854  # gpu0_to_gpu1_read: GPU 0 reads from GPU 1
    curve = [item for item in read("osu_bw_HD.txt").measurements if item.settings["bytes"] == 262144]
    assert curve[0].value == pytest.approx(9.51151)


def test_the_largest_size_of_a_sweep_is_the_result() -> None:
    case = read("all_reduce_perf.txt")
    (result,) = [item for item in case.measurements if item.metric == "all_reduce.busbw"]
    assert result.value == 235.26
    assert result.settings["bytes"] == 8589934592
    assert (result.settings["ranks"], result.settings["gpu"]) == (8, "A100-SXM4-40GB")
    assert len(case.gpus) == 8


def test_lspci_gives_the_way_up_with_links_and_acs() -> None:
    case = read("lspci-vvv.txt")
    first = case.gpus[0]
    assert (first.bdf, first.numa_node, first.root) == ("0000:06:00.0", 0, "pci0000:00")
    assert [(hop.bdf, hop.kind) for hop in first.pcie_path] == [
        ("0000:06:00.0", "endpoint"),
        ("0000:02:03.0", "switch-down"),
        ("0000:01:00.0", "switch-up"),
        ("0000:00:01.1", "root-port"),
    ]
    assert first.pcie is not None
    assert (first.pcie.generation, first.pcie.width, first.pcie.max_generation, first.pcie.state) == (
        1,
        16,
        5,
        "unknown",
    )
    assert first.pcie.port_max_generation == 5
    assert {acs.bdf: acs.on for acs in case.acs}["0000:00:01.1"] == ("SrcValid", "UpstreamFwd")
    # ACSCap stands there too, with ReqRedir+: what could be is not what is
    assert not any("ReqRedir" in acs.on for acs in case.acs)


def test_lspci_tree_gives_the_way_up_without_links() -> None:
    case = read("lspci-tv.txt")
    assert [gpu.bdf for gpu in case.gpus] == ["0000:c1:00.0", "0000:c2:00.0"]
    assert case.gpus[1].name == "RTX 6000 Ada Generation"
    assert [(hop.bdf, hop.kind) for hop in case.gpus[1].pcie_path] == [
        ("0000:c2:00.0", "endpoint"),
        ("0000:c0:03.1", "root-port"),
    ]


def test_controls_without_names(tmp_path: Path) -> None:
    path = write(tmp_path, "acs.txt", "$ sudo lspci -vvv | grep ACSCtl\n" + ACS + ACS.replace("+", "-"))
    (case,) = read_artifacts([path]).cases
    assert [acs.on for acs in case.acs] == [("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"), ()]
    found = {finding.rule for finding in checkup.examine(case, command="read").findings}
    assert found == {"P2P006"}


def test_texts_of_one_machine_become_one_case() -> None:
    case = read("bandwidthTest.txt", "lspci-tv.txt", "numactl.txt")
    assert len(case.gpus) == 2
    assert (case.gpus[0].bdf, len(case.numa_nodes)) == ("0000:c1:00.0", 1)
    assert rates(case)["h2d", "gpu:0"] == 26.8
    assert case.gap("numa_nodes") is None


def topo(cells: str, gpus: int = 2) -> str:
    labels = [f"GPU{index}" for index in range(gpus)]
    rows = ["\t" + "\t".join(labels) + "\tCPU Affinity\tNUMA Affinity"]
    for a in range(gpus):
        line = "\t".join(" X " if a == b else cells for b in range(gpus))
        rows.append(f"GPU{a}\t{line}\t0-15\t0")
    return "\n".join(rows) + "\n"


def test_matrix_and_p2p_table_join_by_number(tmp_path: Path) -> None:
    paths = [write(tmp_path, "topo.txt", topo("PHB")), str(TOOLS / "topo-p2p.txt")]
    (case,) = read_artifacts(paths).cases
    assert (case.pairs[0].path, case.pairs[0].p2p_read) == ("PHB", "GNS")
    assert case.gap("pairs[gpu:0,gpu:1].p2p_read") is None


def test_machines_of_other_sizes_and_contradictions_stay_apart(tmp_path: Path) -> None:
    three = write(tmp_path, "three.txt", topo("PHB", gpus=3))
    assert len(read_artifacts([three, str(TOOLS / "topo-p2p.txt")]).cases) == 2
    nodes = [str(TOOLS / name) for name in ("bandwidthTest.txt", "bandwidthTest-node1.txt")]
    assert len(read_artifacts(nodes).cases) == 2  # another model at the same number
    before = (TOOLS / "simpleP2P.txt").read_text()
    after = write(tmp_path, "after.txt", before.replace("19.87", "26.30"))
    assert len(read_artifacts([str(TOOLS / "simpleP2P.txt"), after]).cases) == 2  # two moments of one machine


def test_cuda_order_is_translated_where_the_bus_tells(tmp_path: Path) -> None:
    lspci = str(TOOLS / "lspci-tv.txt")  # c1:00.0 is GPU 0
    swapped = (TOOLS / "p2p-refused.txt").read_text()
    swapped = swapped.replace("NVIDIA Graphics Device, pciBusID: 21", "RTX 6000 Ada Generation, pciBusID: c2")
    swapped = swapped.replace("NVIDIA Graphics Device, pciBusID: 61", "RTX 6000 Ada Generation, pciBusID: c1")
    (case,) = read_artifacts([lspci, write(tmp_path, "p2p.txt", swapped)]).cases
    assert [(gpu.bdf, gpu.cuda_index) for gpu in case.gpus] == [("0000:c1:00.0", 1), ("0000:c2:00.0", 0)]
    assert rates(case)["p2p_staged", "gpu:1-gpu:0"] == 38.24  # CUDA's 0 to 1


def test_numbers_of_cuda_count_only_among_equal_cards(tmp_path: Path) -> None:
    mixed = (TOOLS / "p2p-refused.txt").read_text().replace("Device: 1, NVIDIA Graphics", "Device: 1, NVIDIA Other")
    paths = [write(tmp_path, "topo.txt", topo("PHB")), write(tmp_path, "p2p.txt", mixed)]
    assert len(read_artifacts(paths).cases) == 2


def sane(item: Measurement) -> bool:
    return 0 <= item.value < 1e13


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 10_000))
def test_damage_never_raises_and_never_invents_figures(name: str, seed: int) -> None:
    """Cut, shuffled, doubled or sprinkled with garbage: what is left of the figures is among the original ones."""
    rng = random.Random(seed)
    text = (TOOLS / name).read_text()
    whole = texts.read(KINDS[name], text, "paste")
    assert whole is not None
    original = {round(item.value, 6) for part in whole.parts for item in part.case.measurements}
    lines = text.splitlines(keepends=True)
    kind = rng.randrange(4)
    if kind == 0:
        text = "".join(lines[: rng.randrange(len(lines) + 1)])
    elif kind == 1:
        del lines[rng.randrange(len(lines)) :: rng.randrange(2, 7)]
        text = "".join(lines)
    elif kind == 2:
        lines.insert(rng.randrange(len(lines)), "\x1b[31m GPU99 \t 99999999999999999999 [0000:zz] {{{ \u202e\n")
        text = "".join(lines)
    else:
        text = text.replace(" ", "  ") + text[:40]
    for reader in texts.READERS:
        read_of_any = reader.read(text, "paste")
        assert read_of_any.not_understood <= read_of_any.lines + 1
    found = texts.read(KINDS[name], text, "paste")
    assert found is not None
    for part in found.parts:
        for item in part.case.measurements:
            assert sane(item)
            if kind in (0, 2) and original and not item.metric.endswith("busbw"):
                assert round(item.value, 6) in original, (item.metric, item.subject, item.value)


@pytest.mark.parametrize(
    "text", ["", "\n", "GPU 0: x\n", "Device 0: y\n", "{" * 1000, "[0000:00]-+-00.0  NVIDIA Corporation x"]
)
def test_little_or_nothing(text: str) -> None:
    for reader in texts.READERS:
        reader.is_kind(text)
        reader.read(text, "paste")
