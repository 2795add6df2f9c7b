"""Network cards with a PCI device behind them: RDMA devices first, then plain interfaces."""

from __future__ import annotations

import re
from typing import Literal

from gpudoctor.collect.files import Files, Notebook
from gpudoctor.collect.sysfs import device_bdf, pci_device
from gpudoctor.model import Nic

_RDMA = "sys/class/infiniband"
_NET = "sys/class/net"


def nics(files: Files, notebook: Notebook) -> tuple[Nic, ...]:
    """One Nic a device: an interface whose card is listed as an RDMA device already is not listed again.

    Software devices (bonds, bridges, soft RDMA) have no PCI device and are left out.
    """
    found: list[Nic] = []
    for name in files.names(_RDMA):
        nic = _rdma(files, name)
        if nic is not None:
            found.append(nic)
    taken = {nic.bdf for nic in found}
    names, reason = files.listing(_NET)
    if reason is not None and not found:
        notebook.gap("nics", reason, f"/{_NET} cannot be listed")
    for name in names:
        bdf = device_bdf(files, f"{_NET}/{name}/device")
        if bdf is not None and bdf not in taken:
            found.append(_interface(files, name, bdf))
    for nic in found:
        if nic.numa_node is None:
            notebook.gap(f"nics[{nic.name}].numa_node", "not present", "/sys says -1 or nothing")
        if nic.rate_gb_s is None:
            notebook.gap(f"nics[{nic.name}].rate_gb_s", "not supported", "no rate while the link is down or virtual")
    if found:
        notebook.source("nics", f"/{_RDMA}, /{_NET}")
    return tuple(found)


def _rdma(files: Files, name: str) -> Nic | None:
    bdf = device_bdf(files, f"{_RDMA}/{name}/device")
    if bdf is None:
        return None
    ports = files.names(f"{_RDMA}/{name}/ports")
    port = f"{_RDMA}/{name}/ports/{ports[0]}" if ports else ""
    layer = (files.read(f"{port}/link_layer").text or "").lower() if port else ""
    kind: Literal["infiniband", "ethernet", "unknown"] = "unknown"
    if layer in ("infiniband", "ethernet"):
        kind = "infiniband" if layer == "infiniband" else "ethernet"
    rate = re.match(r"([\d.]+)\s*Gb/sec", files.read(f"{port}/rate").text or "") if port else None
    state = re.match(r"\d+:\s*(\w+)", files.read(f"{port}/state").text or "") if port else None
    return _nic(files, name, bdf, kind, float(rate[1]) / 8 if rate else None, state[1].lower() if state else None)


def _interface(files: Files, name: str, bdf: str) -> Nic:
    speed = files.number(f"{_NET}/{name}/speed")  # Mb/s; -1 when unknown
    rate = speed / 8000 if speed is not None and speed > 0 else None
    kind: Literal["infiniband", "ethernet", "unknown"]
    kind = {1: "ethernet", 32: "infiniband"}.get(files.number(f"{_NET}/{name}/type") or 0, "unknown")  # type: ignore[assignment]
    return _nic(files, name, bdf, kind, rate, files.read(f"{_NET}/{name}/operstate").text)


def _nic(
    files: Files,
    name: str,
    bdf: str,
    kind: Literal["infiniband", "ethernet", "unknown"],
    rate_gb_s: float | None,
    state: str | None,
) -> Nic:
    device = pci_device(files, bdf)
    return Nic(
        name=name,
        kind=kind,
        bdf=bdf,
        root=device.root,
        numa_node=device.numa_node,
        rate_gb_s=rate_gb_s,
        state=state or None,
    )
