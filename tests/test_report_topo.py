"""The topology in text: tree and matrix, from PCI paths and from the classes of `nvidia-smi topo -m`."""

from __future__ import annotations

import dataclasses

import pytest
import report_samples as samples

from gpudoctor.model import Case, Gpu, Nic, NumaNode, Pair
from gpudoctor.report import render_topo
from gpudoctor.report.text import columns


def topo(case: Case, *, matrix: bool = False, width: int | None = None, findings: object = ()) -> str:
    return render_topo(case, matrix=matrix, width=width, unicode=True, color=False, findings=findings)  # type: ignore[arg-type]


TREE = """\
NUMA node 0  CPUs 0-13,28-41  126 GiB
└─ host bridge pci0000:00
   ├─ switch 0000:10:00.0  uplink 4.0 x16
   │  ├─ GPU0  0000:18:00.0  PCIe 4.0 x16
   │  └─ GPU1  0000:28:00.0  PCIe 4.0 x16
   ├─ switch 0000:30:00.0  uplink 4.0 x16
   │  ├─ GPU2  0000:38:00.0  PCIe 4.0 x4, 4.0 x16 possible  ! FAIL PCI001
   │  └─ GPU3  0000:48:00.0  PCIe 4.0 x16
   └─ NIC mlx5_0  0000:1e:00.0  infiniband  200 Gb/s  PIX to GPU0
NUMA node 1  CPUs 14-27,42-55  126 GiB
└─ host bridge pci0000:80
   ├─ switch 0000:50:00.0  uplink 4.0 x16
   │  ├─ GPU4  0000:58:00.0  PCIe 4.0 x16
   │  └─ GPU5  0000:68:00.0  LOST: GPU is lost
   ├─ switch 0000:70:00.0  uplink 4.0 x16
   │  ├─ GPU6  0000:78:00.0  PCIe 4.0 x16  ! ASK PCI003
   │  └─ GPU7  0000:88:00.0  PCIe 1.0 x16 idle, 4.0 x16 possible  ! ASK PCI003
   └─ NIC mlx5_1  0000:9e:00.0  infiniband  200 Gb/s  PIX to GPU4
P2P read OK  every pair
"""


def test_tree_follows_the_pci_paths() -> None:
    assert topo(samples.faulty_machine(), findings=samples.findings()) == TREE


def test_ascii_tree_has_the_same_shape() -> None:
    told = render_topo(
        samples.faulty_machine(), matrix=False, width=None, unicode=False, color=False, findings=samples.findings()
    )
    drawn = TREE.replace("├─", "|-").replace("└─", "`-").replace("│", "|")
    assert told == drawn


def test_narrow_tree_goes_on_below_its_device() -> None:
    told = topo(samples.faulty_machine(), width=60, findings=samples.findings())
    assert (
        "   │  ├─ GPU2  0000:38:00.0\n" in told
        or "   │  ├─ GPU2  0000:38:00.0  PCIe 4.0 x4, 4.0 x16 possible\n   │  │        ! FAIL PCI001\n" in told
    )
    assert [word for word in told.split() if word.startswith("GPU")] == [
        word for word in TREE.split() if word.startswith("GPU")
    ]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("matrix", [False, True])
def test_topology_fits_the_terminal(width: int, matrix: bool) -> None:
    for line in topo(samples.faulty_machine(), matrix=matrix, width=width, findings=samples.findings()).splitlines():
        assert columns(line) <= width, line


def text_case(case: Case) -> Case:
    """What the text of nvidia-smi topo -m gives: indices, classes, affinity."""
    return Case(
        gpus=tuple(
            Gpu(index=gpu.index, numa_node=gpu.numa_node, numa_nodes=gpu.numa_nodes, local_cpus=gpu.local_cpus)
            for gpu in case.gpus
        ),
        pairs=tuple(dataclasses.replace(pair, p2p_read=None) for pair in case.pairs),
        nics=tuple(Nic(name=nic.name) for nic in case.nics),
    )


