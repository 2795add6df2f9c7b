"""The parts of collect that read files: /sys classes, cgroups v1 and v2, containers, virtualisation, versions, NICs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import recorded

from gpudoctor import codec
from gpudoctor.collect import collect_case, network, os_limits, software, sysfs
from gpudoctor.collect.files import Files, Notebook, list_text, number_list
from gpudoctor.collect.sysfs import PciDevice, path_class
from gpudoctor.model import Case

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n"


def tree(root: Path, files: dict[str, str]) -> Files:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return Files(root)


def limits(root: Path, files: dict[str, str]) -> tuple[object, ...]:
    found = os_limits.limits(tree(root, files), Notebook())
    return found.cpu_quota, found.cpu_quota_unlimited, found.memory_bytes, found.memory_unlimited


def test_this_machine_gives_a_case_and_never_raises() -> None:
    case = collect_case(timeout_s=60)
    assert codec.decode(codec.encode(case), Case) == case
    assert case.host.cpu_count
    assert case.limits.allowed_cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert case.software.python == ".".join(map(str, sys.version_info[:3]))
    assert case.software.torch


def test_collect_loads_nothing_heavy() -> None:
    code = "import sys; from gpudoctor.collect import collect_case; collect_case(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pynvml", "rich", "psutil"} & set(done.stdout.split())


def test_empty_and_unreadable_roots_give_gaps(tmp_path: Path) -> None:
    case = collect_case(root=tmp_path, nvml=False)
    assert (case.gpus, case.nics, case.host.gpus_on_bus) == ((), (), None)
    gap = case.gap("host.gpus_on_bus")
    assert gap is not None
    assert gap.reason == "not present"
    assert case.limits.allowed_cpus is None
    (tmp_path / "sys").write_text("a file where a directory belongs")
    (tmp_path / "proc").symlink_to(tmp_path / "proc")  # a loop
    assert collect_case(root=tmp_path, nvml=False).gpus == ()
    assert collect_case(root=tmp_path / "absent", nvml=False).gpus == ()


def test_refused_files_are_gaps_with_that_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is put in at the system call."""

    def refuse(*arguments: object, **options: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "iterdir", refuse)
    recorded.unpack((recorded.MACHINES / "h200-1gpu-vm" / "tree.txt").read_text(), tmp_path)
    case = collect_case(root=tmp_path, nvml=False)
    for path in ("host.gpus_on_bus", "numa_nodes", "nics", "host.iommu", "software.driver"):
        gap = case.gap(path)
        assert gap is not None, path
        assert gap.reason == "no permission"


def test_root_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.unpack((recorded.MACHINES / "h200-1gpu-vm" / "tree.txt").read_text(), tmp_path)
    monkeypatch.setenv("GPUDOCTOR_SYSROOT", str(tmp_path))
    assert collect_case(nvml=False).host.gpus_on_bus == 1


def test_damaged_numbers_are_no_facts(tmp_path: Path) -> None:
    recorded.unpack((recorded.MACHINES / "nccl1439-8gpu-pix-phb-sys" / "tree.txt").read_text(), tmp_path)
    device = (tmp_path / "sys/bus/pci/devices/0000:03:00.0").resolve()
    (device / "current_link_width").write_text("63\n")
    (device / "max_link_speed").write_text("Unknown speed\n")
    (device / "local_cpulist").write_text("0-99999999999\n")
    (device / "numa_node").write_bytes(b"\xff\xfe")
    gpu = collect_case(root=tmp_path, nvml=False).gpus[0]
    assert gpu.pcie is not None
    assert (gpu.pcie.width, gpu.pcie.max_generation, gpu.local_cpus, gpu.numa_node) == (None, None, None, None)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("6,14,22,30", (6, 14, 22, 30)),
        ("0-0,8-8", (0, 8)),
        ("", ()),
        ("all", None),
        ("0-70000", None),
        (None, None),
    ],
)
def test_number_lists(text: str | None, numbers: tuple[int, ...] | None) -> None:
    assert number_list(text) == numbers
    if numbers:
        assert number_list(list_text(numbers)) == numbers


def device(chain: str, node: int | None = None) -> PciDevice:
    root, *rest = chain.split("/")
    return PciDevice(bdf=rest[-1], root=root, chain=tuple(rest), numa_node=node)


