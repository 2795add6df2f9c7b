"""``numactl --hardware``: NUMA nodes with their CPUs, memory and distances."""

from __future__ import annotations

import re

from gpudoctor.model import Case, NumaNode, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "numactl-hardware"
_CPUS = re.compile(r"\s*node (\d{1,12}) cpus:\s*([\d ]*)$")
_SIZE = re.compile(r"\s*node (\d{1,12}) size:\s*(\d{1,12}) MB")
_DISTANCE = re.compile(r"\s*(\d{1,12}):\s+((?:\d+\s*)+)$")
_KNOWN = re.compile(r"\s*(?:available: \d+ nodes|node \d+ free:|node distances:|node(?:\s+\d+)+\s*$|No NUMA)")


def is_kind(text: str) -> bool:
    return re.search(r"^\s*available: \d+ nodes", text, re.MULTILINE) is not None


def read_text(text: str, file: str) -> Parts:
    """The nodes of the machine; sizes are MB of 1024 x 1024 bytes, as numactl counts them."""
    lines = text.splitlines()
    nodes: dict[int, NumaNode] = {}
    sizes: dict[int, int] = {}
    distances: dict[int, tuple[int, ...]] = {}
    sources = []
    understood = 0
    for number, line in enumerate(lines, start=1):
        understood += 1
        if cpus := _CPUS.match(line):
            node = int(cpus[1])
            nodes[node] = NumaNode(node=node, cpus=tuple(sorted({int(cpu) for cpu in cpus[2].split()})))
            sources.append(Source(path=f"numa_nodes[{node}]", origin=file, line=number))
        elif size := _SIZE.match(line):
            sizes[int(size[1])] = int(size[2]) * 1024 * 1024
        elif distance := _DISTANCE.match(line):
            distances[int(distance[1])] = tuple(int(word) for word in distance[2].split())
        elif line.strip() and not _KNOWN.match(line) and "numactl" not in line:
            understood -= 1
    found = tuple(
        NumaNode(
            node=node.node,
            cpus=node.cpus,
            memory_bytes=sizes.get(node.node),
            distances=distances.get(node.node, ()),
        )
        for node in sorted(nodes.values(), key=lambda node: node.node)
    )
    case = Case(numa_nodes=found, sources=tuple(sources))
    return Parts(
        parts=(Part(case=case),) if found else (), lines=line_count(text), not_understood=len(lines) - understood
    )
