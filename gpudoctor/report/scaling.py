"""The table of ranks, rate, efficiency and waits that `tune --nproc` measures."""

from __future__ import annotations

from collections.abc import Sequence

from gpudoctor.model import Scaling, ScalingRow
from gpudoctor.report.text import Style, columns, count, number

_HEADS = ["ranks", "rate", "efficiency", "step ms", "loader wait ms", "exposed ms", "to the GPU GB/s", "slowest"]
_COPIES = _HEADS.index("to the GPU GB/s")
_UNKNOWN = "unknown"


def scaling(item: Scaling, style: Style) -> list[str]:
    """A row for each count of ranks, then who is slow and why, and what grows with the count."""
    rows = [_row(row, style) for row in item.rows if row.error is None]
    lines = [f"scaling, rate in {style.text(item.unit)}"]
    if rows:
        heads = _HEADS
        if all(rank.h2d_gb_s is None for row in item.rows for rank in row.per_rank):
            rows = [(*row[:_COPIES], *row[_COPIES + 1 :]) for row in rows]  # nothing was copied to a GPU
            heads = [*heads[:_COPIES], *heads[_COPIES + 1 :]]
        table = style.table([heads, *rows], right=tuple(range(len(heads) - 1)), indent="  ")
        if style.width is not None and any(columns(line) > style.width for line in table):
            table = []
            for cells in rows:
                pairs = [f"{head} {cell}" for head, cell in zip(heads[1:], cells[1:], strict=True)]
                table += style.fold(style.joined([count(int(cells[0]), "rank"), *pairs]), first="  ", rest="    ")
        lines += table
    for row in item.rows:
        if row.error is not None:
            lines += style.fold(f"{count(row.ranks, 'rank')}: {style.text(row.error)}", first="  ", rest="    ")
        elif row.slowest_rank is not None and row.slowest_because:
            text = f"with {row.ranks} ranks, rank {row.slowest_rank} is slow: {style.text(row.slowest_because)}"
            lines += style.fold(text, first="  ", rest="    ")
    if item.cause is not None:
        lines += style.fold(f"what grows with the ranks: {style.text(item.cause)}", first="  ", rest="    ")
    for note in item.notes:
        lines += style.fold(style.text(note), first="  note: ", rest="    ")
    return lines


def _row(row: ScalingRow, style: Style) -> tuple[str, ...]:
    steps = [rank.step_ms for rank in row.per_rank]
    copies = [rank.h2d_gb_s for rank in row.per_rank if rank.h2d_gb_s is not None]
    exposed = _UNKNOWN if row.exposed_ms is None else number(row.exposed_ms)
    return (
        str(row.ranks),
        number(row.rate) if row.rate is not None else style.glyph("none"),
        f"{row.efficiency:.0%}" if row.efficiency is not None else style.glyph("none"),
        number(max(steps)) if steps else style.glyph("none"),
        _span([rank.loader_wait_ms for rank in row.per_rank], style),
        exposed if row.ranks > 1 else style.glyph("none"),
        _span(copies, style) if len(copies) == len(row.per_rank) else _UNKNOWN,
        f"rank {row.slowest_rank}" if row.slowest_rank is not None else style.glyph("none"),
    )


def _span(values: Sequence[float], style: Style) -> str:
    """Each rank's figure where there are few, else the smallest and the largest."""
    if not values:
        return style.glyph("none")
    if len(values) <= 2:
        return " ".join(number(value) for value in values)
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low}{style.glyph('dash')}{high}"
