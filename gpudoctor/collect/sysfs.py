"""What the kernel's /sys tells about PCI devices, their way up to the root, NUMA nodes and the IOMMU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gpudoctor.collect.files import Files, Notebook, number_list
from gpudoctor.estimate.link import PCIE_WIDTHS, pcie_generation
from gpudoctor.model import NumaNode, PathClass, PcieHop, PcieLink

NVIDIA = 0x10DE
_DISPLAY_CLASSES = (0x0300, 0x0302)  # VGA and 3D controllers
_BRIDGE_CLASS = 0x0604
_DEVICES = "sys/bus/pci/devices"
_NODES = "sys/devices/system/node"
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_BDF = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """One PCI function. `chain` is the way from below the host bridge down to the device itself."""

    bdf: str
    root: str | None = None
    chain: tuple[str, ...] = ()
    numa_node: int | None = None
    local_cpus: tuple[int, ...] | None = None
    driver: str | None = None


def bdf_key(bdf: str) -> tuple[int, ...]:
    """Sorts BDFs as numbers."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", bdf))


def nvidia_gpus(files: Files, notebook: Notebook) -> tuple[str, ...] | None:
    """BDFs of the NVIDIA display and 3D controllers in bus order; None (with a Gap) when the bus cannot be read."""
    names, reason = files.listing(_DEVICES)
    if reason is not None:
        notebook.gap("host.gpus_on_bus", reason, f"/{_DEVICES} cannot be listed")
        return None
    found = []
    unreadable = 0
    for name in filter(_BDF.fullmatch, names):
        vendor, kind = files.number(f"{_DEVICES}/{name}/vendor"), files.number(f"{_DEVICES}/{name}/class")
        if vendor is None or kind is None:
            unreadable += 1
        elif vendor == NVIDIA and kind >> 8 in _DISPLAY_CLASSES:
            found.append(name)
    if unreadable:
        notebook.gap("host.gpus_on_bus", "no permission", f"{unreadable} PCI devices do not tell vendor and class")
        if not found:
            return None
    else:
        notebook.source("host.gpus_on_bus", f"/{_DEVICES}")
    return tuple(sorted(found, key=bdf_key))


def pci_device(files: Files, bdf: str) -> PciDevice:
    """Place and locality of one PCI function; unknown parts are None."""
    base = f"{_DEVICES}/{bdf}"
    root, chain = _chain(files, base)
    node = files.number(f"{base}/numa_node")
    driver = files.real(f"{base}/driver")
    return PciDevice(
        bdf=bdf,
        root=root,
        chain=chain,
        numa_node=node if node is not None and node >= 0 else None,
        local_cpus=number_list(files.read(f"{base}/local_cpulist").text) or None,
        driver=driver.name if driver else None,
    )


def device_bdf(files: Files, link: str) -> str | None:
    """The PCI function behind a class device's ``device`` link (for virtio: the function that carries it)."""
    chain = _chain(files, link)[1]
    return chain[-1] if chain else None


def _chain(files: Files, link: str) -> tuple[str | None, tuple[str, ...]]:
    real = files.real(link)
    if real is None:
        return None, ()
    parts = list(real.parts)
    # The last host bridge counts: a volume management device carries a PCI domain of its own.
    roots = [number for number, part in enumerate(parts) if _ROOT.fullmatch(part)]
    if not roots:
        return None, ()
    below = parts[roots[-1] + 1 :]
    return parts[roots[-1]], tuple(part for part in below if _BDF.fullmatch(part))


def pcie_path(files: Files, device: PciDevice) -> tuple[PcieHop, ...]:
    """Every device from the GPU (first) up to the root port (last), each with its link.

    The link of an endpoint or of a switch's upper port leads up; that of a root port or lower port leads down.
    """
    kinds = _kinds(files, device.chain)
    hops: list[PcieHop] = []
    for depth in range(len(device.chain) - 1, -1, -1):
        bdf, kind = device.chain[depth], kinds[depth]
        above = _link(files, device.chain[depth - 1]) if depth and kind in ("endpoint", "switch-up") else None
        own = _link(files, bdf)
        link = None
        if own is not None:
            link = PcieLink(
                generation=own.generation,
                width=own.width,
                max_generation=own.max_generation,
                max_width=own.max_width,
                port_max_generation=above.max_generation if above else None,
                port_max_width=above.max_width if above else None,
            )
        hops.append(
            PcieHop(
                bdf=bdf,
                kind=kind,
                vendor_id=files.number(f"{_DEVICES}/{bdf}/vendor"),
                device_id=files.number(f"{_DEVICES}/{bdf}/device"),
                link=link,
            )
        )
    return tuple(hops)


HopKind = Literal["endpoint", "switch-down", "switch-up", "root-port", "bridge"]


