"""Facts about one machine: host, GPUs, links, NUMA nodes, NICs, software and limits.

Every optional field is a value or None; a None that was looked for has a Gap in the Case.
Sizes are bytes, rates are GB/s (1e9 bytes per second, one direction), times are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GapReason = Literal["not supported", "no permission", "not present", "not probed", "not in this artifact", "truncated"]
LinkState = Literal["idle", "load", "unknown"]
# Words of nvidia-smi topo -m; X is the device itself.
PathClass = Literal["X", "PIX", "PXB", "PHB", "NODE", "SYS"]
# Words of nvidia-smi topo -p2p: OK, chipset, GPU, topology not supported, disabled by registry key,
# not supported, unknown.
P2PStatus = Literal["OK", "CNS", "GNS", "TNS", "DR", "NS", "U"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A fact that could not be had. `path` is a fact path such as ``gpus[0000:3b:00.0].pcie.width``."""

    path: str
    reason: GapReason
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the fact at `path` came from: a probe ("nvml", "sysfs") or an artifact with its line."""

    path: str
    origin: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConflictValue:
    value: str
    origin: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Sources that disagree about the fact at `path`; every value is kept with its origin."""

    path: str
    values: tuple[ConflictValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    hostname: str | None = None
    os: str | None = None  # "linux", "windows", "darwin"
    kernel: str | None = None
    cpu_model: str | None = None
    cpu_count: int | None = None  # logical CPUs of the machine, not of this process
    sockets: int | None = None
    memory_bytes: int | None = None
    virtualization: str | None = None  # "none", "kvm", "vmware", ...; None when unknown
    product: str | None = None
    container: str | None = None  # "none", "docker", "podman", "kubernetes", "lxc", ...
    iommu: str | None = None  # "off", "identity", "translated"
    gpus_on_bus: int | None = None  # NVIDIA display/3D controllers on the PCI bus


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """One PCIe link. `generation` is a reading at `state`; a link slows down when the GPU idles."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None  # of the device itself
    max_width: int | None = None
    port_max_generation: int | None = None  # of the port above it (slot, switch)
    port_max_width: int | None = None
    state: LinkState = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieHop:
    """One device on the way from the GPU (first) to the root port (last)."""

    bdf: str
    kind: Literal["endpoint", "switch-down", "switch-up", "root-port", "bridge"]
    vendor_id: int | None = None
    device_id: int | None = None
    link: PcieLink | None = None  # the link to the device above; of a root port or switch-down: to the one below


@dataclass(frozen=True, slots=True, kw_only=True)
class Acs:
    """Access Control Services of one bridge: which of its controls are switched on (lspci's words, such as ReqRedir).

    `bdf` is None where the text names no device (`lspci -vvv | grep ACSCtl`).
    """

    bdf: str | None = None
    on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    link: int
    active: bool | None = None
    version: int | None = None
    speed_gb_s: float | None = None
    remote_bdf: str | None = None
    remote_type: str | None = None  # "gpu", "switch", "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    pid: int
    name: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. `index` is nvidia-smi's (bus order); devices are joined on `bdf` or `uuid`, never on `index`."""

    index: int
    cuda_index: int | None = None  # its place in CUDA's order, where a CUDA program told; may differ from `index`
    name: str | None = None
    bdf: str | None = None  # lower case, 4-digit domain: 0000:3b:00.0
    uuid: str | None = None
    serial: str | None = None
    architecture: str | None = None  # "Hopper", "Ampere", ...
    compute_capability: str | None = None  # "9.0"
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    bar1_bytes: int | None = None
    pcie: PcieLink | None = None
    pcie_path: tuple[PcieHop, ...] = ()  # from the GPU up to the root port
    root: str | None = None  # PCI host bridge, such as pci0000:3a
    pcie_replays: int | None = None
    nvlinks: tuple[NvLink, ...] = ()
    numa_node: int | None = None
    numa_nodes: tuple[int, ...] = ()  # the NUMA affinity as printed or by NVML; more than one when unknown or on Grace
    memory_node: int | None = None  # the NUMA node that is the GPU's own memory (Grace); it has no CPUs
    local_cpus: tuple[int, ...] | None = None  # () when the driver printed an empty set
    pstate: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_default_limit_w: float | None = None
    temperature_c: int | None = None
    temperature_slowdown_c: int | None = None
    temperature_max_operating_c: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None  # NVML clock event reasons in force, NVML's words in snake case
    throttle_state: LinkState = "unknown"  # whether they were read idle or under load
    thermal_violation_ms: float | None = None
    utilization_pct: int | None = None
    mig: bool | None = None
    ecc: bool | None = None
    compute_mode: str | None = None  # "default", "exclusive_process", "prohibited"
    persistence: bool | None = None
    virtualization: str | None = None  # "none", "passthrough", "vgpu"
    processes: tuple[GpuProcess, ...] | None = None
    lost: bool = False  # on the bus or in the list, but does not answer
    lost_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two devices (keys `gpu:0`, `nic:mlx5_0`, by position in this Case) and what lies between them."""

    a: str
    b: str
    path: PathClass | None = None
    nvlinks: int | None = None  # bonded NVLinks, NV# in nvidia-smi's matrix
    p2p_read: P2PStatus | None = None
    p2p_write: P2PStatus | None = None
    p2p_nvlink: P2PStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    node: int
    cpus: tuple[int, ...] = ()
    memory_bytes: int | None = None
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    name: str
    kind: Literal["infiniband", "ethernet", "unknown"] = "unknown"
    bdf: str | None = None
    root: str | None = None
    numa_node: int | None = None
    rate_gb_s: float | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """An NVMe controller, the other device that shares lanes and nodes with GPUs."""

    name: str  # nvme0
    bdf: str | None = None
    root: str | None = None
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    driver: str | None = None
    driver_flavour: Literal["open", "proprietary"] | None = None
    nvml: str | None = None
    cuda_driver: str | None = None  # highest CUDA version the driver supports, "13.0"
    nccl: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    python: str | None = None
    environment: dict[str, str] | None = None  # allow-listed variables only


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this process may use: affinity, cgroup, shared memory and resource limits."""

    allowed_cpus: tuple[int, ...] | None = None
    allowed_nodes: tuple[int, ...] | None = None
    cpu_quota: float | None = None  # CPUs; None with a Gap when there is no limit or it is unknown
    cpu_quota_unlimited: bool | None = None
    throttled_periods: int | None = None
    periods: int | None = None
    memory_bytes: int | None = None
    memory_unlimited: bool | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    memlock_bytes: int | None = None
    memlock_unlimited: bool | None = None
    nofile: int | None = None
    load_average: float | None = None

    @property
    def cpus(self) -> float | None:
        """CPUs that may be used: the smaller of affinity mask and quota; None where both are unknown."""
        known = [float(len(self.allowed_cpus))] if self.allowed_cpus is not None else []
        return min([*known, *([self.cpu_quota] if self.cpu_quota else [])], default=None)
