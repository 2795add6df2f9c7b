"""Writes the recorded machines of this folder: ``python tests/machines/build.py`` from the project's root.

Each machine is a tree of /proc and /sys files (tree.txt), NVML's answers (nvml.json) and the Case that collect makes
of both (case.json). What was recorded and what was filled in by us stands in each case.toml.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

ANCESTOR = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
SPEED = {1: "2.5 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe", 6: "64.0 GT/s PCIe"}
Link = tuple[int, int]  # generation, width
NVLINK_NUMBERS = {1: 1, 2: 2, 3: 4, 4: 6, 5: 7}  # what NVML calls them
MISSING = {"error": "NotSupported"}


@dataclass
class Tree:
    """The lines of a tree.txt."""

    lines: dict[str, str] = field(default_factory=dict)

    def file(self, path: str, content: object) -> None:
        self.lines[path] = f"{path} = {content}"

    def link(self, path: str, target: str) -> None:
        self.lines[path] = f"{path} -> {target}"

    def pci(self, chain: str, *, ids: tuple[int, int, int], node: int, cpus: str, now: Link | None = None,
            most: Link | None = None, driver: str | None = None) -> str:  # fmt: skip
        """A device below ``sys/devices``, such as ``pci0000:00/0000:00:01.0``; ids are vendor, device, class."""
        base = f"sys/devices/{chain}"
        bdf = chain.rpartition("/")[2]
        for name, value in zip(("vendor", "device", "class"), ids, strict=True):
            self.file(f"{base}/{name}", f"0x{value:0{6 if name == 'class' else 4}x}")
        self.file(f"{base}/numa_node", node)
        self.file(f"{base}/local_cpulist", cpus)
        for prefix, link in (("current", now), ("max", most)):
            if link is not None:
                self.file(f"{base}/{prefix}_link_speed", SPEED.get(link[0], "Unknown"))
                self.file(f"{base}/{prefix}_link_width", link[1])
        if driver:
            self.file(f"sys/bus/pci/drivers/{driver}/bind", "")
            self.link(f"{base}/driver", "../" * (chain.count("/") + 2) + f"bus/pci/drivers/{driver}")
        self.link(f"sys/bus/pci/devices/{bdf}", f"../../../devices/{chain}")
        return bdf

    def rdma(self, name: str, chain: str, *, rate: str, layer: str) -> None:
        base = f"sys/class/infiniband/{name}"
        self.link(f"{base}/device", f"../../../devices/{chain}")
        self.file(f"{base}/ports/1/rate", rate)
        self.file(f"{base}/ports/1/link_layer", layer)
        self.file(f"{base}/ports/1/state", "4: ACTIVE")

    def nodes(self, cpus: dict[int, str], memory_kb: int, *, near: dict[int, int], far: int) -> None:
        """NUMA nodes; `near` maps a node to its socket, distances are 10, 12 in a socket, `far` between sockets."""
        for node, text in cpus.items():
            base = f"sys/devices/system/node/node{node}"
            self.file(f"{base}/cpulist", text)
            self.file(f"{base}/meminfo", f"Node {node} MemTotal:       {memory_kb} kB")
            distances = (10 if node == other else 12 if near[node] == near[other] else far for other in cpus)
            self.file(f"{base}/distance", " ".join(map(str, distances)))
        self.file("sys/devices/system/node/online", ",".join(map(str, cpus)))

    def host(self, *, name: str, kernel: str, cpu: str, cpus: int, sockets: int, memory_kb: int, driver: str,
             flags: str = "fpu vme sse4_2 avx2") -> None:  # fmt: skip
        self.file("proc/sys/kernel/hostname", name)
        self.file("proc/sys/kernel/osrelease", kernel)
        per = cpus // sockets
        blocks = (
            f"processor\t: {number}\\nmodel name\t: {cpu}\\nphysical id\t: {number // per}\\nflags\t\t: {flags}\\n"
            for number in range(0, cpus, per)  # one of each socket; the count is in the list of online CPUs
        )
        self.file("proc/cpuinfo", "\\n".join(blocks))
        self.file("proc/meminfo", f"MemTotal:       {memory_kb} kB")
        self.file("sys/devices/system/cpu/online", f"0-{cpus - 1}")
        self.file("proc/driver/nvidia/version", driver)

    def process(self, *, cpus: str, nodes: str, shm_kb: int) -> None:
        """A process outside of a container: all CPUs, cgroup v2 without limits."""
        self.file("proc/self/status", f"Name:\tpython3\\nCpus_allowed_list:\t{cpus}\\nMems_allowed_list:\t{nodes}")
        limits = ("Max locked memory         8388608              8388608              bytes",
                  "Max open files            1048576              1048576              files")  # fmt: skip
        self.file("proc/self/limits", "\\n".join(limits))
        self.file("proc/self/cgroup", "0::/user.slice")
        mounts = (f"25 24 0:23 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size={shm_kb}k",
                  "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw")  # fmt: skip
        self.file("proc/self/mountinfo", "\\n".join(mounts))
        self.file("sys/fs/cgroup/user.slice/cpu.max", "max 100000")
        self.file("sys/fs/cgroup/user.slice/memory.max", "max")
        self.file("sys/fs/cgroup/user.slice/cpu.stat", "usage_usec 1\\nnr_periods 0\\nnr_throttled 0")
        self.file("proc/loadavg", "1.25 1.10 1.05 2/900 4242")

    def text(self) -> str:
        return "".join(f"{self.lines[path]}\n" for path in sorted(self.lines))


@dataclass
class Board:
    """One GPU for NVML. `links` maps an NVLink number to the remote BDF, or None for a link that is down."""

    bdf: str
    name: str
    cpus: list[int]
    node: int
    now: Link
    most: Link
    architecture: int
    capability: tuple[int, int]
    memory: int
    power_w: int
    links: dict[int, str | None] = field(default_factory=dict)
    link_version: int = 4
    link_mb_s: int = 26562
    remote_type: int = 0
    lost: bool = False


def words(numbers: list[int]) -> list[int]:
    found = [0] * 4
    for number in numbers:
        found[number // 64] |= 1 << number % 64
    return found


def pci_info(bdf: str) -> dict[str, Any]:
    domain, bus, rest = bdf.split(":")
    device = rest.partition(".")[0]
    return {"domain": int(domain, 16), "bus": int(bus, 16), "device": int(device, 16), "busId": f"0000{bdf.upper()}"}


def calls(board: Board, number: int) -> dict[str, list[dict[str, Any]]]:
    """NVML's answers of an idle GPU."""
    values: dict[str, Any] = {
        "Name": board.name,
        "Architecture": board.architecture,
        "PciInfo": pci_info(board.bdf),
        "UUID": f"GPU-00000000-0000-0000-0000-{number + 1:012d}",
        "Serial": f"{number + 1:013d}",
        "CudaComputeCapability": list(board.capability),
        "MemoryInfo": {"total": board.memory, "free": board.memory - 450_000_000, "used": 450_000_000},
        "BAR1MemoryInfo": {"bar1Total": 1 << 37, "bar1Free": (1 << 37) - 65536, "bar1Used": 65536},
        "CurrPcieLinkGeneration": board.now[0],
        "CurrPcieLinkWidth": board.now[1],
        "MaxPcieLinkGeneration": board.most[0],
        "GpuMaxPcieLinkGeneration": board.most[0],
        "MaxPcieLinkWidth": board.most[1],
        "PcieReplayCounter": 0,
        "PersistenceMode": 1,
        "ComputeMode": 0,
        "MigMode": [0, 0],
        "EccMode": [1, 1],
        "PowerUsage": board.power_w * 100,
        "EnforcedPowerLimit": board.power_w * 1000,
        "PowerManagementDefaultLimit": board.power_w * 1000,
        "PerformanceState": 0,
        "CurrentClocksEventReasons": 1,
        "UtilizationRates": {"gpu": 0, "memory": 0},
        "VirtualizationMode": 0,
        "ComputeRunningProcesses": [],
        "GraphicsRunningProcesses": [],
    }
    found = {f"nvmlDeviceGet{name}": [{"args": [], "value": value}] for name, value in values.items()}
    found["nvmlDeviceGetTemperature"] = [{"args": [0], "value": 31}]
    found["nvmlDeviceGetTemperatureThreshold"] = [{"args": [1], "value": 89}, {"args": [3], "value": 87}]
    found["nvmlDeviceGetClockInfo"] = [{"args": [1], "value": 345}]
    found["nvmlDeviceGetMaxClockInfo"] = [{"args": [1], "value": 1980}]
    found["nvmlDeviceGetViolationStatus"] = [{"args": [1], "value": {"referenceTime": 0, "violationTime": 0}}]
    found["nvmlDeviceGetCpuAffinityWithinScope"] = [{"args": [4, 0], "value": words(board.cpus)}]
    found["nvmlDeviceGetMemoryAffinity"] = [{"args": [4, 0], "value": words([board.node])}]
    found["nvmlDeviceGetNumaNodeId"] = [{"args": [], **MISSING}]
    states = [
        {"args": [link], **({"value": int(board.links[link] is not None)} if link in board.links else MISSING)}
        for link in range(36 if board.links else 1)
    ]
    found["nvmlDeviceGetNvLinkState"] = states
    up = {link: remote for link, remote in board.links.items() if remote is not None}
    for name, value in (
        ("NvLinkVersion", NVLINK_NUMBERS[board.link_version]),
        ("NvLinkRemoteDeviceType", board.remote_type),
    ):
        found[f"nvmlDeviceGet{name}"] = [{"args": [link], "value": value} for link in up]
    found["nvmlDeviceGetNvLinkRemotePciInfo"] = [
        {"args": [link], "value": pci_info(remote)} for link, remote in up.items()
    ]
    return {name: entries for name, entries in found.items() if entries}


