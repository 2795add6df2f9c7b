"""What one text tells of one machine, and how several such parts become one Case.

Parts are joined on bus address or UUID. Where a text knows GPUs by number only, the number counts as far as it can:
nvidia-smi's order is the order of bus addresses; CUDA's order is another one, and stands for it only where all GPUs are
of one model. Parts that contradict each other stay apart: they come from different machines or moments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from gpudoctor.model import Case, Gap, Gpu, Host, Limits, Measurement, NumaNode, Pair, PcieHop, Software, gpu_key

Order = Literal["smi", "bus", "cuda"]
_EMPTY: tuple[object, ...] = (None, (), {}, "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One machine as one text shows it.

    order: whose numbers the GPUs carry: nvidia-smi's; places in a list in bus order ("bus"); CUDA's. complete: the text
    lists every GPU of the machine. matrix: it comes from matrices that were compared with each other already.
    """

    case: Case
    order: Order = "smi"
    complete: bool = True
    matrix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that one text shows, and how much of it was understood."""

    parts: tuple[Part, ...]
    lines: int
    not_understood: int = 0
    truncated: bool = False


def line_count(text: str) -> int:
    return text.count("\n") + (not text.endswith("\n"))


def merge_parts(parts: Sequence[Part]) -> list[Case]:
    """One Case for each machine, in the order in which their first parts came."""
    machines: list[Part] = []
    # Numbers of nvidia-smi stand as they are; other orders are translated to them where both are there.
    for part in sorted(parts, key=lambda part: part.order == "cuda"):
        for place, known in enumerate(machines):
            joined = _join(known, part)
            if joined is not None:
                machines[place] = joined
                break
        else:
            machines.append(part)
    return [replace(part.case, gaps=_left(part.case)) for part in machines]


def _join(one: Part, other: Part) -> Part | None:
    """Both as one machine, or None when they contradict each other."""
    a, b = one.case, other.case
    if one.matrix and other.matrix:
        return None
    if _differ(a.host.hostname, b.host.hostname) or _differ(a.host.os, b.host.os):
        return None
    places = _places(one, other)
    if places is None:
        return None
    b = _renumbered(b, places, other.order)
    gpus = {gpu.index: gpu for gpu in a.gpus}
    for gpu in b.gpus:
        known = gpus.get(gpu.index)
        if known is None:
            gpus[gpu.index] = gpu
            continue
        merged = _filled(known, gpu)
        if merged is None:
            return None
        gpus[gpu.index] = merged
    pairs = _pairs(a.pairs, b.pairs)
    measurements = _measurements(a.measurements, b.measurements)
    host, software, limits = (_filled(getattr(a, name), getattr(b, name)) for name in ("host", "software", "limits"))
    nodes = _nodes(a.numa_nodes, b.numa_nodes)
    if pairs is None or measurements is None or nodes is None or None in (host, software, limits):
        return None
    if _differ(a.nics or None, b.nics or None) or any(
        _same_bridge(first, second) for first in a.acs for second in b.acs
    ):
        return None
    case = replace(
        a,
        host=host,
        software=software,
        limits=limits,
        gpus=tuple(gpus[index] for index in sorted(gpus)),
        pairs=pairs,
        numa_nodes=nodes,
        nics=a.nics or b.nics,
        acs=(*a.acs, *b.acs),
        measurements=measurements,
        loader=a.loader or b.loader,
        gaps=(*a.gaps, *b.gaps),
        sources=(*a.sources, *b.sources),
        conflicts=(*a.conflicts, *b.conflicts),
    )
    order = one.order if a.gpus else other.order
    complete = one.complete if a.gpus else other.complete
    return Part(case=case, order=order, complete=complete, matrix=one.matrix or other.matrix)


def _same_bridge(first: Any, second: Any) -> bool:
    return first.bdf is not None and first.bdf == second.bdf and set(first.on) != set(second.on)


def _places(one: Part, other: Part) -> dict[int, int] | None:
    """The number in `one` of each GPU of `other`; None when the two cannot be the same machine."""
    mine, theirs = one.case.gpus, other.case.gpus
    if not mine or not theirs:
        return {gpu.index: gpu.index for gpu in theirs}
    by_name = {gpu.bdf: gpu.index for gpu in mine if gpu.bdf} | {gpu.uuid: gpu.index for gpu in mine if gpu.uuid}
    places: dict[int, int] = {}
    by_number = []
    for gpu in theirs:
        found = [by_name[key] for key in (gpu.bdf, gpu.uuid) if key in by_name]
        if found:
            places[gpu.index] = found[0]
        else:
            by_number.append(gpu)
    if by_number and not _numbers_count(one, other):
        return None
    known = {gpu.index: gpu for gpu in mine}
    for gpu in by_number:
        match = known.get(gpu.index)
        if match is None and one.complete:
            return None
        if match and (_differ(match.bdf, gpu.bdf) or _differ(match.uuid, gpu.uuid)):
            return None
        if gpu.index in places.values():
            return None
        places[gpu.index] = gpu.index
    return places


def _numbers_count(one: Part, other: Part) -> bool:
    """Whether GPU 1 of one text is GPU 1 of the other."""
    same_count = len(one.case.gpus) == len(other.case.gpus)
    if "cuda" in (one.order, other.order) and one.order != other.order:
        names = {_plain(gpu.name) for part in (one, other) for gpu in part.case.gpus if gpu.name}
        return len(names) <= 1 and (same_count or not other.complete)
    if "bus" in (one.order, other.order):
        return same_count
    return same_count or not (one.complete and other.complete)


def _plain(name: str | None) -> str | None:
    return None if name is None else re.sub(r"^NVIDIA\s+", "", name).strip().lower()


def _renumbered(case: Case, places: dict[int, int], order: Order) -> Case:
    def key(text: str) -> str:
        return re.sub(r"gpu:(\d+)", lambda found: f"gpu:{places.get(int(found[1]), int(found[1]))}", text)

    moved = any(old != new for old, new in places.items())
    gpus = tuple(
        replace(
            gpu,
            index=places.get(gpu.index, gpu.index),
            cuda_index=gpu.index if order == "cuda" and gpu.bdf else gpu.cuda_index,
        )
        for gpu in case.gpus
    )
    if not moved:
        return replace(case, gpus=gpus)
    pairs = []
    for pair in case.pairs:
        a, b = sorted((key(pair.a), key(pair.b)), key=lambda name: (not name.startswith("gpu:"), _number(name), name))
        pairs.append(replace(pair, a=a, b=b))
    measurements = tuple(replace(item, subject=key(item.subject)) for item in case.measurements)
    sources = tuple(replace(source, path=key(source.path)) for source in case.sources)
    return replace(case, gpus=gpus, pairs=tuple(pairs), measurements=measurements, sources=sources)


def _number(name: str) -> int:
    return int(name.rpartition(":")[2]) if name.startswith("gpu:") else 0


def _differ(one: object, other: object) -> bool:
    return one is not None and other is not None and one != other


def _filled(one: Any, other: Any) -> Any:
    """The dataclass with what it lacks taken from the other; None when two known values differ."""
    changes = {}
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if theirs in _EMPTY or theirs is False or mine == theirs:
            continue
        if mine in _EMPTY or mine is False:
            changes[field.name] = theirs
        elif field.name == "pcie":
            merged = _filled(mine, theirs)
            if merged is None:
                return None
            changes["pcie"] = merged
        elif field.name == "pcie_path" and mine[0].bdf == theirs[0].bdf:
            changes["pcie_path"] = _longer(mine, theirs)
        elif field.name == "name" and _plain(mine) == _plain(theirs):
            continue
        elif field.name in ("state", "throttle_state", "memory_bytes", "memory_used_bytes"):
            continue  # readings of one moment, and totals that grow on virtual machines
        else:
            return None
    return replace(one, **changes) if changes else one


def _longer(one: tuple[PcieHop, ...], other: tuple[PcieHop, ...]) -> tuple[PcieHop, ...]:
    """Two ways up from one GPU: the longer one, each hop with its link from whichever text has it."""
    links = {hop.bdf: hop.link for hop in (*one, *other) if hop.link is not None}
    longer = one if len(one) >= len(other) else other
    return tuple(replace(hop, link=hop.link or links.get(hop.bdf)) for hop in longer)


def _pairs(one: Sequence[Pair], other: Sequence[Pair]) -> tuple[Pair, ...] | None:
    known = {(pair.a, pair.b): pair for pair in one}
    for pair in other:
        mine = known.get((pair.a, pair.b))
        merged = pair if mine is None else _filled(mine, pair)
        if merged is None:
            return None
        known[pair.a, pair.b] = merged
    return tuple(known.values())


def _nodes(one: Sequence[NumaNode], other: Sequence[NumaNode]) -> tuple[NumaNode, ...] | None:
    if one and other and [(node.node, node.cpus) for node in one] != [(node.node, node.cpus) for node in other]:
        return None
    return tuple(one or other)


def _measurements(one: Sequence[Measurement], other: Sequence[Measurement]) -> tuple[Measurement, ...] | None:
    """None when both hold the same figure with another value: two runs, before and after perhaps."""
    seen = {_figure(item): item.value for item in one}
    for item in other:
        before = seen.get(_figure(item))
        # Two tools that measured the same agree within a twentieth.
        if before is not None and abs(before - item.value) > 0.05 * max(before, item.value):
            return None
    return (*one, *other)


def _figure(item: Measurement) -> tuple[object, ...]:
    return item.metric, item.subject, item.unit, item.settings.get("node"), item.settings.get("bytes")


def _left(case: Case) -> tuple[Gap, ...]:
    """The gaps that no other part filled, each once."""
    gaps: dict[str, Gap] = {}
    for gap in case.gaps:
        if not _has(case, gap.path):
            gaps.setdefault(gap.path, gap)
    return tuple(gaps.values())


def _has(case: Case, path: str) -> bool:
    match = re.fullmatch(r"(\w+)(?:\[([^\]]*)\])?(?:\.(.+))?", path)
    if match is None or not hasattr(case, match[1]):
        return False
    name, key, rest = match[1], match[2], match[3]
    value: Any = getattr(case, name)
    if key is None:
        empty = {"host": Host(), "software": Software(), "limits": Limits()}.get(name)
        # "gpus" without a key speaks about the rest of them, which another part does not complete.
        return value not in _EMPTY and value != empty and name != "gpus"
    item = next((item for item in value if key in _keys(item)), None)
    for field in rest.split(".") if rest and item is not None else ():
        item = getattr(item, field, None)
    return item not in _EMPTY


def _keys(item: object) -> Iterable[str]:
    if isinstance(item, Gpu):
        return gpu_key(item), str(item.index)
    if isinstance(item, Pair):
        return (f"{item.a},{item.b}",)
    return (str(getattr(item, "name", getattr(item, "node", ""))),)
