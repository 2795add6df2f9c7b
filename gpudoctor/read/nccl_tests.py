"""The tables of nccl-tests (``all_reduce_perf`` and its siblings), old and new, with NCCL's own lines in between.

The result is the bus bandwidth at the largest size. "Avg bus bandwidth" averages over all sizes of a sweep and says
nothing about the machine.
"""

from __future__ import annotations

import re

from gpudoctor.model import Case, Gpu, Measurement, Setting, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "nccl-tests"
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,6})\s+(?:Group\s+\d{1,6}\s+)?Pid\s+\d{1,12} on\s+(\S+) "
    r"device\s+(\d{1,4}) \[(0x[0-9a-fA-F]{1,4})\] (.+?)\s*$"
)
_HEADER = re.compile(r"#\s+size\s+count\s+type\b.*\bbusbw\b")
_ROW = re.compile(
    r"\s*(\d{1,12})\s+(\d{1,12})\s+(\w+)\s+(?:(\w+)\s+)?(?:(-?\d{1,12})\s+)?(\d{1,12}(?:\.\d{1,12})?)\s+(\d{1,12}(?:\.\d{1,12})?)\s+(\d{1,12}(?:\.\d{1,12})?)\s+(\S+)"
    r"(?:\s+(\d{1,12}(?:\.\d{1,12})?)\s+(\d{1,12}(?:\.\d{1,12})?)\s+(\d{1,12}(?:\.\d{1,12})?)\s+(\S+))?\s*$"
)
_KNOWN = re.compile(r"#|\s*NCCL version|.*NCCL INFO")
_COLLECTIVES = r"(all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|broadcast|reduce|sendrecv)"
_PROGRAM = re.compile(rf"\b{_COLLECTIVES}_perf\b", re.IGNORECASE)
_FILE = re.compile(_COLLECTIVES, re.IGNORECASE)
_NAMES = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
}
_LEAST_BYTES = 32 << 20  # of a result: below, the latency is measured


def is_kind(text: str) -> bool:
    return any(_HEADER.match(line) for line in text.splitlines())


def read_text(text: str, file: str) -> Parts:
    lines = text.splitlines()
    ranks: dict[int, tuple[str, int, str]] = {}
    rows: list[tuple[int, float, float, int]] = []  # size, algbw, busbw, line
    reduces = False
    understood = 0
    for number, line in enumerate(lines, start=1):
        understood += 1
        if rank := _RANK.match(line):
            ranks[int(rank[1])] = (rank[2], int(rank[3]), rank[5])
        elif (row := _ROW.match(line)) and row[3] != "INFO":
            out, inside = float(row[8]), float(row[12]) if row[12] else 0.0
            rows.append((int(row[1]), max(float(row[7]), float(row[11] or 0)), max(out, inside), number))
            reduces |= row[4] in ("sum", "prod", "max", "min", "avg")
        elif line.strip() and not _KNOWN.match(line):
            understood -= 1
    hosts = sorted({host for host, _, _ in ranks.values()})
    models = {model for _, _, model in ranks.values()}
    name = _collective(text, file, len(ranks), rows, reduces=reduces)
    items, sources = [], []
    settings: dict[str, Setting] = {
        "tool": KIND,
        "ranks": len(ranks) or None,
        "nodes": len(hosts) or None,
        "gpu": models.pop() if len(models) == 1 else None,
        "file": file,
    }
    for size, _, rate, number in rows:
        curve = Measurement(
            metric=f"{name}.busbw_curve", subject="host", value=rate, unit="GB/s", settings={**settings, "bytes": size}
        )
        items.append(curve)
        sources.append(Source(path=f"measurements.{name}.busbw_curve[{size}]", origin=file, line=number))
    large = [row for row in rows if row[0] >= _LEAST_BYTES]
    if large:
        size, _, rate, number = max(large)
        items.append(
            Measurement(
                metric=f"{name}.busbw", subject="host", value=rate, unit="GB/s", settings={**settings, "bytes": size}
            )
        )
        sources.append(Source(path=f"measurements.{name}.busbw", origin=file, line=number))
    local = [(device, model) for host, device, model in ranks.values() if host == (hosts[0] if hosts else "")]
    gpus = tuple(Gpu(index=device, name=model) for device, model in sorted(set(local)))
    if len(hosts) > 1:
        gpus = ()  # GPUs of several hosts are no list of one machine
    case = Case(gpus=gpus, measurements=tuple(items), sources=tuple(sources))
    return Parts(
        parts=(Part(case=case, order="cuda", complete=False),) if items else (),
        lines=line_count(text),
        not_understood=len(lines) - understood,
        truncated="Avg bus bandwidth" not in text,
    )


def _collective(text: str, file: str, ranks: int, rows: list[tuple[int, float, float, int]], *, reduces: bool) -> str:
    """By the name of the program; else by the factor between the two rates, which differs between collectives."""
    for found in (_PROGRAM.search(text), _FILE.search(re.sub(r".*/", "", file))):
        if found:
            plain = found[1].lower().replace("_", "")
            return _NAMES.get(plain, plain)
    factors = [rate / algorithm for _, algorithm, rate, _ in rows if algorithm > 1]
    if ranks > 2 and factors and abs(factors[-1] - 2 * (ranks - 1) / ranks) < 0.02:
        return "all_reduce"
    return "reduction" if reduces else "collective"
