"""The machine as a tree of boxes, apart from how it is drawn: NUMA node, host bridge, switches, GPUs and NICs.

With PCI paths (live, or a captured Case) the tree is what the kernel says. A Case read from `nvidia-smi topo -m`
has only classes of pairs: then devices of one NUMA node are grouped by PHB, PXB and PIX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpudoctor.model import Case, Finding, Gpu, Nic, Pair, PathClass
from gpudoctor.model.facts import Drive
from gpudoctor.report.text import ranges, size

Kind = Literal["numa", "host-bridge", "port", "switch", "group", "gpu", "nic", "drive"]
Device = Gpu | Nic | Drive
CLASS_RANK: dict[PathClass, int] = {"X": 0, "PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}
_GROUPS: tuple[tuple[PathClass, str], ...] = (
    ("PHB", "one host bridge (PHB)"),
    ("PXB", "several PCIe switches (PXB)"),
    ("PIX", "one PCIe switch (PIX)"),
)


@dataclass(slots=True)
class Box:
    """One line of the tree. `details` are raw strings from the Case: whoever draws them makes them printable."""

    kind: Kind
    title: str
    details: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    lost: bool = False
    children: list[Box] = field(default_factory=list)
    key: str = ""


def tree(case: Case, findings: Sequence[Finding] = ()) -> list[Box]:
    """The boxes of a machine, NUMA nodes first to last; devices of unknown locality come last."""
    homes: dict[tuple[int, ...], list[Device]] = {}
    for gpu in case.gpus:
        homes.setdefault(_gpu_home(case, gpu), []).append(gpu)
    for nic in case.nics:
        homes.setdefault(_nic_home(case, nic), []).append(nic)
    for drive in case.drives:
        homes.setdefault(_drive_home(drive, homes), []).append(drive)
    roots: list[Box] = []
    for home in sorted(homes, key=lambda nodes: (len(nodes) != 1, nodes)):
        box = _numa_box(case, home)
        place = _by_path if any(item.root for item in homes[home]) else _by_class
        box.children = place(case, homes[home], findings)
        roots.append(box)
    return roots


def _gpu_home(case: Case, gpu: Gpu) -> tuple[int, ...]:
    """The node of a GPU; the one with CPUs where its affinity also lists nodes that are GPU memory (Grace)."""
    if gpu.numa_node is not None:
        return (gpu.numa_node,)
    nodes = tuple(sorted(gpu.numa_nodes))
    with_cpus = {node.node for node in case.numa_nodes if node.cpus}
    near = [node for node in nodes if node in with_cpus]
    if gpu.memory_node is not None and nodes and not near:
        near = list(nodes[:1])  # the nodes of the CPUs come before those of the memories
    return (near[0],) if len(near) == 1 else nodes


def _nic_home(case: Case, nic: Nic) -> tuple[int, ...]:
    if nic.numa_node is not None:
        return (nic.numa_node,)
    near = [gpu for gpu in case.gpus if (nic.root and nic.root == gpu.root) or _rank(case, _key(gpu), _key(nic)) <= 4]
    if not near and len(case.numa_nodes) == 1:
        return (case.numa_nodes[0].node,)
    return _gpu_home(case, near[0]) if near else ()


def _drive_home(drive: Drive, homes: dict[tuple[int, ...], list[Device]]) -> tuple[int, ...]:
    """Its node; unknown, that of what hangs on the same host bridge, or the only place that there is."""
    if drive.numa_node is not None:
        return (drive.numa_node,)
    same = [home for home, items in homes.items() if any(item.root and item.root == drive.root for item in items)]
    return same[0] if same else next(iter(homes)) if len(homes) == 1 else ()


def _numa_box(case: Case, home: tuple[int, ...]) -> Box:
    if len(home) != 1:
        title = f"NUMA nodes {ranges(home)}: locality unknown" if home else "NUMA node unknown"
        return Box(kind="numa", title=title)
    details = []
    node = next((node for node in case.numa_nodes if node.node == home[0]), None)
    cpus = node.cpus if node is not None else ()
    if not cpus:
        cpus = tuple(sorted({cpu for gpu in case.gpus if _gpu_home(case, gpu) == home for cpu in gpu.local_cpus or ()}))
    if cpus:
        details.append(f"CPUs {ranges(cpus)}")
    if node is not None and node.memory_bytes:
        details.append(size(node.memory_bytes))
    return Box(kind="numa", title=f"NUMA node {home[0]}", details=details)


def _key(item: Device) -> str:
    if isinstance(item, Gpu):
        return f"gpu:{item.index}"
    return f"nic:{item.name}" if isinstance(item, Nic) else f"drive:{item.name}"


def _by_path(case: Case, items: Sequence[Device], findings: Sequence[Finding]) -> list[Box]:
    """Host bridge, then switches. A root port that leads to one device stands in the line of that device."""
    top: list[Box] = []
    for item in items:
        level = top
        if item.root:
            level = _step(level, item.root, "host-bridge", f"host bridge {item.root}", ())
        if isinstance(item, Gpu):
            for hop in reversed(item.pcie_path):
                if hop.kind in ("switch-up", "bridge"):
                    name = "switch" if hop.kind == "switch-up" else "bridge"
                    link = hop.link
                    uplink = (f"uplink {link_text(link.generation, link.width)}",) if link and link.width else ()
                    level = _step(level, hop.bdf, "switch", f"{name} {hop.bdf}", uplink)
        level.append(_device(case, item, findings))
    return top


def _step(level: list[Box], key: str, kind: Kind, title: str, details: Iterable[str]) -> list[Box]:
    for box in level:
        if box.key == key:
            return box.children
    box = Box(kind=kind, title=title, details=list(details), key=key)
    level.append(box)
    return box.children


def _by_class(case: Case, items: Sequence[Device], findings: Sequence[Finding]) -> list[Box]:
    boxes = {_key(item): _device(case, item, findings) for item in items}
    for box in boxes.values():  # the group says it already
        box.details = [detail for detail in box.details if not detail.startswith("PIX to ")]
    return _cluster(list(boxes), 0, lambda a, b: _rank(case, a, b), boxes)


def _cluster(keys: Sequence[str], level: int, rank: Callable[[str, str], int], boxes: dict[str, Box]) -> list[Box]:
    """Devices within reach of a class are one group; a group that a closer class joins wholly is named by that."""
    if level == len(_GROUPS):
        return [boxes[key] for key in keys]
    path, title = _GROUPS[level]
    groups: list[list[str]] = []
    for key in keys:
        near = [group for group in groups if any(rank(key, other) <= CLASS_RANK[path] for other in group)]
        merged = [other for group in near for other in group] + [key]
        groups = [group for group in groups if group not in near] + [merged]
    found: list[Box] = []
    for group in sorted(groups, key=lambda members: keys.index(members[0])):
        inner = _cluster(sorted(group, key=keys.index), level + 1, rank, boxes)
        alone = len(inner) == 1
        found += inner if alone else [Box(kind="group", title=title, children=inner)]
    return found


def _rank(case: Case, a: str, b: str) -> int:
    pair = pair_of(case, a, b)
    return CLASS_RANK[pair.path] if pair is not None and pair.path is not None else 9


def pair_of(case: Case, a: str, b: str) -> Pair | None:
    """The pair of two device keys, in either order."""
    return next((pair for pair in case.pairs if (pair.a, pair.b) in ((a, b), (b, a))), None)


def _device(case: Case, item: Device, findings: Sequence[Finding]) -> Box:
    key = _key(item)
    own = [finding for finding in findings if finding.subject == key]
    if isinstance(item, Nic):
        near = [gpu.index for gpu in case.gpus if _rank(case, _key(gpu), key) == CLASS_RANK["PIX"]]
        details = [
            item.bdf,
            None if item.kind == "unknown" else item.kind,
            f"{item.rate_gb_s * 8:.0f} Gb/s" if item.rate_gb_s else None,
            item.state if item.state and item.state.lower() not in ("active", "up") else None,
            f"PIX to GPU{ranges(near)}" if near else None,
        ]
        return Box(kind="nic", title=f"NIC {item.name}", details=[d for d in details if d], findings=own, key=key)
    if isinstance(item, Drive):
        return Box(kind="drive", title=f"NVMe {item.name}", details=[item.bdf] if item.bdf else [], key=key)
    same = len({gpu.name for gpu in case.gpus if gpu.name}) <= 1
    details = [item.bdf, None if same else (item.name or "").removeprefix("NVIDIA ") or None, gpu_link_text(item)]
    if item.mig:
        details.append("MIG on")
    if item.cuda_index is not None and item.cuda_index != item.index:
        details.append(f"CUDA {item.cuda_index}")
    box = Box(kind="gpu", title=f"GPU{item.index}", details=[d for d in details if d], findings=own, key=key)
    if item.lost:
        box.lost = True
        box.details.append("LOST" + (f": {item.lost_reason}" if item.lost_reason else ": does not answer"))
    return box


def link_text(generation: int | None, width: int | None) -> str:
    """4.0 x16; parts that are not known are left out."""
    return " ".join(part for part in (f"{generation}.0" if generation else "", f"x{width}" if width else "") if part)


def gpu_link_text(gpu: Gpu) -> str | None:
    """The link now, and what card and port allow where that is more. A slow idle link is healthy and says so."""
    link = gpu.pcie
    if link is None:
        return None
    now = link_text(link.generation, link.width)
    best_generation = min((g for g in (link.max_generation, link.port_max_generation) if g), default=None)
    best_width = min((w for w in (link.max_width, link.port_max_width) if w), default=None)
    best = link_text(best_generation, best_width)
    if not now:
        return f"PCIe up to {best}" if best else None
    below = (link.generation or 0) < (best_generation or 0) or (link.width or 0) < (best_width or 0)
    idle = " idle" if link.state == "idle" and (link.generation or 0) < (best_generation or 0) else ""
    return f"PCIe {now}{idle}" + (f", {best} possible" if below else "")