CLASS_TREE = """\
NUMA node 0  CPUs 0-13,28-41
└─ one host bridge (PHB)
   ├─ one PCIe switch (PIX)
   │  ├─ GPU0
   │  ├─ GPU1
   │  └─ NIC mlx5_0
   └─ one PCIe switch (PIX)
      ├─ GPU2
      └─ GPU3
NUMA node 1  CPUs 14-27,42-55
└─ one host bridge (PHB)
   ├─ one PCIe switch (PIX)
   │  ├─ GPU4
   │  ├─ GPU5
   │  └─ NIC mlx5_1
   └─ one PCIe switch (PIX)
      ├─ GPU6
      └─ GPU7
"""


def test_text_without_pci_paths_is_grouped_by_class() -> None:
    assert topo(text_case(samples.switch_machine())) == CLASS_TREE


def test_unknown_locality_is_named() -> None:
    gpus = (Gpu(index=0, numa_nodes=(0, 1)), Gpu(index=1))
    told = topo(Case(gpus=gpus))
    assert "NUMA nodes 0-1: locality unknown" in told
    assert "NUMA node unknown" in told


def test_nvlink_is_summed_up() -> None:
    gpus = tuple(Gpu(index=index, numa_node=0) for index in range(4))
    every = tuple(Pair(a=f"gpu:{a}", b=f"gpu:{b}", nvlinks=18) for a in range(4) for b in range(a + 1, 4))
    assert "NVLink NV18  all 4 GPUs" in topo(Case(gpus=gpus, pairs=every))
    some = tuple(pair for pair in every if (pair.a, pair.b) in (("gpu:0", "gpu:1"), ("gpu:2", "gpu:3")))
    assert "NVLink NV18  GPU0-GPU1  GPU2-GPU3" in topo(Case(gpus=gpus, pairs=some))
    assert " NV18 " in topo(Case(gpus=gpus, pairs=every), matrix=True)


MATRIX = """\
       GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 NIC0 NIC1   CPU Affinity  NUMA Affinity
GPU0   X    PIX  PHB  PHB  SYS! SYS  SYS  SYS  PIX  SYS    0-13,28-41    0
GPU1   PIX  X    PHB  PHB  SYS  SYS  SYS  SYS  PHB  SYS    0-13,28-41    0
GPU2!  PHB  PHB  X    PIX  SYS  SYS  SYS  SYS  PHB  SYS    0-13,28-41    0
"""


def test_matrix_has_the_layout_of_nvidia_smi() -> None:
    told = topo(samples.faulty_machine(), matrix=True, findings=samples.findings())
    assert told.startswith(MATRIX)
    assert "  NIC0: mlx5_0\n  NIC1: mlx5_1\n  lost: GPU5\n" in told
    assert "NODE" not in told  # the legend explains only what occurs


def test_wide_matrix_comes_in_blocks_with_every_cell() -> None:
    case = samples.switch_machine()
    told = topo(case, matrix=True, width=40)
    rows = [line.split() for line in told.splitlines() if line.startswith("GPU3")]
    cells = [cell for row in rows for cell in row[1:]]
    assert cells == ["PHB", "PHB", "PIX", "X", "SYS", "SYS", "SYS", "SYS", "PHB", "SYS", "0", "0-13,28-41"]


def test_long_cpu_list_breaks_at_commas() -> None:
    gpu = Gpu(index=0, numa_node=0, numa_nodes=(0,), local_cpus=tuple(range(0, 200, 2)))
    told = topo(Case(gpus=(gpu,)), matrix=True, width=60)
    assert all(columns(line) <= 60 for line in told.splitlines())
    assert "".join("".join(told.split()).split("NUMAAffinityCPUAffinity")[1].split("Xthe")[:1]).startswith(
        "GPU000,2,4,"
    )


def test_empty_case_draws_nothing() -> None:
    assert topo(Case()) == ""


def test_a_card_of_unknown_place_lies_on_the_only_node() -> None:
    told = topo(Case(nics=(Nic(name="eth0", bdf="0000:03:00.0"),), numa_nodes=(NumaNode(node=0, cpus=(0, 1)),)))
    assert "NUMA node 0  CPUs 0-1" in told
    assert "unknown" not in told
