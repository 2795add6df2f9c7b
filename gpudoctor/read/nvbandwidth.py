"""The output of nvbandwidth, as text or as JSON (also with log lines around it).

Copy engine (``_ce``) rows are what gpudoctor measures too and keep its metric names; rows taken with copy kernels carry
``.sm`` behind the name, for they do not judge a link. A figure of a pair is named by the way of the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpudoctor.model import Case, Gpu, Measurement, Pair, Setting, Software, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "nvbandwidth-text"
KIND_JSON = "nvbandwidth-json"
_DEVICE = re.compile(
    r"\s*(?:Device )?(\d{1,12}): (.+?)(?: \(([0-9a-fA-F]{8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\))?(?:: \(.*\))?$"
)
_RUNNING = re.compile(r"\s*Running (\w+)\.?\s*$")
_SUM = re.compile(r"\s*SUM (\w+)")
_TITLE = re.compile(
    r"\s*memcpy (CE|SM) (.+?) bandwidth \(GB/s\)|\s*memcpy (local) GPU|\s*memory latency SM", re.IGNORECASE
)
_NUMBERS = re.compile(r"\s*\d{1,6}(?:\s+\d{1,6})*\s*$")
_ROW = re.compile(r"\s*(\d{1,12})\s+((?:(?:\d{1,12}(?:\.\d{1,12})?|N/A)\s*)+)$")
_DRIVER = re.compile(r"^Driver Version: (\d{1,4}(?:\.\d{1,4}){1,3})", re.MULTILINE)
_KNOWN = re.compile(
    r"\s*(?:nvbandwidth Version|Built from|CUDA (?:Runtime|Driver) Version|Driver Version|NOTE:|Additional system|"
    r"Performance can vary|Waived|Waiving|\.\.\.)"
)
# testcase without _ce/_sm -> (metric, whether it is a matrix of GPUs)
_HOST = {
    "host_to_device_memcpy": "h2d",
    "device_to_host_memcpy": "d2h",
    "host_to_device_bidirectional_memcpy": "h2d_while_d2h",
    "device_to_host_bidirectional_memcpy": "d2h_while_h2d",
}
_ONE_UNDER_LOAD = {"host_to_all_memcpy": "h2d_all", "all_to_host_memcpy": "d2h_all"}
_PAIRS = {"device_to_device_memcpy_read": "p2p_read", "device_to_device_memcpy_write": "p2p_write"}


@dataclass(slots=True)
class _Table:
    name: str
    columns: list[int]
    rows: list[tuple[int, list[str], int]]  # row number, cells, line


def is_kind(text: str) -> bool:
    head = text[:200_000]
    return (
        re.search(r"^\s*memcpy (?:CE|SM|local) \S+|^\s*Running \w+memcpy\w*_(?:ce|sm)\.", head, re.MULTILINE)
        is not None
    )


def is_kind_json(text: str) -> bool:
    return re.search(r'"nvbandwidth"\s*:', text) is not None


def read_text(text: str, file: str) -> Parts:
    lines = text.splitlines()
    gpus: dict[int, Gpu] = {}
    tables: list[_Table] = []
    running: str | None = None
    title: str | None = None
    driver = _DRIVER.search(text)
    understood = 0
    for number, line in enumerate(lines, start=1):
        understood += 1
        if device := _DEVICE.match(line) if line.lstrip().startswith("Device ") else None:
            gpus[int(device[1])] = _gpu(int(device[1]), device[2], device[3])
        elif match := _RUNNING.match(line):
            running, title = match[1], None
        elif match := _SUM.match(line):
            if tables and tables[-1].name == "":
                tables[-1].name = match[1]  # the line that names the testcase was cut off
            running = None
        elif _TITLE.match(line):
            title = line.strip()
            tables.append(_Table(running or "", [], []))
        elif title and tables and not tables[-1].columns and _NUMBERS.match(line):
            tables[-1].columns = [int(word) for word in line.split()]
        elif title and tables and (row := _ROW.match(line)):
            tables[-1].rows.append((int(row[1]), row[2].split(), number))
        elif line.strip() and not _KNOWN.match(line):
            understood -= 1
    items: list[Measurement] = []
    sources: list[Source] = []
    for table in tables:
        for item, line_number in _measurements(table, file):
            items.append(item)
            sources.append(Source(path=f"measurements.{item.metric}[{item.subject}]", origin=file, line=line_number))
    return _parts(gpus, items, sources, driver[1] if driver else None, text, len(lines) - understood)


def read_json(text: str, file: str) -> Parts:
    """The document is the object that begins a line and parses; log lines around it may hold braces too."""
    document = _document(text)
    if document is None:
        return Parts(parts=(), lines=line_count(text), not_understood=line_count(text), truncated=True)
    body = document["nvbandwidth"]
    gpus: dict[int, Gpu] = {}
    for entry in body.get("GPU Device list") or ():
        if device := _DEVICE.match(str(entry)):
            gpus[int(device[1])] = _gpu(int(device[1]), device[2], device[3])
    items: list[Measurement] = []
    truncated = False
    for case in body.get("testcases") or ():
        matrix = case.get("bandwidth_matrix") if isinstance(case, dict) else None
        truncated |= isinstance(case, dict) and case.get("status") in ("Error", "Running")
        if not isinstance(matrix, list) or case.get("status") != "Passed":
            continue
        rows = [(place, [str(cell) for cell in row], 0) for place, row in enumerate(matrix) if isinstance(row, list)]
        width = max((len(cells) for _, cells, _ in rows), default=0)
        rows = rows[:width] if len(rows) > width > 1 else rows  # bidirectional peers append their three matrices
        items += [item for item, _ in _measurements(_Table(str(case.get("name")), list(range(width)), rows), file)]
    driver = body.get("Driver Version")
    sources = [Source(path="measurements", origin=file)] if items else []
    return _parts(gpus, items, sources, driver if isinstance(driver, str) else None, text, 0, truncated=truncated)


def _document(text: str) -> dict[str, Any] | None:
    decoder = json.JSONDecoder()
    for match in re.finditer(r"^\s*\{", text, re.MULTILINE):
        try:
            found, _ = decoder.raw_decode(text, match.end() - 1)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get("nvbandwidth"), dict):
            return found
    return None


def _parts(
    gpus: dict[int, Gpu],
    items: list[Measurement],
    sources: list[Source],
    driver: str | None,
    text: str,
    not_understood: int,
    *,
    truncated: bool = False,
) -> Parts:
    listed = bool(gpus)
    for item in items:
        for number in re.findall(r"gpu:(\d{1,12})", item.subject):
            gpus.setdefault(int(number), Gpu(index=int(number)))
    # A peer row is only printed where access is granted.
    granted = {
        tuple(sorted(map(int, re.findall(r"\d+", i.subject)))) for i in items if i.metric in ("p2p_read", "p2p_write")
    }
    pairs = tuple(Pair(a=f"gpu:{a}", b=f"gpu:{b}", p2p_read="OK") for a, b in sorted(granted))
    case = Case(
        gpus=tuple(gpus[index] for index in sorted(gpus)),
        pairs=pairs,
        software=Software(driver=driver),
        measurements=tuple(items),
        sources=tuple(sources),
    )
    return Parts(
        parts=(Part(case=case, order="cuda", complete=listed),) if items or listed else (),
        lines=line_count(text),
        not_understood=not_understood,
        truncated=truncated,
    )


def _gpu(index: int, name: str, bus: str | None) -> Gpu:
    # nvbandwidth prints domain:bus:device in eight, two and two digits, without the function
    bdf = None
    if bus:
        domain, number, device = bus.lower().split(":")
        bdf = f"{domain[-4:]}:{number}:{device}.0"
    return Gpu(index=index, name=name.strip(), bdf=bdf)


def _measurements(table: _Table, file: str) -> Iterator[tuple[Measurement, int]]:
    base, engine = re.sub(r"_(?:ce|sm)$", "", table.name), "sm" if table.name.endswith("_sm") else "ce"
    settings: dict[str, Setting] = {"tool": "nvbandwidth", "engine": engine, "testcase": table.name, "file": file}
    suffix = ".sm" if engine == "sm" else ""
    # A first matrix with more rows than the host has is damage: one row a host.
    if base in _HOST or base in _ONE_UNDER_LOAD:
        metric = (_HOST | _ONE_UNDER_LOAD)[base]
        for _, cells, line in table.rows[:1]:
            for column, cell in zip(table.columns, cells, strict=False):
                yield from _one(metric + suffix, f"gpu:{column}", cell, settings, line)
    elif base == "host_device_latency":
        for _, cells, line in table.rows[:1]:
            for column, cell in zip(table.columns, cells, strict=False):
                yield from _one("host_device_latency", f"gpu:{column}", cell, settings, line, unit="ns")
    elif table.name.startswith("device_local_copy"):
        for _, cells, line in table.rows[:1]:
            for column, cell in zip(table.columns, cells, strict=False):
                yield from _one("d2d" + suffix, f"gpu:{column}", cell, settings, line)
    elif base in _PAIRS:
        for row, cells, line in table.rows:
            for column, cell in zip(table.columns, cells, strict=False):
                if row != column:
                    # read: the GPU of the row reads from the GPU of the column
                    a, b = (column, row) if base.endswith("read") else (row, column)
                    yield from _one(_PAIRS[base] + suffix, f"gpu:{a}-gpu:{b}", cell, settings, line)


def _one(
    metric: str, subject: str, cell: str, settings: dict[str, Setting], line: int, *, unit: str = "GB/s"
) -> Iterator[tuple[Measurement, int]]:
    try:
        value = float(cell)
    except ValueError:
        return
    if value > 0:  # old versions print 0.00 where there is no access
        yield Measurement(metric=metric, subject=subject, value=value, unit=unit, settings=settings), line
