"""``bandwidthTest`` of the CUDA samples (removed there in favour of nvbandwidth; its outputs stay common).

Old versions print MB/s, newer ones GB/s; small buffers of 32 MB fit the cache of newer GPUs, so that the copy inside
the device may exceed what its memory can give.
"""

from __future__ import annotations

import re

from gpudoctor.model import Case, Gpu, Measurement, Setting, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "bandwidthTest"
_DEVICE = re.compile(r"\s*Device (\d{1,12}): (.+?)\s*$")
_SECTION = re.compile(r"\s*(Host to Device|Device to Host|Device to Device) Bandwidth, (\d{1,12}) Device")
_MEMORY = re.compile(r"\s*(PINNED|PAGEABLE) Memory Transfers")
_HEADER = re.compile(r"\s*Transfer Size \(Bytes\)\s+Bandwidth\s*\((GB|MB)/s\)")
_ROW = re.compile(r"\s*(\d{1,12})\s+(\d{1,12}(?:\.\d{1,12})?)\s*$")
_CSV = re.compile(
    r"\s*bandwidthTest-(H2D|D2H|D2D)(?:-(Pinned|Paged))?, Bandwidth = (\d{1,12}(?:\.\d{1,12})?) (GB|MB)/s, "
    r"Time = \S+ s, Size = (\d{1,12}) bytes"
)
_NUMACTL = re.compile(r"numactl\b(.*?)\bbandwidthTest")
_NODE = re.compile(r"(?:-m\s*|--membind[= ])(\d{1,12})\b")
_KNOWN = re.compile(
    r"\s*(?:\[CUDA Bandwidth Test\]|Running on|Quick Mode|Range Mode|Shmoo Mode|Result = |NOTE: |\.)|"
    r".*bandwidthTest|.*cudaSetDevice"
)
_METRICS = {
    "Host to Device": "h2d",
    "Device to Host": "d2h",
    "Device to Device": "d2d",
    "H2D": "h2d",
    "D2H": "d2h",
    "D2D": "d2d",
}


def is_kind(text: str) -> bool:
    return re.search(r"\[CUDA Bandwidth Test\]|^\s*bandwidthTest-[HD]2[HD]", text, re.MULTILINE) is not None


def read_text(text: str, file: str) -> Parts:
    """The largest size of each section is the result; a shmoo of sizes ends with it."""
    lines = text.splitlines()
    gpus: dict[int, Gpu] = {}
    index = 0
    section: str | None = None
    pinned, unit = True, "GB"
    found: dict[str, tuple[int, float, int]] = {}  # metric -> size, GB/s, line
    understood = 0
    placed = _NUMACTL.search(text)
    node = _NODE.search(placed[1]) if placed else None
    for number, line in enumerate(lines, start=1):
        understood += 1
        if device := _DEVICE.match(line):
            index = int(device[1])
            gpus[index] = Gpu(index=index, name=device[2])
        elif match := _SECTION.match(line):
            section, pinned = match[1], True
        elif memory := _MEMORY.match(line):
            pinned = memory[1] == "PINNED"
        elif header := _HEADER.match(line):
            unit = header[1]
        elif section and (row := _ROW.match(line)):
            metric = _METRICS[section] + ("" if pinned or section == "Device to Device" else "_pageable")
            _keep(found, metric, int(row[1]), float(row[2]) / (1 if unit == "GB" else 1000), number)
        elif csv := _CSV.match(line):
            metric = _METRICS[csv[1]] + ("_pageable" if csv[2] == "Paged" else "")
            _keep(found, metric, int(csv[5]), float(csv[3]) / (1 if csv[4] == "GB" else 1000), number)
        elif line.strip() and not _KNOWN.match(line):
            understood -= 1
    if found:
        gpus.setdefault(index, Gpu(index=index))
    items, sources = [], []
    for metric, (size, rate, number) in found.items():
        settings: dict[str, Setting] = {"tool": KIND, "bytes": size, "file": file}
        if metric == "d2d":
            rate /= 2  # the test counts what is read and what is written
        elif node and metric in ("h2d", "d2h"):
            # bound by numactl to memory of one node: a figure of that node, not of the link
            metric, settings["node"] = f"{metric}_node", int(node[1])
        items.append(Measurement(metric=metric, subject=f"gpu:{index}", value=rate, unit="GB/s", settings=settings))
        sources.append(Source(path=f"measurements.{metric}[gpu:{index}]", origin=file, line=number))
    case = Case(gpus=tuple(gpus[number] for number in sorted(gpus)), measurements=tuple(items), sources=tuple(sources))
    return Parts(
        parts=(Part(case=case, order="cuda", complete=False),) if gpus else (),
        lines=line_count(text),
        not_understood=len(lines) - understood,
        truncated="Result =" not in text,
    )


def _keep(found: dict[str, tuple[int, float, int]], metric: str, size: int, rate: float, line: int) -> None:
    if metric not in found or size >= found[metric][0]:
        found[metric] = (size, rate, line)
