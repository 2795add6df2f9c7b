"""The picture of a machine: boxes in boxes, links with what they do and could do, measured rates, numbered faults."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gpudoctor.estimate.link import pcie_gb_s
from gpudoctor.model import Case, Finding, Gpu, Pair, PcieLink, severity_rank
from gpudoctor.report.draw import Drawing, Line, Picture, Tone, lay_out
from gpudoctor.report.human import WORDS
from gpudoctor.report.text import Style, number, ranges
from gpudoctor.report.topo_layout import Box, gpu_link_text, link_text, tree

TONES: dict[str, Tone] = {"critical": "bad", "error": "bad", "warning": "warn", "info": "ask", "unknown": "ask"}


def picture(case: Case, style: Style, findings: Sequence[Finding], *, width: int) -> Picture:
    """The machine laid out in `width` cells; empty for a Case without devices."""
    marks = _Marks(case, findings)
    boxes = [_drawing(case, box, style, marks) for box in tree(case, findings)]
    fabric = _fabric(case)
    if fabric is not None:
        boxes.append(fabric)
    return lay_out(boxes, width)


class _Marks:
    """Which findings, numbered as they are listed, concern which device."""

    def __init__(self, case: Case, findings: Sequence[Finding]) -> None:
        self.of: dict[str, list[tuple[int, Finding]]] = {}
        keys = {f"gpu:{gpu.index}" for gpu in case.gpus} | {f"nic:{nic.name}" for nic in case.nics}
        for place, finding in enumerate(findings, start=1):
            if finding.severity == "info":
                continue  # in the list below the picture, but no fault of a device
            for key in keys & set(_parts(finding.subject)):
                self.of.setdefault(key, []).append((place, finding))

    def lines(self, key: str) -> list[Line]:
        found = self.of.get(key, [])
        return [
            Line(
                f"[{place}] {WORDS[finding.severity][0]} {finding.rule}{_partner(finding.subject, key)}",
                TONES[finding.severity],
            )
            for place, finding in found
        ]

    def tone(self, key: str) -> Tone:
        worst = max((severity_rank(finding.severity) for _, finding in self.of.get(key, [])), default=0)
        return "bad" if worst >= severity_rank("error") else "warn" if worst == severity_rank("warning") else "plain"


def _parts(subject: str) -> list[str]:
    return re.split(r"-(?=(?:gpu|nic):)", subject)


def _partner(subject: str, key: str) -> str:
    others = [part for part in _parts(subject) if part != key]
    return f" with {others[0].replace('gpu:', 'GPU').removeprefix('nic:')}" if others else ""


def _drawing(case: Case, box: Box, style: Style, marks: _Marks) -> Drawing:
    title = style.text(box.title)
    children = [_drawing(case, child, style, marks) for child in box.children]
    if box.kind == "gpu":
        gpu = next(gpu for gpu in case.gpus if f"gpu:{gpu.index}" == box.key)
        lines = [Line(style.text(line.text), line.tone) for line in _gpu_lines(case, gpu)]
        tone: Tone = "bad" if gpu.lost else marks.tone(box.key)
        return Drawing(title, [*lines, *marks.lines(box.key)], kind="gpu", tone=tone)
    details = [style.text(detail) for detail in box.details]
    if box.kind in ("nic", "drive"):
        name = title.split(" ", 1)
        lines = [Line(detail, "dim" if index == 0 else "plain") for index, detail in enumerate(details)]
        return Drawing(" ".join(name), [*lines, *marks.lines(box.key)], kind="nic", tone=marks.tone(box.key))
    if box.kind == "switch":
        label, label_tone = _uplink(case, box)
        redirects = box.key in {acs.bdf for acs in case.acs if {"ReqRedir", "CmpltRedir"} & set(acs.on)}
        lines = [Line("ACS redirects peer traffic", "warn")] if redirects else []
        return Drawing(title, lines, children, kind="switch", label=label, label_tone=label_tone)
    if box.kind == "numa" and not children:
        return Drawing(title, [Line(detail, "dim") for detail in details], kind="numa")
    return Drawing(title, [Line("  ".join(details), "dim")] if details else [], children, kind=box.kind)


def _gpu_lines(case: Case, gpu: Gpu) -> list[Line]:
    lines = []
    if len({other.name for other in case.gpus if other.name}) > 1 and gpu.name:
        lines.append(Line(gpu.name.removeprefix("NVIDIA "), "strong"))
    if gpu.bdf:
        lines.append(Line(gpu.bdf, "dim"))
    if gpu.cuda_index is not None and gpu.cuda_index != gpu.index:
        lines.append(Line(f"CUDA calls it {gpu.cuda_index}", "ask"))
    if gpu.lost:
        lines.append(Line(f"LOST: {gpu.lost_reason or 'does not answer'}", "bad"))
        return lines
    link = gpu_link_text(gpu)
    if link:
        lines.append(Line(link, "warn" if _below(gpu) else "plain"))
    if limit := _limited_by(gpu):
        lines.append(Line(f"limited by {limit}", "ask"))
    rates = {
        item.metric: item.value
        for item in case.measurements
        if item.subject == f"gpu:{gpu.index}" and item.metric in ("h2d", "d2h") and item.verdict != "rejected"
    }
    if rates:
        words = [
            f"{name} {number(rates[metric])}" for metric, name in (("h2d", "H2D"), ("d2h", "D2H")) if metric in rates
        ]
        lines.append(Line(f"{'  '.join(words)} GB/s", "good" if not _slow(case, gpu) else "warn"))
    if gpu.mig:
        lines.append(Line("MIG on", "ask"))
    return lines


def _slow(case: Case, gpu: Gpu) -> bool:
    return any(
        item.subject == f"gpu:{gpu.index}" and item.metric in ("h2d", "d2h") and item.verdict in ("low", "bad")
        for item in case.measurements
    )


def _below(gpu: Gpu) -> bool:
    """Whether the link does less than it could; a slow idle link is healthy."""
    link = gpu.pcie
    if link is None:
        return False
    widths = [value for value in (link.max_width, link.port_max_width) if value]
    speeds = [value for value in (link.max_generation, link.port_max_generation) if value]
    narrow = bool(link.width and widths and link.width < min(widths))
    slow = bool(link.generation and speeds and link.generation < min(speeds))
    return narrow or (slow and link.state == "load")


def _limited_by(gpu: Gpu) -> str | None:
    """Who keeps the link below what the card can do: its slot, or a port further up."""
    link = gpu.pcie
    if link is None:
        return None
    own = _rate(link.max_generation, link.max_width)
    slot = _rate(
        min((v for v in (link.max_generation, link.port_max_generation) if v), default=None),
        min((v for v in (link.max_width, link.port_max_width) if v), default=None),
    )
    worst: tuple[float, str] | None = None
    for hop in gpu.pcie_path[1:]:
        if hop.kind in ("switch-up", "bridge") and hop.link is not None:
            rate = _best(hop.link)
            if rate is not None and slot is not None and rate < slot and (worst is None or rate < worst[0]):
                worst = (rate, f"{hop.bdf} ({link_text(hop.link.max_generation, hop.link.max_width)})")
    if worst is not None:
        return worst[1]
    if own is not None and slot is not None and slot < own:
        return f"the slot ({link_text(link.port_max_generation, link.port_max_width)})"
    return None


def _best(link: PcieLink) -> float | None:
    return _rate(
        min((v for v in (link.max_generation, link.port_max_generation) if v), default=None),
        min((v for v in (link.max_width, link.port_max_width) if v), default=None),
    )


def _rate(generation: int | None, width: int | None) -> float | None:
    try:
        return pcie_gb_s(generation, width) if generation and width else None
    except ValueError:
        return None


def _uplink(case: Case, box: Box) -> tuple[str, Tone]:
    """The link of a switch upwards: now, and what it could do where that is more."""
    for gpu in case.gpus:
        for hop in gpu.pcie_path:
            if hop.bdf == box.key and hop.link is not None and hop.link.width:
                now = link_text(hop.link.generation, hop.link.width)
                best = link_text(
                    min((v for v in (hop.link.max_generation, hop.link.port_max_generation) if v), default=None),
                    min((v for v in (hop.link.max_width, hop.link.port_max_width) if v), default=None),
                )
                current, most = _rate(hop.link.generation, hop.link.width), _best(hop.link)
                if best and current is not None and most is not None and current < most and hop.link.state == "load":
                    return f"uplink {now} of {best}", "warn"
                return f"uplink {now or best}", "dim"
    return "", "dim"


def _fabric(case: Case) -> Drawing | None:
    """NVLink: one line where every pair has as many links, else the islands and who is joined by how many."""
    gpus = [gpu for gpu in case.gpus if not gpu.lost]
    keys = {f"gpu:{gpu.index}": gpu.index for gpu in case.gpus}
    joined: dict[tuple[int, ...], int | None] = {
        (keys[pair.a], keys[pair.b]): pair.nvlinks
        for pair in case.pairs
        if pair.nvlinks and pair.a in keys and pair.b in keys
    }
    if not joined:
        return None
    counts = sorted({count or 0 for count in joined.values()}, reverse=True)
    if len(joined) == len(gpus) * (len(gpus) - 1) // 2 and len(counts) == 1:
        return Drawing(
            f"NVLink: {counts[0]} links between any two GPUs",
            [Line(f"GPU {ranges([g.index for g in gpus])}")],
            kind="fabric",
            own_row=True,
        )
    lines = [Line("      " + "".join(f"{gpu.index:>5}" for gpu in case.gpus), "dim")]
    for row in case.gpus:
        cells = []
        for column in case.gpus:
            a, b = sorted((row.index, column.index))
            links = joined.get((a, b))
            cells.append(f"{'x' if row is column else f'NV{links}' if links else '.':>5}")
        lines.append(Line(f"GPU{row.index:<3}" + "".join(cells), "bad" if row.lost else "plain"))
    islands = _islands(case, joined)
    title = f"NVLink: {len(islands)} islands" if len(islands) > 1 else "NVLink: not every pair, or by different counts"
    return Drawing(title, lines, kind="fabric", own_row=True)


def _islands(case: Case, joined: Mapping[tuple[int, ...], int | None]) -> list[set[int]]:
    groups: list[set[int]] = []
    for gpu in case.gpus:
        near = [group for group in groups if any(tuple(sorted((gpu.index, other))) in joined for other in group)]
        merged = set().union(*near, {gpu.index})
        groups = [group for group in groups if group not in near] + [merged]
    return [group for group in groups if len(group) > 1]


def footer(case: Case) -> list[Line]:
    """What holds for the whole machine: peer access, IOMMU, ACS, the order of CUDA."""
    lines = []
    words: dict[str | None, list[Pair]] = {}
    gpus = {f"gpu:{gpu.index}" for gpu in case.gpus}
    between = [pair for pair in case.pairs if pair.b in gpus and pair.p2p_read is not None]
    for pair in between:
        words.setdefault(pair.p2p_read, []).append(pair)
    if len(words) == 1 and between:
        (status,) = words
        which = "every pair of those that answer" if any(gpu.lost for gpu in case.gpus) else "every pair"
        lines.append(Line(f"P2P {status} for {which}", "good" if status == "OK" else "warn"))
    else:
        for status, pairs in words.items():
            names = " ".join(f"GPU{pair.a[4:]}-GPU{pair.b[4:]}" for pair in pairs[:12])
            more = f" and {len(pairs) - 12} more" if len(pairs) > 12 else ""
            lines.append(Line(f"P2P {status}: {names}{more}", "good" if status == "OK" else "warn"))
    if case.host.iommu:
        lines.append(Line(f"IOMMU {case.host.iommu}", "warn" if case.host.iommu == "translated" else "plain"))
    if case.acs:
        redirecting = [acs for acs in case.acs if {"ReqRedir", "CmpltRedir"} & set(acs.on)]
        text = (
            f"ACS redirects at {len(redirecting)} of {len(case.acs)} bridges"
            if redirecting
            else "ACS redirects nowhere"
        )
        lines.append(Line(text, "warn" if redirecting else "good"))
    moved = [gpu for gpu in case.gpus if gpu.cuda_index is not None and gpu.cuda_index != gpu.index]
    if moved:
        order = " ".join(
            f"{gpu.cuda_index}=GPU{gpu.index}"
            for gpu in sorted(case.gpus, key=lambda gpu: gpu.cuda_index or 0)
            if gpu.cuda_index is not None
        )
        lines.append(Line(f"CUDA's order is not the bus order: {order}", "ask"))
    return lines
