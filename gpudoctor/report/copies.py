"""Copies of more than one GPU or size in text: matrices between GPUs, all at once, per NUMA node, rate by size."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpudoctor.model import Measurement
from gpudoctor.report.draw import standing
from gpudoctor.report.text import Style, number, pad, size

_PEER_TITLES = {
    "p2p_write": "GPU to GPU, written by the source, GB/s",
    "p2p_read": "GPU to GPU, read by the target, GB/s",
    "p2p_sum": "GPU to GPU, both directions summed, GB/s",
    "p2p_staged": "GPU to GPU through host memory, GB/s",
    "p2p_staged_sum": "GPU to GPU through host memory, both directions summed, GB/s",
    "p2p_latency": "GPU to GPU, latency, us",
    "p2p_staged_latency": "GPU to GPU through host memory, latency, us",
    "p2p_write.sm": "GPU to GPU, written by a kernel, GB/s",
    "p2p_read.sm": "GPU to GPU, read by a kernel, GB/s",
}
HEATS = {metric: title for metric, title in _PEER_TITLES.items() if not metric.endswith((".sm", "latency"))}
_SHADES = " ░▒▓█"
_OURS = re.compile(r"(?:h2d|d2h)_(?:all|node|pair_sum|curve)(?:\.sm)?|(?:h2d|d2h)_mpi_curve|.*\.busbw_curve|p2p_check")


def is_group(item: Measurement) -> bool:
    """Whether a measurement is told here and not as a row of one GPU."""
    return item.metric in _PEER_TITLES or _OURS.fullmatch(item.metric) is not None or item.unit == "count"


def lines(items: Sequence[Measurement], style: Style) -> list[str]:
    """Everything here that the measurements hold, one block after the other."""
    blocks = [_together(items, style), _nodes(items, style)]
    blocks += [_matrix(items, metric, title, style) for metric, title in _PEER_TITLES.items()]
    blocks += [_checks(items, style), _curves(items, style), _errors(items, style)]
    told: list[str] = []
    for block in blocks:
        if block:
            told += ([""] if told else []) + block
    return told


def matrix(items: Sequence[Measurement], metric: str) -> tuple[list[int], list[list[float | None]]]:
    """GPUs and their square of figures: the row sends, the column receives."""
    found: dict[tuple[int, int], float] = {}
    for item in items:
        pair = re.fullmatch(r"gpu:(\d{1,4})-gpu:(\d{1,4})", item.subject)
        if item.metric == metric and pair is not None:
            found[int(pair[1]), int(pair[2])] = item.value
    names = sorted({index for pair in found for index in pair})
    return names, [[found.get((a, b)) for b in names] for a in names]


def _matrix(items: Sequence[Measurement], metric: str, title: str, style: Style) -> list[str]:
    names, rows = matrix(items, metric)
    if len(names) < 2:
        return []
    known = [value for row in rows for value in row if value is not None]
    # Of latencies the reciprocals stand beside each other: the smallest is the best.
    turned = metric.endswith("latency")
    best = max(1 / value if turned else value for value in known if value > 0)
    cell = max(len(number(value)) for value in known) + 2
    label = max(len(f"GPU{index}") for index in names) + 1
    fit = len(names) if style.width is None else max(1, (style.width - label - 2) // (cell + 1))
    told = style.fold(f"{title}, row to column", rest="  ")
    for start in range(0, len(names), fit):
        part = range(start, min(start + fit, len(names)))
        told.append("  " + pad("", label) + "".join(pad(str(names[i]), cell, right=True) + " " for i in part).rstrip())
        for index, row in zip(names, rows, strict=True):
            cells = [_cell(row[i], best, cell, style, turned=turned) for i in part]
            told.append(("  " + pad(f"GPU{index}", label) + "".join(cells)).rstrip())
    return told


def _cell(value: float | None, best: float, width: int, style: Style, *, turned: bool) -> str:
    """A figure with a shade behind it: full for the fastest pair."""
    if value is None:
        return pad(style.glyph("none"), width, right=True) + " "
    share = standing(1 / value if turned and value > 0 else value, best)
    colour = "green" if share > 0.66 else "yellow" if share > 0.33 else "red"
    shade = _SHADES[round(share * (len(_SHADES) - 1))] if style.unicode else " "
    return style.paint(pad(number(value), width, right=True), colour) + shade


def _together(items: Sequence[Measurement], style: Style) -> list[str]:
    found = [item for item in items if item.metric in ("h2d_all", "d2h_all")]
    if not found:
        return []
    rows = [("all at once", "GB/s", "alone", "share")]
    for item in found:
        alone = item.settings.get("alone")
        share = f"{item.value / alone:.0%}" if isinstance(alone, float) and alone > 0 else ""
        rows.append(
            (
                f"{style.text(item.subject)} {item.metric.removesuffix('_all')}",
                number(item.value),
                number(alone) if isinstance(alone, float) else "",
                share,
            )
        )
    told = style.table(rows, right=(1, 2, 3), indent="  ")
    shared = [
        item
        for item in items
        if item.metric.endswith("_pair_sum")
        and isinstance(alone := item.settings.get("alone"), float)
        and item.value < 0.75 * alone
    ]
    for item in shared:
        alone = item.settings.get("alone")
        text = f"{style.text(item.subject)} {item.metric.split('_')[0]}: {number(item.value)} GB/s together"
        told.append(f"  {text}, {number(float(alone or 0))} one after the other: they share an uplink")
    return told


def _nodes(items: Sequence[Measurement], style: Style) -> list[str]:
    found = [item for item in items if item.metric in ("h2d_node", "d2h_node")]
    if not found:
        return []
    rows = [("host memory of", "GPU", "copy", "GB/s", "", "")]
    for item in found:
        share = item.settings.get("on_node")
        placed = f"{share:.0%} of the pages there" if isinstance(share, float) and share < 1 else ""
        near = {True: "near", False: "far"}.get(item.settings.get("near"), "")  # type: ignore[call-overload]
        node = f"node {item.settings.get('node')}"
        rows.append((node, style.text(item.subject), item.metric.split("_")[0], number(item.value), near, placed))
    return style.table(rows, right=(3,), indent="  ")


def _checks(items: Sequence[Measurement], style: Style) -> list[str]:
    found = [item for item in items if item.metric == "p2p_check"]
    if not found:
        return []
    failed = [item for item in found if item.value == 0]
    told = [f"data of peer copies checked at the destination: {len(found) - len(failed)} of {len(found)} arrived"]
    for item in failed:
        why = item.notes[0] if item.notes else "the data did not arrive"
        told += style.fold(f"{style.text(item.subject)}: {style.text(why)}", first="  ")
    return told


def _curves(items: Sequence[Measurement], style: Style) -> list[str]:
    tables: dict[tuple[str, str], dict[int, float]] = {}
    for item in items:
        length = item.settings.get("bytes")
        if item.metric.endswith("_curve") and isinstance(length, int) and length >= 4096:
            tables.setdefault((item.subject, item.metric), {})[length] = item.value
    told: list[str] = []
    for (subject, metric), table in tables.items():
        top = max(table.values())
        told.append(f"{style.text(subject)} {style.text(metric.removesuffix('_curve'))} by size, GB/s")
        room = 24 if style.width is None else max(8, min(24, style.width - 30))
        for length, value in sorted(table.items()):
            bar = style.glyph("block") * round(room * value / top) if top > 0 else ""
            told.append(f"  {pad(size(length), 8, right=True)}  {pad(number(value), 5, right=True)}  {bar}".rstrip())
    return told


def _errors(items: Sequence[Measurement], style: Style) -> list[str]:
    found = [item for item in items if item.unit == "count" and item.metric in ("pcie_replays", "aer_correctable")]
    grown = [item for item in found if item.value > 0]
    if not found:
        return []
    if not grown:
        return ["error counters of the links stood still during the copies"]
    return [
        f"{style.text(item.subject)} {style.text(item.metric)} grew by {item.value:.0f} during the copies"
        for item in grown
    ]
