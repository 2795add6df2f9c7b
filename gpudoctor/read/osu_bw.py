"""``osu_bw`` of the OSU micro-benchmarks: rate by size between host and device buffers, through MPI."""

from __future__ import annotations

import re

from gpudoctor.model import Case, Measurement, Setting, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "osu-bw"
_TITLE = re.compile(r"#\s*OSU MPI\S* (?:Bi-Directional )?Bandwidth Test")
_BUFFERS = re.compile(r"#\s*Send Buffer on (HOST|DEVICE)[^#\n]* Receive Buffer on (HOST|DEVICE)")
_UNIT = re.compile(r"#\s*Size\s+Bandwidth \((MB|GB)/s\)")
_ROW = re.compile(r"\s*(\d{1,12})\s+(\d{1,12}(?:\.\d{1,12})?)\s*$")


def is_kind(text: str) -> bool:
    return _TITLE.search(text) is not None


def read_text(text: str, file: str) -> Parts:
    lines = text.splitlines()
    buffers, unit = _BUFFERS.search(text), _UNIT.search(text)
    ways = {("HOST", "DEVICE"): "h2d", ("DEVICE", "HOST"): "d2h", ("DEVICE", "DEVICE"): "p2p"}
    way = ways.get((buffers[1], buffers[2]), "h2h") if buffers else "h2h"
    items, sources = [], []
    understood = 0
    for number, line in enumerate(lines, start=1):
        row = _ROW.match(line)
        understood += row is not None or line.startswith("#") or not line.strip()
        if row is None:
            continue
        # MPI decides whether it pins: the figures say nothing about the link
        settings: dict[str, Setting] = {"tool": KIND, "bytes": int(row[1]), "pinned": None, "file": file}
        rate = float(row[2]) / (1 if unit and unit[1] == "GB" else 1000)
        items.append(Measurement(metric=f"{way}_mpi_curve", subject="host", value=rate, unit="GB/s", settings=settings))
        sources.append(Source(path=f"measurements.{way}_mpi_curve[{row[1]}]", origin=file, line=number))
    case = Case(measurements=tuple(items), sources=tuple(sources))
    return Parts(
        parts=(Part(case=case),) if items else (), lines=line_count(text), not_understood=len(lines) - understood
    )
