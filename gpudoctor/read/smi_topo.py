"""``nvidia-smi topo -m``: what lies between GPUs and NICs, and which CPUs and NUMA nodes are near each GPU.

The text knows GPUs by index only. A cell with bonded NVLinks (NV#) hides the PCIe path of that pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpudoctor.model import Case, Conflict, ConflictValue, Gap, GapReason, Gpu, Host, Nic, Pair, PathClass, Source
from gpudoctor.read.cpulist import parse_list
from gpudoctor.read.matrix import Column, Matrix, Row, read_matrices

KIND = "nvidia-smi-topo"
_PATHS: dict[str, PathClass] = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "NODE", "SYS": "SYS"}
_FACTS: dict[Column, str] = {"cpu": "local_cpus", "numa": "numa_nodes", "gpu_numa": "memory_node"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One value of one fact, with the place where it stands."""

    value: str
    origin: str
    line: int


@dataclass(slots=True, kw_only=True)
class Topology:
    """What one or more matrices of one machine say: fact path -> every place that states it."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    columns: set[Column]
    hostname: str | None = None
    windows: bool = False
    truncated: bool = False
    facts: dict[str, list[Seen]] = field(default_factory=dict)

    def value(self, path: str) -> str | None:
        """The value that every place agrees on, else None."""
        values = {seen.value for seen in self.facts.get(path, [])}
        return values.pop() if len(values) == 1 else None

    def conflicts(self, path: str) -> bool:
        return len({seen.value for seen in self.facts.get(path, [])}) > 1


def read_topologies(text: str, file: str) -> tuple[tuple[Topology, ...], int, int]:
    """The machines shown in `text`, its number of lines, and how many of them were not understood."""
    read = read_matrices(text)
    return tuple(_topology(matrix, file) for matrix in read.found), read.lines, read.not_understood


def same_machine(one: Topology, other: Topology) -> bool:
    """Whether two matrices may come from one machine in one state: same devices, and nothing contradicts."""
    if one.gpus != other.gpus or (one.nics and other.nics and one.nics != other.nics):
        return False
    if one.hostname and other.hostname and one.hostname != other.hostname:
        return False
    shared = one.facts.keys() & other.facts.keys()
    return all(one.value(path) == other.value(path) is not None for path in shared)


def merge(one: Topology, other: Topology) -> Topology:
    """Both together; only for topologies of the same machine."""
    facts = {path: list(seen) for path, seen in one.facts.items()}
    for path, seen in other.facts.items():
        facts.setdefault(path, []).extend(seen)
    return Topology(
        gpus=one.gpus,
        nics=one.nics or other.nics,
        columns=one.columns | other.columns,
        hostname=one.hostname or other.hostname,
        windows=one.windows or other.windows,
        truncated=one.truncated and other.truncated,
        facts=facts,
    )


def _topology(matrix: Matrix, file: str) -> Topology:
    nics = tuple(label for label in matrix.labels if not label.startswith("GPU"))
    names = [matrix.nic_names.get(label, label) for label in nics]
    if len(set(names)) < len(names):
        names = list(nics)  # a legend that names two NICs alike cannot be used
    topology = Topology(
        gpus=tuple(sorted((label for label in matrix.labels if label.startswith("GPU")), key=_number)),
        nics=tuple(names),
        columns=set(matrix.columns),
        hostname=matrix.hostname,
        windows=matrix.windows,
        truncated=matrix.truncated,
    )
    keys = {label: _gpu_key(label) for label in topology.gpus} | {
        label: f"nic:{name}" for label, name in zip(nics, names, strict=True)
    }
    order = {
        key: place for place, key in enumerate([*map(_gpu_key, topology.gpus), *(f"nic:{name}" for name in names)])
    }
    uncertain: list[tuple[str, Seen]] = []
    for row in matrix.rows:
        for place, cell in enumerate(row.cells):
            label = matrix.labels[place]
            if cell is None or label == row.label:
                continue
            a, b = sorted((keys[row.label], keys[label]), key=order.__getitem__)
            seen = Seen(value=cell, origin=file, line=row.line)
            if place == row.uncertain_cell and cell.startswith("NV"):
                uncertain.append((_pair_path(a, b), seen))  # NV1 may be the beginning of NV18
            else:
                topology.facts.setdefault(_pair_path(a, b), []).append(seen)
        _note_tail(topology, row, file)
    for path, seen in uncertain:
        if topology.value(path) == seen.value:
            topology.facts[path].append(seen)
    return topology


def _note_tail(topology: Topology, row: Row, file: str) -> None:
    for column, text in row.tail.items():
        if column == row.uncertain_column and not _is_whole(topology, column, text):
            continue
        valid = parse_list(text) is not None or (text == "" and column == "cpu") or text == "N/A"
        if valid and not (column == "gpu_numa" and re.fullmatch(r"\d+|N/A", text) is None):
            path = f"gpus[{_number(row.label)}].{_FACTS[column]}"
            topology.facts.setdefault(path, []).append(Seen(value=text, origin=file, line=row.line))


def _is_whole(topology: Topology, column: Column, text: str) -> bool:
    """Whether a cell at the very end of cut text can be trusted: "N/A", or as many CPUs as another GPU has."""
    numbers = parse_list(text)
    if numbers is None or column != "cpu" or len(numbers) < 2:
        return text == "N/A"
    paths = (f"gpus[{_number(gpu)}].local_cpus" for gpu in topology.gpus)
    return any(len(numbers) == len(parse_list(topology.value(path) or "") or ()) for path in paths)


def build_case(topology: Topology) -> Case:
    """The Case that a topology describes. What it does not show is a Gap."""
    gaps: list[Gap] = []
    used: list[tuple[str, str]] = []  # fact path of the Case, path here
    gpus = tuple(_gpu(topology, label, gaps, used) for label in topology.gpus)
    nics = []
    for name in topology.nics:
        nics.append(Nic(name=name))
        if re.fullmatch(r"NIC\d+", name):
            gaps.append(Gap(path=f"nics[{name}].name", reason="truncated", detail="the NIC legend is not shown"))
    keys = [*map(_gpu_key, topology.gpus), *(f"nic:{nic.name}" for nic in nics)]
    pairs = [_pair(topology, a, b, gaps, used) for number, a in enumerate(keys) for b in keys[number + 1 :]]
    return Case(
        host=Host(hostname=topology.hostname, os=_os(topology)),
        gpus=gpus,
        pairs=tuple(pair for pair in pairs if pair is not None),
        nics=tuple(nics),
        gaps=(*gaps, *_general_gaps(topology)),
        sources=tuple(
            Source(path=fact, origin=seen.origin, line=seen.line)
            for fact, path in used
            for seen in topology.facts[path][:1]
        ),
        conflicts=tuple(_conflicts(topology)),
    )


def _gpu(topology: Topology, label: str, gaps: list[Gap], used: list[tuple[str, str]]) -> Gpu:
    index = _number(label)
    values: dict[Column, str | None] = {}
    for column, fact in _FACTS.items():
        path = f"gpus[{index}].{fact}"
        value = topology.value(path)
        if value == "N/A":
            gaps.append(Gap(path=path, reason="not supported", detail="N/A"))
            value = None
        elif value == "" and not _is_linux(topology):
            detail = "printed empty; without a sign of Linux that says nothing, Windows always prints it so"
            gaps.append(Gap(path=path, reason="not supported", detail=detail))
            value = None
        elif value is None:
            gaps.append(_missing(topology, path, shown=column in topology.columns))
        else:
            used.append((path, path))
        values[column] = value
    nodes = parse_list(values["numa"] or "") or ()
    if len(nodes) == 1:
        used.append((f"gpus[{index}].numa_node", f"gpus[{index}].numa_nodes"))
    elif nodes:
        detail = f"NUMA affinity {values['numa']}: more than one node"
        gaps.append(Gap(path=f"gpus[{index}].numa_node", reason="not supported", detail=detail))
    else:
        nodes_gap = next(gap for gap in reversed(gaps) if gap.path == f"gpus[{index}].numa_nodes")
        gaps.append(Gap(path=f"gpus[{index}].numa_node", reason=nodes_gap.reason, detail=nodes_gap.detail))
    cpus = values["cpu"]
    return Gpu(
        index=index,
        numa_node=nodes[0] if len(nodes) == 1 else None,
        numa_nodes=nodes,
        memory_node=int(values["gpu_numa"]) if values["gpu_numa"] else None,
        local_cpus=None if cpus is None else parse_list(cpus) or (),
    )


def _pair(topology: Topology, a: str, b: str, gaps: list[Gap], used: list[tuple[str, str]]) -> Pair | None:
    path = _pair_path(a, b)
    value = topology.value(path)
    if value is None:
        gaps.append(_missing(topology, path, shown=True))
        return Pair(a=a, b=b) if topology.conflicts(path) else None
    if value.startswith("NV"):
        nvlinks = int(value[2:])
        used.append((f"pairs[{a},{b}].nvlinks", path))
        gaps.append(
            Gap(path=path, reason="not in this artifact", detail=f"{value} is printed in place of the PCIe path")
        )
        return Pair(a=a, b=b, nvlinks=nvlinks)
    used.append((path, path))
    return Pair(a=a, b=b, path=_PATHS[value])


def _missing(topology: Topology, path: str, *, shown: bool) -> Gap:
    if topology.conflicts(path):
        return Gap(path=path, reason="not supported", detail="the text contradicts itself")
    reason: GapReason = "truncated" if shown else "not in this artifact"
    return Gap(path=path, reason=reason)


def _general_gaps(topology: Topology) -> Iterable[Gap]:
    if topology.truncated:
        yield Gap(path="gpus", reason="truncated", detail="the text shows only a part of the matrix")
    for path in ("host", "gpus", "pairs", "nics", "numa_nodes", "software", "limits", "watched", "measurements"):
        yield Gap(path=path, reason="not in this artifact", detail="not a part of nvidia-smi topo -m")


def _conflicts(topology: Topology) -> Iterable[Conflict]:
    for path in topology.facts:
        if topology.conflicts(path):
            values = tuple(
                ConflictValue(value=seen.value, origin=seen.origin, line=seen.line) for seen in topology.facts[path]
            )
            yield Conflict(path=path, values=values)


def _is_linux(topology: Topology) -> bool:
    """Windows prints no affinity at all, so any non-empty one is a sign of Linux; so are RDMA device names."""
    if topology.windows:
        return False
    tails = [seen.value for path, all_seen in topology.facts.items() if path.startswith("gpus[") for seen in all_seen]
    return any(value not in ("", "N/A") for value in tails) or any(
        not re.fullmatch(r"NIC\d+", nic) for nic in topology.nics
    )


def _os(topology: Topology) -> str | None:
    if topology.windows:
        return "windows"
    return "linux" if _is_linux(topology) else None


def _pair_path(a: str, b: str) -> str:
    return f"pairs[{a},{b}].path"


def _gpu_key(label: str) -> str:
    return f"gpu:{_number(label)}"


def _number(label: str) -> int:
    return int(label[3:])
