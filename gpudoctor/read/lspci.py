"""``lspci -vv`` (whole, or of single devices), and ``lspci -vvv | grep ACSCtl``: links, bridges, ACS, BAR1, NUMA nodes.

A link speed that lspci prints was read at whatever the GPU did then: the state is unknown. ACSCtl is what is switched
on; ACSCap only what could be. Without root lspci prints neither, which is no "off".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from gpudoctor.estimate.link import PCIE_WIDTHS, pcie_generation
from gpudoctor.model import Case, Gap, Gpu, PcieHop, PcieLink, Source
from gpudoctor.model.facts import Acs
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "lspci"
KIND_ACS = "lspci-acs"
_DEVICE = re.compile(r"((?:[0-9a-f]{4,}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([^:]+): (.+)$", re.IGNORECASE)
_BUS = re.compile(r"\s+Bus: primary=([0-9a-f]{2}), secondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})", re.IGNORECASE)
_CAP = re.compile(r"\s+LnkCap:.*Speed (\d{1,12}(?:\.\d{1,12})?GT/s), Width x(\d{1,12})")
_STA = re.compile(r"\s+LnkSta:.*Speed (\d{1,12}(?:\.\d{1,12})?GT/s)[^,]*, Width x(\d{1,12})")
_NODE = re.compile(r"\s+NUMA node: (\d{1,12})")
_BAR1 = re.compile(r"\s+Region 1: Memory at \S+ \(64-bit, prefetchable\).*\[size=(\d{1,12})([KMGT])\]")
_EXPRESS = re.compile(r"\s+Capabilities: \[\w+\] Express \(v\d\) ([A-Za-z ]+?)(?: Port)?(?: \(|,)")
_ACS = re.compile(r"ACSCtl:\s*((?:\w+[+-]\s*)+)$")
_DENIED = re.compile(r"\s+Capabilities: <access denied>")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NVIDIA = re.compile(r"NVIDIA Corporation (.+?)(?: \(rev \w+\))?(?: \(prog-if .*\))?$")
_MODEL = re.compile(r"\[([^\]]+)\]")


@dataclass(slots=True)
class _Device:
    bdf: str
    kind: str
    title: str
    line: int
    secondary: int | None = None
    subordinate: int | None = None
    port: str | None = None  # lspci's word: Root, Upstream, Downstream, Endpoint
    cap: tuple[int | None, int] | None = None
    now: tuple[int | None, int] | None = None
    node: int | None = None
    bar1: int | None = None
    acs: tuple[str, ...] | None = None
    denied: bool = False
    lines: int = field(default=1)


def is_kind(text: str) -> bool:
    """A device line with a capability below it; a bare list of devices tells no links."""
    return bool(re.search(r"^\s+(?:LnkSta|LnkCap|Kernel driver in use|Region \d):", text, re.MULTILINE)) and any(
        _DEVICE.match(line) for line in text.splitlines()
    )


def is_kind_acs(text: str) -> bool:
    return _ACS.search(text.replace("\r", "").split("\n\n")[0]) is not None or any(
        _ACS.search(line) for line in text.splitlines()
    )


def read_acs(text: str, file: str) -> Parts:
    """Controls of bridges that the text does not name."""
    lines = text.splitlines()
    found: list[Acs] = []
    sources: list[Source] = []
    understood = 0
    for number, line in enumerate(lines, start=1):
        if match := _ACS.search(line):
            found.append(Acs(on=_on(match[1])))
            sources.append(Source(path="acs", origin=file, line=number))
            understood += 1
        else:
            understood += not line.strip() or "lspci" in line
    # One source is enough where all say the same; the first that redirects is the one to show.
    redirecting = [s for s, acs in zip(sources, found, strict=True) if {"ReqRedir", "CmpltRedir"} & set(acs.on)]
    return Parts(
        parts=(Part(case=Case(acs=tuple(found), sources=tuple((redirecting or sources)[:1]))),) if found else (),
        lines=line_count(text),
        not_understood=len(lines) - understood,
    )


def read_text(text: str, file: str) -> Parts:
    devices, understood = _devices(text)
    bridges = [device for device in devices if device.secondary is not None]
    gpus: list[Gpu] = []
    gaps: list[Gap] = []
    sources: list[Source] = []
    shown = sorted((d for d in devices if _is_gpu(d)), key=lambda device: _key(device.bdf))
    for index, device in enumerate(shown):
        path = _path(device, bridges)
        model = _NVIDIA.search(device.title)
        name = _MODEL.search(model[1]) if model else None
        link = path[0].link
        gpu = Gpu(
            index=index,
            bdf=device.bdf,
            name=name[1] if name else None,
            pcie=link,
            pcie_path=path,
            numa_node=device.node,
            bar1_bytes=device.bar1,
            root=f"pci{device.bdf[:4]}:{path[-1].bdf[5:7]}" if path[-1].kind == "root-port" else None,
        )
        gpus.append(gpu)
        sources.append(Source(path=f"gpus[{device.bdf}]", origin=file, line=device.line))
        if device.denied or link is None:
            reason = "no permission" if device.denied else "truncated"
            gaps.append(Gap(path=f"gpus[{device.bdf}].pcie", reason=reason, detail="lspci without root"))  # type: ignore[arg-type]
    acs = tuple(Acs(bdf=device.bdf, on=device.acs) for device in devices if device.acs is not None)
    case = Case(gpus=tuple(gpus), acs=acs, gaps=tuple(gaps), sources=tuple(sources))
    return Parts(
        parts=(Part(case=case, order="bus"),) if gpus or acs else (),
        lines=line_count(text),
        not_understood=max(0, line_count(text) - understood),
    )


def _devices(text: str) -> tuple[list[_Device], int]:
    devices: list[_Device] = []
    understood = 0
    for number, line in enumerate(text.splitlines(), start=1):
        head = _DEVICE.match(line.strip()) if not line.startswith((" ", "\t")) else None
        if head:
            bdf = head[1].lower() if head[1].count(":") == 2 else f"0000:{head[1].lower()}"
            devices.append(_Device(bdf, head[2], head[3], number))
            understood += 1
        elif devices:
            understood += 1
            _note(devices[-1], line)
        else:
            understood += not line.strip()
    unique = {device.bdf: device for device in reversed(devices)}
    return [device for device in devices if unique[device.bdf] is device], understood


def _note(device: _Device, line: str) -> None:
    if bus := _BUS.match(line):
        device.secondary, device.subordinate = int(bus[2], 16), int(bus[3], 16)
    elif cap := _CAP.match(line):
        device.cap = (pcie_generation(_spaced(cap[1])), int(cap[2]))
    elif now := _STA.match(line):
        device.now = (pcie_generation(_spaced(now[1])), int(now[2]))
    elif node := _NODE.match(line):
        device.node = int(node[1])
    elif bar := _BAR1.match(line):
        device.bar1 = int(bar[1]) * _UNITS[bar[2]]
    elif acs := _ACS.search(line):
        device.acs = _on(acs[1])
    elif port := _EXPRESS.match(line):
        device.port = port[1].strip().split()[0]
    elif _DENIED.match(line):
        device.denied = True


def _spaced(speed: str) -> str:
    return speed.replace("GT/s", " GT/s")


def _on(words: str) -> tuple[str, ...]:
    return tuple(word[:-1] for word in words.split() if word.endswith("+"))


def _is_gpu(device: _Device) -> bool:
    return "NVIDIA" in device.title and device.kind in (
        "VGA compatible controller",
        "3D controller",
        "Display controller",
    )


def _key(bdf: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.split(r"[:.]", bdf))


def _path(device: _Device, bridges: list[_Device]) -> tuple[PcieHop, ...]:
    """The device and the bridges above it that the text shows, up to the one that no other bridge leads to."""
    chain = [device]
    while True:
        domain, bus = chain[-1].bdf[:4], int(chain[-1].bdf[5:7], 16)
        above = [b for b in bridges if b.secondary == bus and b.bdf[:4] == domain and b not in chain]
        if len(above) != 1:
            break
        chain.append(above[0])
    hops = []
    for place, found in enumerate(chain):
        port = chain[place + 1] if place + 1 < len(chain) else None
        hops.append(PcieHop(bdf=found.bdf, kind=_kind(found, place, len(chain)), link=_link(found, port)))
    return tuple(hops)


def _kind(device: _Device, place: int, count: int) -> Any:
    words = {"Root": "root-port", "Upstream": "switch-up", "Downstream": "switch-down"}
    if place == 0:
        return "endpoint"
    return words.get(device.port or "", "root-port" if place == count - 1 and device.bdf[5:7] == "00" else "bridge")


def _link(device: _Device, port: _Device | None) -> PcieLink | None:
    if device.cap is None and device.now is None:
        return None
    leads_up = device.port not in ("Root", "Downstream")
    above = port.cap if port and leads_up else None
    now = device.now or (None, 0)
    cap = device.cap or (None, 0)
    return PcieLink(
        generation=now[0],
        width=now[1] if now[1] in PCIE_WIDTHS else None,
        max_generation=cap[0],
        max_width=cap[1] if cap[1] in PCIE_WIDTHS else None,
        port_max_generation=above[0] if above else None,
        port_max_width=above[1] if above and above[1] in PCIE_WIDTHS else None,
    )