def nvml(
    boards: list[Board], *, driver: str, cuda: int, paths: dict[tuple[int, int], str], p2p: bool
) -> dict[str, Any]:
    devices: list[dict[str, Any]] = []
    for number, board in enumerate(boards):
        if board.lost:
            devices.append({"handle_error": "GpuIsLost", "calls": {}})
            continue
        answers = calls(board, number)
        for (a, b), path in paths.items():
            if a == number:
                entry = {"args": [{"device": b}], "value": ANCESTOR[path]}
                answers.setdefault("nvmlDeviceGetTopologyCommonAncestor", []).append(entry)
                for capability in (0, 1, 2) if p2p else ():
                    entry = {"args": [{"device": b}, capability], "value": 0}
                    answers.setdefault("nvmlDeviceGetP2PStatus", []).append(entry)
        fields = {f"164/{link}": board.link_mb_s for link, remote in board.links.items() if remote is not None}
        devices.append({"calls": answers, **({"fields": fields} if fields else {})})
    system = {"driver_version": driver, "nvml_version": f"{cuda // 1000}.{driver}", "device_count": len(boards)}
    system["calls"] = {"nvmlSystemGetCudaDriverVersion_v2": [{"args": [], "value": cuda}]}
    return {"system": system, "devices": devices}


def number_list(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


PORT, NVIDIA, MELLANOX = (0x1000, 0xC010, 0x060400), 0x10DE, (0x15B3, 0x1021, 0x020700)
ROOT = (0x8086, 0x2030, 0x060400)


def pcie_box() -> tuple[Tree, dict[str, Any]]:
    """Eight GPUs, two on each of four switches, two switches on each socket."""
    tree = Tree()
    cpus = {0: "0-13,28-41", 1: "14-27,42-55"}
    tree.host(name="pcie-box", kernel="5.15.0-91-generic", cpu="Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz", cpus=56,
              sockets=2, memory_kb=527_000_000,
              driver="NVRM version: NVIDIA UNIX x86_64 Kernel Module  515.105.01  Release Build")  # fmt: skip
    tree.process(cpus="0-55", nodes="0-1", shm_kb=263_500_000)
    tree.nodes(cpus, 263_500_000, near={0: 0, 1: 1}, far=21)
    boards = []
    for socket, bridge in enumerate(("00", "80")):
        node = {"node": socket, "cpus": cpus[socket]}
        for slot in range(2):
            bus = int(bridge, 16) + 1 + 8 * slot
            port = f"pci0000:{bridge}/0000:{bridge}:0{slot + 2}.0"
            tree.pci(port, ids=ROOT, now=(3, 16), most=(3, 16), **node)
            upper = f"{port}/0000:{bus:02x}:00.0"
            tree.pci(upper, ids=PORT, now=(3, 16), most=(3, 16), **node)
            for place, device in enumerate(("08", "10")):
                lower = f"{upper}/0000:{bus + 1:02x}:{device}.0"
                tree.pci(lower, ids=PORT, now=(1, 16), most=(3, 16), **node)
                bdf = tree.pci(f"{lower}/0000:{bus + 2 + place:02x}:00.0", ids=(NVIDIA, 0x2204, 0x030200), now=(1, 16),
                               most=(4, 16), driver="nvidia", **node)  # fmt: skip
                boards.append(Board(bdf=bdf, name="NVIDIA GeForce RTX 3090", cpus=number_list(cpus[socket]),
                                    node=socket, now=(1, 16),
                                    most=(4, 16), architecture=7, capability=(8, 6),
                                    memory=25_769_803_776, power_w=350))  # fmt: skip
    paths = {}
    for a in range(8):
        for b in range(a + 1, 8):
            paths[a, b] = "SYS" if a // 4 != b // 4 else "PIX" if a // 2 == b // 2 else "PHB"
    answers = nvml(boards, driver="515.105.01", cuda=11070, paths=paths, p2p=False)
    for device in answers["devices"]:
        device["calls"]["nvmlDeviceGetPerformanceState"] = [{"args": [], "value": 8}]
        # card and slot together: this board's slots end at Gen3
        device["calls"]["nvmlDeviceGetMaxPcieLinkGeneration"] = [{"args": [], "value": 3}]
        for refused in ("MigMode", "EccMode", "NvLinkState"):
            device["calls"][f"nvmlDeviceGet{refused}"] = [{"args": [0] if "Link" in refused else [], **MISSING}]
    return tree, answers


def nvswitch_box() -> tuple[Tree, dict[str, Any]]:
    """Eight GPUs on an NVSwitch fabric, each on a host bridge of its own with its own network card behind switches."""
    tree = Tree()
    cpus = {0: "0-63,128-191", 1: "64-127,192-255"}
    tree.host(name="nvswitch-box", kernel="6.8.0-60-generic", cpu="INTEL(R) XEON(R) 6767P", cpus=256, sockets=2,
              memory_kb=4_226_000_000,
              driver="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.44.01  Release Build")  # fmt: skip
    tree.process(cpus="0-255", nodes="0-1", shm_kb=2_113_000_000)
    tree.nodes(cpus, 2_113_000_000, near={0: 0, 1: 1}, far=21)
    boards = []
    for number in range(8):
        node = {"node": number // 4, "cpus": cpus[number // 4]}
        bridge = f"{0x10 + 0x18 * number:02x}"
        port = f"pci0000:{bridge}/0000:{bridge}:01.0"
        bus = int(bridge, 16) + 1
        tree.pci(port, ids=ROOT, now=(6, 16), most=(6, 16), **node)
        upper = f"{port}/0000:{bus:02x}:00.0"
        tree.pci(upper, ids=PORT, now=(6, 16), most=(6, 16), **node)
        left, right = (f"{upper}/0000:{bus + 1:02x}:0{slot}.0" for slot in range(2))
        tree.pci(left, ids=PORT, now=(6, 16), most=(6, 16), **node)
        bdf = tree.pci(f"{left}/0000:{bus + 2:02x}:00.0", ids=(NVIDIA, 0x3182, 0x030200), now=(6, 16), most=(6, 16),
                       driver="nvidia", **node)  # fmt: skip
        tree.pci(right, ids=PORT, now=(6, 16), most=(6, 16), **node)
        second = f"{right}/0000:{bus + 3:02x}:00.0"
        tree.pci(second, ids=PORT, now=(6, 16), most=(6, 16), **node)
        lower = f"{second}/0000:{bus + 4:02x}:00.0"
        tree.pci(lower, ids=PORT, now=(6, 16), most=(6, 16), **node)
        card = f"{lower}/0000:{bus + 5:02x}:00.0"
        tree.pci(card, ids=MELLANOX, now=(6, 16), most=(6, 16), driver="mlx5_core", **node)
        tree.rdma(f"mlx5_{10 + number}", card, rate="800 Gb/sec (4X XDR)", layer="InfiniBand")
        boards.append(Board(bdf=bdf, name="NVIDIA B300 SXM6 AC", cpus=number_list(cpus[number // 4]), node=number // 4,
                            now=(6, 16), most=(6, 16), architecture=10, capability=(10, 3), memory=288_000_000_000,
                            power_w=1100, links=dict.fromkeys(range(18), "0000:d1:00.0"), link_version=5,
                            link_mb_s=53125, remote_type=2))  # fmt: skip
    node = {"node": 1, "cpus": cpus[1]}
    tree.pci("pci0000:e0/0000:e0:01.0", ids=ROOT, now=(5, 16), most=(5, 16), **node)
    bond = "pci0000:e0/0000:e0:01.0/0000:e1:00.0"
    tree.pci(bond, ids=MELLANOX, now=(5, 16), most=(5, 16), driver="mlx5_core", **node)
    tree.rdma("mlx5_bond_0", bond, rate="200 Gb/sec (4X HDR)", layer="Ethernet")
    paths = {(a, b): "NODE" if a // 4 == b // 4 else "SYS" for a in range(8) for b in range(a + 1, 8)}
    return tree, nvml(boards, driver="590.44.01", cuda=13010, paths=paths, p2p=True)


def lost_gpu_box() -> tuple[Tree, dict[str, Any]]:
    """Four GPUs joined directly by six NVLinks each, eight NUMA nodes; GPU 2 has fallen off the bus."""
    tree = Tree()
    # Nodes 1, 3, 5 and 7 are as recorded, the others take the CPUs that are left.
    cpus = {node: ",".join(str(first + 8 * step) for step in range(4))
            for node, first in {0: 0, 1: 4, 2: 2, 3: 6, 4: 1, 5: 5, 6: 3, 7: 7}.items()}  # fmt: skip
    tree.host(name="lost-gpu-box", kernel="5.14.0-427.el9.x86_64", cpu="AMD EPYC 9124 16-Core Processor", cpus=32,
              sockets=2, memory_kb=792_000_000,
              driver="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build")  # fmt: skip
    tree.process(cpus="0-31", nodes="0-7", shm_kb=396_000_000)
    tree.nodes(cpus, 99_000_000, near={node: node // 4 for node in cpus}, far=32)
    places = (("01", 3), ("41", 1), ("81", 7), ("c1", 5))
    bdfs = [f"0000:{int(bus, 16) + 2:02x}:00.0" for bus, _ in places]
    boards = []
    for number, (bus, where) in enumerate(places):
        node = {"node": where, "cpus": cpus[where]}
        lost = number == 2
        bridge = f"{int(bus, 16) - 1:02x}"
        port = f"pci0000:{bridge}/0000:{bridge}:01.1"
        tree.pci(port, ids=(0x1022, 0x14AB, 0x060400), now=(5, 16), most=(5, 16), **node)
        upper = f"{port}/0000:{bus}:00.0"
        tree.pci(upper, ids=PORT, now=(5, 16), most=(5, 16), **node)
        left, right = (f"{upper}/0000:{int(bus, 16) + 1:02x}:0{slot}.0" for slot in range(2))
        tree.pci(left, ids=PORT, now=(1, 0) if lost else (5, 16), most=(5, 16), **node)
        tree.pci(f"{left}/{bdfs[number]}", ids=(NVIDIA, 0x2330, 0x030200), now=(0, 63) if lost else (5, 16),
                 most=(0, 63) if lost else (5, 16), driver="nvidia", **node)  # fmt: skip
        tree.pci(right, ids=PORT, now=(5, 16), most=(5, 16), **node)
        card = f"{right}/0000:{int(bus, 16) + 3:02x}:00.0"
        tree.pci(card, ids=MELLANOX, now=(5, 16), most=(5, 16), driver="mlx5_core", **node)
        tree.rdma(f"mlx5_{number}", card, rate="400 Gb/sec (4X NDR)", layer="InfiniBand")
        peers = [other for other in range(4) if other != number]
        links = {link: None if peers[link // 6] == 2 else bdfs[peers[link // 6]] for link in range(18)}
        boards.append(Board(bdf=bdfs[number], name="NVIDIA H100 80GB HBM3", cpus=number_list(cpus[where]), node=where,
                            now=(5, 16), most=(5, 16), architecture=9, capability=(9, 0), memory=85_520_809_984,
                            power_w=700, links=links, lost=lost))  # fmt: skip
    paths = {(a, b): "SYS" for a in range(4) for b in range(a + 1, 4) if 2 not in (a, b)}
    return tree, nvml(boards, driver="560.35.03", cuda=12060, paths=paths, p2p=True)


def virtual_machine() -> tuple[Tree, dict[str, Any]]:
    """The H200 virtual machine, whose NVML answers are the recording itself."""
    tree = Tree()
    tree.host(name="h200-vm", kernel="6.18.44", cpu="Intel(R) Xeon(R) Processor", cpus=16, sockets=1,
              memory_kb=131_981_020, flags="fpu sse4_2 avx2 avx512f hypervisor",
              driver="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build")  # fmt: skip
    tree.nodes({0: "0-15"}, 131_981_020, near={0: 0}, far=21)
    devices = ((0, 0x8086, 0x0D57, 0x060000), (1, 0x1AF4, 0x1042, 0x018000), (2, 0x1AF4, 0x1042, 0x018000),
               (3, 0x1AF4, 0x1041, 0x020000), (4, 0x1AF4, 0x1053, 0xFFFF00), (5, 0x1AF4, 0x1044, 0xFFFF00))  # fmt: skip
    for slot, *ids in devices:
        tree.pci(f"pci0000:00/0000:00:0{slot}.0", ids=(ids[0], ids[1], ids[2]), node=-1, cpus="0-15")
    tree.pci("pci0000:00/0000:00:06.0", ids=(NVIDIA, 0x2335, 0x030200), node=-1, cpus="0-15", now=(5, 16), most=(5, 16))
    limits = ("Max locked memory         unlimited            unlimited            bytes",
              "Max open files            20000                20000                files")  # fmt: skip
    tree.file("proc/self/limits", "\\n".join(limits))
    tree.file("proc/self/mountinfo", f"25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size={128 << 20}k")
    recorded = json.loads((HERE / "h200-1gpu-vm" / "nvml.json").read_text(encoding="utf-8"))
    return tree, recorded


RECORDED = {"h200-1gpu-vm", "h200-2gpu-nvlink-vm"}  # nvml.json is the recording itself


def nvlink_virtual_machine() -> tuple[Tree, dict[str, Any]]:
    """Two H200 in a virtual machine: tree and answers are the recording of bench_several_gpus."""
    folder = HERE / "h200-2gpu-nvlink-vm"
    tree = Tree()
    for line in (folder / "tree.txt").read_text(encoding="utf-8").splitlines():
        tree.lines[line.partition(" ")[0]] = line
    return tree, json.loads((folder / "nvml.json").read_text(encoding="utf-8"))


MACHINES = {
    "h200-1gpu-vm": virtual_machine,
    "h200-2gpu-nvlink-vm": nvlink_virtual_machine,
    "nccl1439-8gpu-pix-phb-sys": pcie_box,
    "b300-8gpu-nvswitch": nvswitch_box,
    "h100-4gpu-one-lost": lost_gpu_box,
}


def main() -> None:
    import recorded

    from gpudoctor import codec

    for name, make in MACHINES.items():
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        tree, answers = make()
        (folder / "tree.txt").write_text(tree.text(), encoding="utf-8")
        if name not in RECORDED:
            text = (
                json.dumps(answers, separators=(",", ":"))
                .replace('],"nvml', '],\n"nvml')
                .replace('{"calls"', '\n{"calls"')
            )
            (folder / "nvml.json").write_text(text + "\n", encoding="utf-8")
        os.environ.update(recorded.nvml_environment(folder / "nvml.json"))
        with tempfile.TemporaryDirectory() as work:
            case = recorded.collect(name, Path(work))
        (folder / "case.json").write_text(codec.encode(case) + "\n", encoding="utf-8")
        print(f"{name}: {len(case.gpus)} GPUs, {len(case.pairs)} pairs, {len(case.gaps)} gaps")


if __name__ == "__main__":
    main()
