"""``p2pBandwidthLatencyTest`` of the CUDA samples: rates and latencies between GPUs, with peer access and without.

The diagonal counts a copy inside the GPU twice (read and write), a bidirectional figure is the sum of both directions,
and "Enabled" equals "Disabled" where access is refused: the connectivity matrix says which is meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpudoctor.model import Case, Gpu, Measurement, P2PStatus, Pair, Setting, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "p2pBandwidthLatencyTest"
_DEVICE = re.compile(
    r"\s*Device: (\d{1,4}), (.+?), pciBusID: ([0-9a-f]{1,4}), pciDeviceID: ([0-9a-f]{1,4}), "
    r"pciDomainID:\s*([0-9a-f]{1,8})",
    re.IGNORECASE,
)
_ACCESS = re.compile(r"\s*Device=(\d{1,12}) (CAN|CANNOT) Access Peer Device=(\d{1,12})")
_TITLE = re.compile(
    r"\s*(Uni|Bi)directional P2P=(Enabled|Disabled) Bandwidth (?:\(P2P (Writes|Reads)\) )?Matrix \(GB/s\)"
    r"|\s*P2P=(Enabled|Disabled) Latency (?:\(P2P (?:Writes|Reads)\) )?Matrix \(us\)|\s*(P2P Connectivity Matrix)"
)
_HEADER = re.compile(r"\s*(D\\D|GPU|CPU)((?:\s+\d{1,6})+)\s*$")
_ROW = re.compile(r"\s*(\d{1,12})((?:\s+\d{1,12}(?:\.\d{1,12})?)+)\s*$")
_KNOWN = re.compile(r"\s*(?:\[P2P \(Peer|\*\*\*NOTE|So you can see|NOTE:)|.*p2pBandwidthLatencyTest")


@dataclass(slots=True)
class _Table:
    kind: str  # "connectivity", "uni", "bi", "latency"
    enabled: bool
    reads: bool
    columns: list[int]
    rows: list[tuple[int, list[float], int]]
    of_cpu: bool = False


def is_kind(text: str) -> bool:
    return (
        re.search(r"directional P2P=(?:Enabled|Disabled) Bandwidth|P2P \(Peer-to-Peer\) GPU Bandwidth", text)
        is not None
    )


def read_text(text: str, file: str) -> Parts:
    lines = text.splitlines()
    gpus: dict[int, Gpu] = {}
    access: dict[tuple[int, int], bool] = {}
    tables: list[_Table] = []
    understood = 0
    for number, line in enumerate(lines, start=1):
        understood += 1
        if device := _DEVICE.match(line):
            index = int(device[1])
            gpus[index] = Gpu(index=index, name=device[2], bdf=_bdf(device[5], device[3], device[4]))
        elif found := _ACCESS.match(line):
            access[int(found[1]), int(found[3])] = found[2] == "CAN"
        elif title := _TITLE.match(line):
            tables.append(_table(title))
        elif not (tables and _row(tables, line, number)) and line.strip() and not _KNOWN.match(line):
            understood -= 1
    if tables and tables[-1].rows and not text.endswith("\n") and tables[-1].rows[-1][2] == len(lines):
        del tables[-1].rows[-1][1][-1:]  # the text stops there, perhaps inside the number
    for table in tables:
        if table.kind == "connectivity":
            for place, values, _ in table.rows:
                access |= {(place, c): bool(v) for c, v in zip(table.columns, values, strict=False) if c != place}
    items: list[Measurement] = []
    sources: list[Source] = []
    for table in tables:
        _take(table, access, file, items, sources)
    seen = {number for pair in access for number in pair}
    seen |= {int(word) for item in items for word in re.findall(r"gpu:(\d{1,12})", item.subject)}
    for number in seen:
        gpus.setdefault(number, Gpu(index=number))
    case = Case(
        gpus=tuple(gpus[index] for index in sorted(gpus)),
        pairs=_pairs(access),
        measurements=tuple(items),
        sources=tuple(sources),
    )
    return Parts(
        parts=(Part(case=case, order="cuda"),) if gpus else (),
        lines=line_count(text),
        not_understood=len(lines) - understood,
        truncated=any(len(table.rows) < len(table.columns) for table in tables) or not text.endswith("\n"),
    )


def _row(tables: list[_Table], line: str, number: int) -> bool:
    """Whether the line belongs to the table that is open: its header or a row of it."""
    if header := _HEADER.match(line):
        columns = [int(word) for word in header[2].split()]
        if header[1] == "CPU":
            tables.append(_Table(tables[-1].kind, tables[-1].enabled, False, columns, [], of_cpu=True))
        tables[-1].columns = columns
        return True
    row = _ROW.match(line)
    values = _numbers(row[2]) if row else None
    if row is None or values is None:
        return False
    tables[-1].rows.append((int(row[1]), values, number))
    return True


def _bdf(domain: str, bus: str, device: str) -> str:
    """The test prints the numbers in hexadecimal (%x)."""
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.0"


def _numbers(text: str) -> list[float] | None:
    try:
        return [float(word) for word in text.split()]
    except ValueError:
        return None


def _table(title: re.Match[str]) -> _Table:
    if title[5]:
        return _Table("connectivity", False, False, [], [])
    if title[4]:
        return _Table("latency", title[4] == "Enabled", False, [], [])
    return _Table(title[1].lower(), title[2] == "Enabled", title[3] == "Reads", [], [])


def _pairs(access: dict[tuple[int, int], bool]) -> tuple[Pair, ...]:
    """Access granted to both is OK. A refusal has many reasons; which one only the driver's own matrix says."""
    status: dict[tuple[int, int], P2PStatus] = {}
    for (a, b), granted in access.items():
        key = (min(a, b), max(a, b))
        status[key] = "OK" if granted and access.get((b, a), granted) else "NS"
    return tuple(Pair(a=f"gpu:{a}", b=f"gpu:{b}", p2p_read=status[a, b]) for a, b in sorted(status))


def _take(
    table: _Table,
    access: dict[tuple[int, int], bool],
    file: str,
    items: list[Measurement],
    sources: list[Source],
) -> None:
    if table.kind == "connectivity" or table.of_cpu:
        return
    diagonal = "d2d" not in {item.metric for item in items}
    for a, values, line in table.rows:
        for b, value in zip(table.columns, values, strict=False):
            if value <= 0:
                continue
            settings: dict[str, Setting] = {"tool": KIND, "file": file}
            if a == b:
                if table.kind != "latency" and diagonal:
                    # read and write are counted there, bytes once here
                    item = Measurement(
                        metric="d2d", subject=f"gpu:{a}", value=value / 2, unit="GB/s", settings=settings
                    )
                    items.append(item)
                continue
            staged = not table.enabled or access.get((a, b)) is False
            settings["path"] = "staged" if staged else "peer"
            if staged and table.enabled:
                continue  # the same copies as in the matrix without access, under another heading
            metric = _metric(table, staged=staged)
            subject = f"gpu:{b}-gpu:{a}" if table.reads else f"gpu:{a}-gpu:{b}"
            unit = "us" if table.kind == "latency" else "GB/s"
            items.append(Measurement(metric=metric, subject=subject, value=value, unit=unit, settings=settings))
            sources.append(Source(path=f"measurements.{metric}[{subject}]", origin=file, line=line))


def _metric(table: _Table, *, staged: bool) -> str:
    if table.kind == "latency":
        return "p2p_staged_latency" if staged else "p2p_latency"
    if table.kind == "bi":
        return "p2p_staged_sum" if staged else "p2p_sum"
    return "p2p_staged" if staged else "p2p_read" if table.reads else "p2p_write"
