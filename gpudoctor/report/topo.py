"""The machine in text: a tree, and the matrix in the words of `nvidia-smi topo -m`."""

from __future__ import annotations

from collections.abc import Sequence

from gpudoctor.model import Case, Finding
from gpudoctor.report import copies
from gpudoctor.report.draw import PAINTS, Line, to_text
from gpudoctor.report.human import WORDS, header
from gpudoctor.report.svg import Heat, to_svg
from gpudoctor.report.text import Style, columns, pad, ranges
from gpudoctor.report.topo_layout import CLASS_RANK, Box, pair_of, tree
from gpudoctor.report.topo_picture import TONES, footer, picture

_LEGEND = {
    "X": "the device itself",
    "PIX": "at most one PCIe bridge between them",
    "PXB": "several PCIe bridges, no host bridge",
    "PHB": "through a PCIe host bridge (the CPU)",
    "NODE": "between host bridges of one NUMA node",
    "SYS": "between NUMA nodes (QPI, UPI, xGMI)",
    "NV#": "# bonded NVLinks",
    "?": "not known",
    "!": "named in a finding",
}


def render_topo(
    case: Case,
    *,
    matrix: bool,
    width: int | None,
    unicode: bool,
    color: bool,
    findings: Sequence[Finding] = (),
    boxes: bool = False,
) -> str:
    """The tree (or with `boxes` the picture), or the matrix.

    `width` None never folds; a matrix too wide for the terminal comes in column blocks. Devices carry the numbers that
    the findings have in their list, counted from 1.
    """
    style = Style(width=width, unicode=unicode, color=color)
    if not case.gpus and not case.nics:
        return ""
    if matrix:
        lines = _matrix(case, style, findings)
    else:
        lines = _picture(case, style, findings) if boxes else _tree(case, style, findings)
    return "\n".join(lines) + "\n"


def render_svg(case: Case, findings: Sequence[Finding] = ()) -> str:
    """The picture as one SVG document, with peer rates as heat maps where the Case holds them."""
    style = Style(width=None, unicode=True, color=False)
    heats = [
        Heat(f"{title}, row to column", [f"GPU{index}" for index in names], rows)
        for metric, title in copies.HEATS.items()
        for names, rows in [copies.matrix(case.measurements, metric)]
        if len(names) > 1
    ]
    notes = [Line(style.text(line.text), line.tone) for line in footer(case)]
    for place, finding in enumerate(findings, start=1):
        word = WORDS[finding.severity][0]
        text = f"[{place}] {word} {finding.rule}  {finding.subject}  {finding.message}"
        notes += [
            Line(part, TONES[finding.severity]) for part in Style(width=130).fold(style.text(text), rest="      ")
        ]
    title = "  ".join(header(case, style)) or "machine"
    return to_svg(title, picture(case, style, findings, width=132), notes, heats)


def _picture(case: Case, style: Style, findings: Sequence[Finding]) -> list[str]:
    room = style.width or 100
    lines = to_text(picture(case, style, findings, width=room), style)
    for line in footer(case):
        lines += [style.paint(text, *PAINTS[line.tone]) for text in style.fold(style.text(line.text))]
    return lines


def _tree(case: Case, style: Style, findings: Sequence[Finding]) -> list[str]:
    lines: list[str] = []
    for root in tree(case, findings):
        lines += _box(root, style, "", "")
    return lines + _nvlinks(case, style) + _p2p(case, style)


def _box(box: Box, style: Style, first: str, rest: str) -> list[str]:
    """`first` stands in front of the line of the box, `rest` in front of everything below it."""
    title = style.text(box.title)
    colours = ("red", "bold") if box.lost else ("bold",) if box.kind in ("numa", "gpu") else ()
    parts = [(title, style.paint(title, *colours))]
    for detail in box.details:
        text = style.text(detail)
        parts.append((text, style.paint(text, "red") if box.lost and detail.startswith("LOST") else text))
    for finding in box.findings:
        word, colour = WORDS[finding.severity]
        text = f"! {word} {style.text(finding.rule)}"
        parts.append((text, style.paint(text, colour, "bold")))
    inner = style.glyph("bar") if box.children else "   "
    lines = _parts(parts, style, first, rest + inner + "   ")
    for index, child in enumerate(box.children):
        last = index == len(box.children) - 1
        lines += _box(
            child,
            style,
            rest + style.glyph("end" if last else "tee"),
            rest + ("   " if last else style.glyph("bar")),
        )
    return lines


def _parts(parts: Sequence[tuple[str, str]], style: Style, first: str, rest: str) -> list[str]:
    """(plain, painted) parts on one line, going on below where the terminal is too narrow; no part is cut."""
    lines = [first]
    used = columns(first)
    fresh = True
    for plain, painted in parts:
        if not fresh and style.width is not None and used + 2 + columns(plain) > style.width:
            lines.append(rest)
            used, fresh = columns(rest), True
        lines[-1] += painted if fresh else "  " + painted
        used += columns(plain) + (0 if fresh else 2)
        fresh = False
    return lines


def _nvlinks(case: Case, style: Style) -> list[str]:
    groups: dict[int, list[str]] = {}
    gpus = [f"gpu:{gpu.index}" for gpu in case.gpus]
    for pair in case.pairs:
        if pair.nvlinks and pair.b in gpus:
            groups.setdefault(pair.nvlinks, []).append(_pair_name(pair.a, pair.b, style))
    lines: list[str] = []
    every = len(gpus) * (len(gpus) - 1) // 2
    for links, names in sorted(groups.items(), reverse=True):
        text = f"all {len(gpus)} GPUs" if len(names) == every and every > 1 else "  ".join(names)
        lines += style.fold(text, first=f"NVLink NV{links}  ")
    return lines