def _kinds(files: Files, chain: tuple[str, ...]) -> list[HopKind]:
    """The port types are in configuration space that only root may read; the order tells the same.

    Below a root port, upper and lower ports of switches take turns. A bridge without link files is no PCIe port.
    """
    kinds: list[HopKind] = []
    for bdf in chain[:-1]:
        last = kinds[-1] if kinds else None
        if not files.exists(f"{_DEVICES}/{bdf}/max_link_width"):
            kinds.append("bridge")
        elif last is None:
            kinds.append("root-port")
        elif last in ("root-port", "switch-down"):
            kinds.append("switch-up")
        else:
            kinds.append("switch-down" if last == "switch-up" else "bridge")
    if kinds and kinds[-1] == "switch-up":  # nothing can hang on an upper port: a PCIe-to-PCI bridge
        kinds[-1] = "bridge"
    return [*kinds, "endpoint"] if chain else []


def _link(files: Files, bdf: str) -> PcieLink | None:
    base = f"{_DEVICES}/{bdf}"
    link = PcieLink(
        generation=pcie_generation(files.read(f"{base}/current_link_speed").text or ""),
        width=_width(files, f"{base}/current_link_width"),
        max_generation=pcie_generation(files.read(f"{base}/max_link_speed").text or ""),
        max_width=_width(files, f"{base}/max_link_width"),
    )
    return None if link == PcieLink() else link


def _width(files: Files, path: str) -> int | None:
    """Ports that are down say 0, devices without a link 63 or 255: no widths."""
    width = files.number(path)
    return width if width in PCIE_WIDTHS else None


def path_class(a: PciDevice, b: PciDevice, *, nodes: int | None) -> PathClass | None:
    """What lies between two devices, in nvidia-smi's words; None when /sys does not tell.

    `nodes` is the number of NUMA nodes of the machine, which decides where a device's own node is unknown.
    """
    if a.root is None or b.root is None:
        return None
    if a.bdf == b.bdf:
        return "X"
    if a.root != b.root:
        if a.numa_node is None or b.numa_node is None:
            return "NODE" if nodes == 1 else None
        return "NODE" if a.numa_node == b.numa_node else "SYS"
    shared = 0
    while shared < min(len(a.chain), len(b.chain)) and a.chain[shared] == b.chain[shared]:
        shared += 1
    if shared == 0:
        return "PHB"
    # One switch: each device hangs on a lower port of its own below the shared upper port.
    bridges = len(a.chain) + len(b.chain) - 2 * shared - 2
    return "PIX" if bridges <= 2 else "PXB"


def numa_nodes(files: Files, notebook: Notebook) -> tuple[NumaNode, ...]:
    """NUMA nodes with CPUs, memory and distances; ids need not be a range."""
    names, reason = files.listing(_NODES)
    ids = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"node(\d+)", name)))
    if not ids:
        notebook.gap("numa_nodes", reason or "not present", f"no nodes below /{_NODES}")
        return ()
    notebook.source("numa_nodes", f"/{_NODES}")
    nodes = []
    for node in ids:
        base = f"{_NODES}/node{node}"
        cpus = number_list(files.read(f"{base}/cpulist").text)
        if cpus is None:
            notebook.gap(f"numa_nodes[{node}].cpus", files.read(f"{base}/cpulist").reason or "not supported")
        memory = re.search(r"MemTotal:\s*(\d+)\s*kB", files.read(f"{base}/meminfo").text or "")
        if memory is None:
            notebook.gap(f"numa_nodes[{node}].memory_bytes", files.read(f"{base}/meminfo").reason or "not supported")
        distances = (files.read(f"{base}/distance").text or "").split()
        nodes.append(
            NumaNode(
                node=node,
                cpus=cpus or (),
                memory_bytes=int(memory[1]) * 1024 if memory else None,
                distances=tuple(int(text) for text in distances if text.isdigit()),
            )
        )
    return tuple(nodes)


def iommu(files: Files, bdfs: tuple[str, ...], notebook: Notebook) -> str | None:
    """ "off", "identity" or "translated", judged by the given devices (all of the bus when there are none)."""
    types = set()
    for bdf in bdfs or files.names(_DEVICES):
        group = files.real(f"{_DEVICES}/{bdf}/iommu_group")
        if group is not None:
            kind = files.read(f"{group}/type").text
            if kind:
                types.add(kind)
    if types:
        notebook.source("host.iommu", "/sys/kernel/iommu_groups")
        return "translated" if any(kind.startswith("DMA") for kind in types) else "identity"
    groups, reason = files.listing("sys/kernel/iommu_groups")
    units = files.names("sys/class/iommu")
    if not groups and not units and reason != "no permission" and files.exists("sys/kernel"):
        notebook.source("host.iommu", "/sys/class/iommu")
        return "off"
    notebook.gap("host.iommu", reason or "not supported", "no type of the devices' IOMMU groups")
    return None