@pytest.mark.parametrize(
    ("a", "b", "nodes", "expected"),
    [
        (("r0/p/up/d0/a", 0), ("r0/p/up/d1/b", 0), 2, "PIX"),  # two lower ports of one switch
        (("r0/p/a", 0), ("r0/p/b", 0), 2, "PIX"),  # two functions of one card
        (("r0/p/up/d0/a", 0), ("r0/p/up/d1/up2/d2/b", 0), 2, "PXB"),  # a switch below a switch
        (("r0/p0/a", 0), ("r0/p1/b", 0), 2, "PHB"),
        (("r0/a", None), ("r0/b", None), 1, "PHB"),  # a flat virtual machine
        (("r0/p/a", 0), ("r1/p/b", 0), 2, "NODE"),
        (("r0/p/a", 0), ("r1/p/b", 1), 2, "SYS"),
        (("r0/p/a", None), ("r1/p/b", None), 1, "NODE"),
        (("r0/p/a", None), ("r1/p/b", 0), 2, None),
    ],
)
def test_path_classes(a: tuple[str, int | None], b: tuple[str, int | None], nodes: int, expected: str | None) -> None:
    assert path_class(device(*a), device(*b), nodes=nodes) == expected
    assert path_class(device(*b), device(*a), nodes=nodes) == expected


def test_a_domain_of_its_own_below_a_storage_controller(tmp_path: Path) -> None:
    real = tmp_path / "sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0"
    real.mkdir(parents=True)
    link = tmp_path / "sys/bus/pci/devices/10000:e1:00.0"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(real, link.parent))
    found = sysfs.pci_device(Files(tmp_path), "10000:e1:00.0")
    assert (found.root, found.chain) == ("pci10000:e0", ("10000:e0:06.0", "10000:e1:00.0"))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"0": "DMA-FQ"}, "translated"),
        ({"0": "identity"}, "identity"),
        ({"0": "identity", "1": "DMA"}, "translated"),
        ({}, "off"),
    ],
)
def test_iommu(tmp_path: Path, kinds: dict[str, str], expected: str) -> None:
    files = tree(tmp_path, {f"sys/kernel/iommu_groups/{group}/type": kind for group, kind in kinds.items()})
    (tmp_path / "sys/kernel").mkdir(parents=True, exist_ok=True)
    for group in kinds:
        base = tmp_path / f"sys/bus/pci/devices/0000:0{group}:00.0"
        base.mkdir(parents=True)
        (base / "iommu_group").symlink_to(tmp_path / f"sys/kernel/iommu_groups/{group}")
    assert sysfs.iommu(files, tuple(f"0000:0{group}:00.0" for group in kinds), Notebook()) == expected


def test_cgroup_v2_takes_the_tightest_of_all_levels(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/system.slice"
    files = {
        "proc/self/cgroup": "0::/system.slice/job.scope\n",
        "proc/self/mountinfo": V2_MOUNT,
        "proc/meminfo": "MemTotal: 67108864 kB\n",
        f"{base}/cpu.max": "250000 100000\n",
        f"{base}/memory.max": "8589934592\n",
        f"{base}/job.scope/cpu.max": "max 100000\n",
        f"{base}/job.scope/memory.max": "17179869184\n",
        f"{base}/cpu.stat": "usage_usec 5\nnr_periods 100\nnr_throttled 40\nthrottled_usec 9\n",
    }
    assert limits(tmp_path, files) == (2.5, False, 8 << 30, False)
    found = os_limits.limits(Files(tmp_path), Notebook())
    assert (found.periods, found.throttled_periods) == (100, 40)


def test_cgroup_v2_without_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/cpu.max": "max 100000\n",
        "sys/fs/cgroup/memory.max": "max\n",
    }
    assert limits(tmp_path, files) == (None, True, None, True)
    notebook = Notebook()
    os_limits.limits(Files(tmp_path), notebook)
    assert {gap.path: gap.detail for gap in notebook.gaps}["limits.cpu_quota"] == "there is no limit"


