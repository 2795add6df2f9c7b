"""One layout for pictures of nested boxes: in character cells, drawn to a terminal here and to SVG in svg.py.

A box has a title, lines of text and boxes inside, which flow from left to right and wrap where the width ends. All
places are whole cells, so that both back ends show the same picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpudoctor.report.text import Style, columns

Tone = Literal["plain", "strong", "dim", "good", "warn", "bad", "ask"]
GAP = 1  # cells between boxes in a row


@dataclass(slots=True)
class Line:
    """One line inside a box; `text` is printable already."""

    text: str
    tone: Tone = "plain"


@dataclass(slots=True)
class Drawing:
    """A box to be laid out. `label` stands at the right end of the upper border; a bad box has a heavy border."""

    title: str
    lines: list[Line] = field(default_factory=list)
    children: list[Drawing] = field(default_factory=list)
    kind: str = "group"
    label: str = ""
    label_tone: Tone = "dim"
    tone: Tone = "plain"
    own_row: bool = False  # begins a row of its own


@dataclass(slots=True)
class Placed:
    """A box with its place, in cells from the upper left corner of the picture."""

    box: Drawing
    column: int
    row: int
    width: int
    height: int
    lines: list[Line]
    children: list[Placed]

    def every(self) -> Iterator[Placed]:
        yield self
        for child in self.children:
            yield from child.every()


@dataclass(slots=True)
class Picture:
    placed: list[Placed]
    width: int
    height: int

    def every(self) -> Iterator[Placed]:
        for top in self.placed:
            yield from top.every()


def lay_out(boxes: Sequence[Drawing], width: int) -> Picture:
    """Place the boxes from left to right and below each other within `width` cells; wide text is folded."""
    leaves = _leaf_widths(boxes, max(8, width - 8))
    placed, used, height = _flow(boxes, 0, 0, width, leaves)
    return Picture(placed, used, height)


def _leaf_widths(boxes: Sequence[Drawing], most: int) -> dict[str, int]:
    """One width for all leaves of a kind, so that rows and columns line up."""
    widths: dict[str, int] = {}

    def visit(box: Drawing) -> None:
        if not box.children:
            widths[box.kind] = max(widths.get(box.kind, 0), min(most, _own_width(box)))
        for child in box.children:
            visit(child)

    for box in boxes:
        visit(box)
    return widths


def _own_width(box: Drawing) -> int:
    """Cells that the text of a box needs, borders included."""
    return max(_top_width(box), max((columns(line.text) + 4 for line in box.lines), default=0))


def _place(box: Drawing, column: int, row: int, room: int, leaves: dict[str, int]) -> Placed:
    """One box within `room` cells; a leaf has the width of its kind."""
    if not box.children:
        width = min(room, max(leaves.get(box.kind, 0), 8))
        lines = _folded(box.lines, width - 4)
        return Placed(box, column, row, width, len(lines) + 2, lines, [])
    lines = _folded(box.lines, room - 4)
    children, used, height = _flow(box.children, column + 2, row + 1 + len(lines), room - 4, leaves)
    text = max((columns(line.text) for line in lines), default=0)
    width = min(room, max(used + 4, text + 4, _top_width(box)))
    return Placed(box, column, row, width, len(lines) + height + 2, lines, children)


def _flow(
    boxes: Sequence[Drawing], column: int, row: int, room: int, leaves: dict[str, int]
) -> tuple[list[Placed], int, int]:
    """Boxes from left to right, wrapped where `room` ends; their places, the width used and the height."""
    placed: list[Placed] = []
    line: list[Placed] = []
    x, y, used = 0, 0, 0
    for box in boxes:
        wants = min(room, _natural(box, leaves))
        if line and (box.own_row or x + wants > room):
            y += _level(line)
            line, x = [], 0
        line.append(_place(box, column + x, row + y, wants, leaves))
        placed.append(line[-1])
        x += line[-1].width + GAP
        used = max(used, x - GAP)
    return placed, used, y + _level(line)


def _natural(box: Drawing, leaves: dict[str, int]) -> int:
    """The width of a box whose children all stand in one row."""
    if not box.children:
        return max(leaves.get(box.kind, 0), 8)
    inside = sum(_natural(child, leaves) for child in box.children) + GAP * (len(box.children) - 1)
    text = max((columns(line.text) for line in box.lines), default=0)
    return max(inside + 4, text + 4, _top_width(box))


def _top_width(box: Drawing) -> int:
    """Cells of the upper border with title and label in it."""
    return columns(box.title) + (columns(box.label) + 3 if box.label else 0) + 6


def _level(line: list[Placed]) -> int:
    """Boxes of one row end at the same height: those with boxes inside, and apart from them those without."""
    for group in ([one for one in line if one.children], [one for one in line if not one.children]):
        for one in group:
            one.height = max(other.height for other in group)
    return max((one.height for one in line), default=0)


def _folded(lines: Sequence[Line], room: int) -> list[Line]:
    """Lines of at most `room` cells, broken at blanks; a longer word is cut into pieces that fit."""
    result = []
    for line in lines:
        if columns(line.text) <= room:
            result.append(line)
            continue
        text = ""
        for word in line.text.split(" "):
            for piece in _pieces(word, room):
                grown = f"{text} {piece}" if text else piece
                if text and columns(grown) > room:
                    result.append(Line(text, line.tone))
                    text = piece
                else:
                    text = grown
        result.append(Line(text, line.tone))
    return result


def _pieces(word: str, room: int) -> Iterator[str]:
    piece = ""
    for character in word:
        if piece and columns(piece + character) > room:
            yield piece
            piece = ""
        piece += character
    yield piece


_BORDERS = {
    (True, False): "┌─┐│└┘",
    (True, True): "┏━┓┃┗┛",
    (False, False): "+-+|++",
    (False, True): "#=####",
}
PAINTS: dict[Tone, tuple[str, ...]] = {
    "plain": (),
    "strong": ("bold",),
    "dim": ("dim",),
    "good": ("green",),
    "warn": ("yellow", "bold"),
    "bad": ("red", "bold"),
    "ask": ("blue", "bold"),
}


def to_text(picture: Picture, style: Style) -> list[str]:
    """The picture in lines of characters; colours as the style has them."""
    canvas = _Canvas(picture.width, picture.height)
    for one in picture.every():
        _draw(canvas, one, style)
    return canvas.lines(style)


def _draw(canvas: _Canvas, one: Placed, style: Style) -> None:
    heavy = one.box.tone in ("bad", "warn")
    corner, line, right, bar, lower, lower_right = tuple(_BORDERS[style.unicode, heavy])
    tone: Tone = one.box.tone if heavy else "dim"
    bottom = one.row + one.height - 1
    canvas.put(one.column, one.row, corner + line * (one.width - 2) + right, tone)
    canvas.put(one.column, bottom, lower + line * (one.width - 2) + lower_right, tone)
    for row in range(one.row + 1, bottom):
        canvas.put(one.column, row, bar, tone)
        canvas.put(one.column + one.width - 1, row, bar, tone)
    room = one.width - 6
    label = one.box.label if columns(one.box.title) + columns(one.box.label) + 3 <= room else ""
    canvas.put(one.column + 2, one.row, f" {cut(one.box.title, room)} ", "strong")
    if label:
        canvas.put(one.column + one.width - columns(label) - 4, one.row, f" {label} ", one.box.label_tone)
    for number, text in enumerate(one.lines):
        canvas.put(one.column + 2, one.row + 1 + number, text.text, text.tone)


def cut(text: str, room: int) -> str:
    """Text of at most `room` cells, with dots where something was cut off."""
    if columns(text) <= room:
        return text
    kept = ""
    for character in text:
        if columns(kept + character) > max(0, room - 2):
            break
        kept += character
    return kept + ".."


def standing(value: float, best: float) -> float:
    """How near a rate is to the best one, 0 to 1: full from 95 % on, nothing at half of it and below."""
    return min(1.0, max(0.0, (value / best - 0.5) / 0.45)) if best > 0 else 0.0


class _Canvas:
    """Cells with a character and a tone; a wide character takes two cells, a combining one none of its own."""

    def __init__(self, width: int, height: int) -> None:
        self.cells: list[list[tuple[str, Tone]]] = [[(" ", "plain")] * width for _ in range(height)]

    def put(self, column: int, row: int, text: str, tone: Tone) -> None:
        cells = self.cells[row]
        for character in text:
            size = columns(character)
            if size == 0:
                if 0 < column <= len(cells):
                    before, its = cells[column - 1]
                    cells[column - 1] = (before + character, its)
                continue
            if column >= 0 and column + size <= len(cells):
                cells[column] = (character, tone)
                if size == 2:
                    cells[column + 1] = ("", tone)
            column += size

    def lines(self, style: Style) -> list[str]:
        return [_painted(row, style.paint) for row in self.cells]


def _painted(row: Sequence[tuple[str, Tone]], paint: Callable[..., str]) -> str:
    end = len(row)
    while end and row[end - 1] == (" ", "plain"):
        end -= 1
    parts: list[str] = []
    run, tone = "", None
    for character, its in row[:end]:
        if its != tone and run:
            parts.append(paint(run, *PAINTS[tone or "plain"]))
            run = ""
        tone = its
        run += character
    parts.append(paint(run, *PAINTS[tone or "plain"]))
    return "".join(parts)