def _p2p(case: Case, style: Style) -> list[str]:
    groups: dict[str, list[str]] = {}
    for pair in case.pairs:
        if pair.p2p_read is not None:
            groups.setdefault(pair.p2p_read, []).append(_pair_name(pair.a, pair.b, style))
    lines: list[str] = []
    for status, names in groups.items():
        text = "every pair" if len(groups) == 1 and len(names) > 1 else "  ".join(names)
        lines += style.fold(text, first=f"P2P read {status}  ")
    return lines


def _pair_name(a: str, b: str, style: Style) -> str:
    return "-".join(style.text(key.replace("gpu:", "GPU").removeprefix("nic:")) for key in (a, b))


def _matrix(case: Case, style: Style, findings: Sequence[Finding]) -> list[str]:
    keys = [f"gpu:{gpu.index}" for gpu in case.gpus] + [f"nic:{nic.name}" for nic in case.nics]
    labels = [f"GPU{gpu.index}" for gpu in case.gpus] + [f"NIC{index}" for index in range(len(case.nics))]
    marked = {finding.subject for finding in findings if finding.severity != "info"}  # as in the picture
    cells = [[_cell(case, row, column, marked) for column in keys] for row in keys]
    table = [[label, *(row[index] for row in cells)] for index, label in enumerate(labels)]
    for row in table[: len(case.gpus)]:
        row[0] = row[0] + ("!" if f"gpu:{row[0].removeprefix('GPU')}" in marked else "")
    affinity = [("CPU Affinity", "NUMA Affinity")]
    for gpu in case.gpus:
        cpus = ranges(gpu.local_cpus) if gpu.local_cpus else "N/A"
        nodes = gpu.numa_nodes or ((gpu.numa_node,) if gpu.numa_node is not None else ())
        affinity.append((cpus, ranges(nodes) if nodes else "N/A"))
    affinity += [("", "")] * len(case.nics)
    rows = [""] + [row[0] for row in table]
    lines: list[str] = []
    for block in _blocks(rows, table, affinity, style):
        lines += ([""] if lines else []) + block
    lines += _legend(case, {cell for row in cells for cell in row}, marked, style)
    return lines


def _blocks(rows: list[str], table: list[list[str]], affinity: list[tuple[str, str]], style: Style) -> list[list[str]]:
    """Device columns, as many as fit; the affinity beside the last of them where it fits, else in its own block."""
    headings = [row[0].rstrip("!") for row in table]
    label = max(columns(row) for row in rows) + 2
    wide = max([columns(head) for head in headings] + [columns(row[i + 1]) for row in table for i in range(len(table))])
    cell = wide + 1
    tail = style.table(affinity)
    tail_width = max(columns(line) for line in tail) + 2
    room = style.width if style.width is not None else label + cell * len(table) + tail_width
    fit = max(1, (room - label) // cell)
    blocks: list[list[str]] = []
    for start in range(0, len(table), fit):
        part = range(start, min(start + fit, len(table)))
        lines = [pad("", label) + "".join(pad(headings[i], cell) for i in part)]
        lines += [pad(row[0], label) + "".join(pad(row[i + 1], cell) for i in part) for row in table]
        blocks.append(lines)
    if columns(blocks[-1][0]) + tail_width <= room:
        blocks[-1] = [f"{line}  {end}" for line, end in zip(blocks[-1], tail, strict=True)]
    else:
        blocks.append(_affinity_block(rows, affinity, label, room))
    return [[line.rstrip() for line in block] for block in blocks]


def _affinity_block(rows: list[str], affinity: list[tuple[str, str]], label: int, room: int) -> list[str]:
    """NUMA first, because it is short; a long CPU list goes on below itself, broken at commas."""
    lines = []
    numa = max(columns(nodes) for _, nodes in affinity) + 2
    for row, (cpus, nodes) in zip(rows, affinity, strict=True):
        if row.startswith("NIC"):
            continue
        head = pad(row, label) + pad(nodes, numa)
        text = ""
        for part in cpus.split(","):
            grown = f"{text},{part}" if text else part
            if text and columns(head) + columns(grown) + 1 > room:
                lines.append(head + text + ",")
                head, text = pad("", label + numa), part
            else:
                text = grown
        lines.append(head + text)
    return lines


def _cell(case: Case, row: str, column: str, marked: set[str]) -> str:
    if row == column:
        return "X"
    pair = pair_of(case, row, column)
    text = "?"
    if pair is not None:
        text = f"NV{pair.nvlinks}" if pair.nvlinks else pair.path or "?"
    return text + ("!" if {f"{row}-{column}", f"{column}-{row}"} & marked else "")


def _legend(case: Case, used: set[str], marked: set[str], style: Style) -> list[str]:
    bare = {cell.rstrip("!") for cell in used}
    keys = [str(path) for path in CLASS_RANK if path in bare]
    keys += ["NV#"] if any(cell.startswith("NV") for cell in bare) else []
    keys += ["?"] if "?" in bare else []
    devices = {f"gpu:{gpu.index}" for gpu in case.gpus}
    keys += ["!"] if any(cell.endswith("!") for cell in used) or devices & marked else []
    lines = ["", *(f"  {key:<5}{_LEGEND[key]}" for key in keys)]
    for index, nic in enumerate(case.nics):
        lines += style.fold(style.text(nic.name), first=f"  NIC{index}: ")
    lost = [f"GPU{gpu.index}" for gpu in case.gpus if gpu.lost]
    if lost:
        lines.append(f"  lost: {' '.join(lost)}")
    return lines