def test_cgroup_v1_in_a_container_whose_mount_shows_only_its_own_part(tmp_path: Path) -> None:
    inside = "/docker/0123456789abcdef"
    files = {
        "proc/self/cgroup": f"4:memory:{inside}\n3:cpu,cpuacct:{inside}\n1:name=systemd:{inside}\n0::/\n",
        "proc/self/mountinfo": f"41 40 0:33 {inside} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        f"42 40 0:34 {inside} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        "proc/meminfo": "MemTotal: 67108864 kB\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 7\nnr_throttled 3\nthrottled_time 1\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "34359738368\n",
    }
    assert limits(tmp_path, files) == (4.0, False, 32 << 30, False)
    found = os_limits.limits(Files(tmp_path), Notebook())
    assert (found.periods, found.throttled_periods) == (7, 3)


def test_cgroup_v1_without_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
        "proc/self/mountinfo": "41 40 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "42 40 0:34 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert limits(tmp_path, files) == (None, True, None, True)


@pytest.mark.parametrize("content", ["", "garbage", "100000", "max", "1 0", "-5 100000", "\x00\xff"])
def test_damaged_cpu_max_is_never_a_wrong_quota(tmp_path: Path, content: str) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT, "sys/fs/cgroup/cpu.max": content}
    quota = limits(tmp_path, files)[0]
    assert quota == (1.0 if content == "100000" else None)


def test_allowed_cpus_are_those_that_exist_and_the_cpuset_has(tmp_path: Path) -> None:
    files = {
        "proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-127\nMems_allowed_list:\t0-7\n",
        "sys/devices/system/cpu/online": "0-15\n",
        "sys/devices/system/node/online": "0-1\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/cpuset.cpus.effective": "8-23\n",
        "sys/fs/cgroup/cpuset.mems.effective": "1\n",
    }
    found = os_limits.limits(tree(tmp_path, files), Notebook())
    assert (found.allowed_cpus, found.allowed_nodes) == (tuple(range(8, 16)), (1,))


def test_resource_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max open files            1024                 524288               files\n"
        "Max locked memory         unlimited            unlimited            bytes\n",
        "proc/self/mountinfo": "25 24 0:23 / /dev/shm rw - tmpfs shm rw,size=65536k,inode64\n",
    }
    found = os_limits.limits(tree(tmp_path, files), Notebook())
    assert (found.nofile, found.memlock_bytes, found.memlock_unlimited) == (1024, None, True)
    assert (found.shm_bytes, found.shm_free_bytes) == (64 << 20, None)


BARE = "processor : 0\nmodel name : CPU\nflags : fpu sse\n"
GUEST = "processor : 0\nmodel name : CPU\nflags : fpu hypervisor\n"
CLOCKS = "sys/devices/system/clocksource/clocksource0/available_clocksource"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/cpuinfo": BARE, "sys/class/dmi/id/sys_vendor": "Supermicro"}, "none"),
        ({"proc/cpuinfo": BARE, "sys/class/dmi/id/sys_vendor": "Amazon EC2"}, "none"),  # a metal instance
        ({"proc/cpuinfo": GUEST, "sys/class/dmi/id/sys_vendor": "Amazon EC2"}, "kvm"),
        ({"proc/cpuinfo": GUEST, "sys/class/dmi/id/sys_vendor": "VMware, Inc."}, "vmware"),
        (
            {
                "proc/cpuinfo": GUEST,
                "sys/class/dmi/id/product_name": "Virtual Machine",
                "sys/class/dmi/id/sys_vendor": "Microsoft Corporation",
            },
            "hyperv",
        ),
        ({"proc/cpuinfo": GUEST, CLOCKS: "kvm-clock tsc"}, "kvm"),
        ({"proc/cpuinfo": GUEST, "sys/bus/pci/devices/0000:00:01.0/vendor": "0x1af4"}, "kvm"),
        ({"proc/cpuinfo": GUEST}, "vm"),
        ({"sys/hypervisor/type": "xen"}, "xen"),
        ({"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2"}, "wsl"),
        ({}, None),
    ],
)
def test_virtualization(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    assert os_limits.host(tree(tmp_path, files), Notebook()).virtualization == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/user.slice\n"}, "none"),
        ({"proc/self/cgroup": "0::/\n", ".dockerenv": ""}, "docker"),
        ({"proc/self/cgroup": "0::/\n", "run/.containerenv": ""}, "podman"),
        ({"proc/self/cgroup": "3:cpu:/kubepods/besteffort/pod1/abc\n", ".dockerenv": ""}, "kubernetes"),
        ({"proc/self/cgroup": "3:cpu:/lxc/one\n"}, "lxc"),
        (
            {
                "proc/self/cgroup": "0::/user.slice\n",
                "proc/self/mountinfo": "30 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
                "90 30 0:50 / /run/containerd/x/rootfs rw - overlay overlay rw,lowerdir=/var/lib/containerd/1\n",
            },
            "none",  # a host that runs containers
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "proc/self/mountinfo": "90 1 0:50 / / rw - overlay overlay rw,lowerdir=/var/lib/containerd/1\n",
            },
            "containerd",
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/1/environ": "HOME=/\0container=lxc\0"}, "lxc"),
        ({}, None),
    ],
)
def test_container(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    assert os_limits.host(tree(tmp_path, files), Notebook()).container == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (b@h)  Mon",
            ("580.159.04", "open"),
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
            ("535.183.01", "proprietary"),
        ),
        ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  550.54.15  Tue", ("550.54.15", "proprietary")),
        ("GCC version:  gcc version 15.3.0", (None, None)),
    ],
)
def test_driver_version(tmp_path: Path, line: str, expected: tuple[str | None, str | None]) -> None:
    assert software.driver(tree(tmp_path, {"proc/driver/nvidia/version": f"{line}\nGCC version: gcc 13\n"})) == expected


