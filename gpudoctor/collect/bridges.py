"""NVMe drives, and the ACS controls of the bridges above the GPUs, from /sys."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from gpudoctor.collect.files import Files, Notebook, reason_of
from gpudoctor.collect.sysfs import device_bdf, pci_device
from gpudoctor.model import Gpu
from gpudoctor.model.facts import Acs, Drive

_NVME = "sys/class/nvme"
_DEVICES = "sys/bus/pci/devices"
_EXTENDED = 0x100  # where extended capabilities begin; without root the kernel gives 64 bytes only
_ACS_ID = 0x000D
_CONTROLS = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")
_MOST_CAPABILITIES = 64  # a chain that is longer is damaged


def drives(files: Files) -> tuple[Drive, ...]:
    """The NVMe controllers with a PCI device behind them."""
    found = []
    for name in files.names(_NVME):
        bdf = device_bdf(files, f"{_NVME}/{name}/device") if re.fullmatch(r"nvme\d+", name) else None
        if bdf is not None:
            device = pci_device(files, bdf)
            found.append(Drive(name=name, bdf=bdf, root=device.root, numa_node=device.numa_node))
    return tuple(found)


def acs(files: Files, notebook: Notebook, gpus: Sequence[Gpu]) -> tuple[Acs, ...]:
    """What is switched on at each port above a GPU. "Unknown", not "off", where only root may read it."""
    ports = dict.fromkeys(hop.bdf for gpu in gpus for hop in gpu.pcie_path[1:])
    found = []
    for bdf in ports:
        try:
            config = files.at(f"{_DEVICES}/{bdf}/config").read_bytes()
        except OSError as error:
            notebook.gap("acs", reason_of(error), f"/{_DEVICES}/{bdf}/config")
            continue
        if len(config) <= _EXTENDED:
            notebook.gap("acs", "no permission", "extended configuration space is for root only")
            continue
        controls = control_bits(config)
        if controls is not None:
            on = tuple(name for bit, name in enumerate(_CONTROLS) if controls >> bit & 1)
            found.append(Acs(bdf=bdf, on=on))
    if found:
        notebook.source("acs", f"/{_DEVICES}/*/config")
    return tuple(found)


def control_bits(config: bytes) -> int | None:
    """The ACS control register in a PCIe configuration space, or None when the device has no ACS."""
    place = _EXTENDED
    for _ in range(_MOST_CAPABILITIES):
        if place < _EXTENDED or place + 8 > len(config):
            return None
        (header,) = struct.unpack_from("<I", config, place)
        if header & 0xFFFF == _ACS_ID:
            return int(struct.unpack_from("<H", config, place + 6)[0])
        place = header >> 20
    return None