def test_torch_version_from_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    text = "from typing import Optional\n__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n"
    (tmp_path / "torch" / "version.py").write_text(text)
    info = tmp_path / "torch-2.9.1+cu128.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1+cu128\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert software.torch_version() == ("2.9.1+cu128", "12.8")


def test_environment_is_an_allow_list() -> None:
    variables = {"NCCL_DEBUG": "INFO", "RANK": "3", "AWS_SECRET_ACCESS_KEY": "x", "NCCL_TOKEN": "x", "PYTORCH_KEY": "x"}
    assert software.environment(variables) == {"RANK": "3", "NCCL_DEBUG": "INFO"}
    assert len(software.ENVIRONMENT) == len(set(software.ENVIRONMENT))


def test_nics(tmp_path: Path) -> None:
    def card(bdf: str) -> None:
        real = tmp_path / f"sys/devices/pci0000:3a/0000:3a:00.0/{bdf}"
        real.mkdir(parents=True)
        (real / "numa_node").write_text("1\n" if bdf.startswith("0000:3b") else "-1\n")
        link = tmp_path / f"sys/bus/pci/devices/{bdf}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(real, link.parent))

    def behind(path: str, bdf: str) -> None:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / path / "device").symlink_to(tmp_path / f"sys/bus/pci/devices/{bdf}")

    card("0000:3b:00.0")
    card("0000:3c:00.0")
    behind("sys/class/infiniband/mlx5_0", "0000:3b:00.0")
    behind("sys/class/net/ib0", "0000:3b:00.0")  # the same card: not listed twice
    behind("sys/class/net/eno1", "0000:3c:00.0")
    files = tree(
        tmp_path,
        {
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/siw_lo/ports/1/rate": "2.5 Gb/sec (1X SDR)\n",  # soft RDMA: no card
            "sys/class/net/eno1/speed": "-1\n",
            "sys/class/net/eno1/type": "1\n",
            "sys/class/net/eno1/operstate": "down\n",
            "sys/class/net/lo/type": "772\n",
        },
    )
    notebook = Notebook()
    first, second = network.nics(files, notebook)
    assert (first.name, first.kind, first.rate_gb_s, first.state, first.numa_node) == (
        "mlx5_0",
        "infiniband",
        50.0,
        "active",
        1,
    )
    assert (second.name, second.kind, second.rate_gb_s, second.state, second.numa_node) == (
        "eno1",
        "ethernet",
        None,
        "down",
        None,
    )
    assert {gap.path for gap in notebook.gaps} == {"nics[eno1].numa_node", "nics[eno1].rate_gb_s"}
