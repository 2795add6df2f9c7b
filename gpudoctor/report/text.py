"""Plain strings for a terminal: escaping, display width, colour, folding and aligned columns.

rich is not used for results: without a terminal it folds at 80 columns and cuts words, and its markup would
have to be escaped in every string from outside.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

_COLOURS = {"red": "31", "yellow": "33", "green": "32", "blue": "34", "bold": "1", "dim": "2"}
_GLYPHS = {
    "tee": ("├─ ", "|- "),
    "end": ("└─ ", "`- "),
    "bar": ("│  ", "|  "),
    "dot": (" · ", " - "),
    "plus-minus": ("±", "+-"),
    "arrow": (" → ", " -> "),
    "dash": ("\u2013", "-"),
    "block": ("█", "#"),
    "none": ("—", "-"),
}
_KEPT = "\u00a0"  # a space at which `fold` does not break
# Categories that can move the cursor, reorder text or have no picture: controls, formats (bidi overrides,
# zero-width), surrogates, private use, unassigned, line and paragraph separators.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def printable(value: object, *, unicode: bool = True) -> str:
    """Text from outside on one line, with everything that a terminal would act upon as a visible escape."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character, unicode) for character in text)


def _visible(character: str, unicode: bool) -> str:
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return character
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    if named:
        return named
    if unicode and unicodedata.category(character) not in _HIDDEN:
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def columns(text: str) -> int:
    """Terminal columns of a printable string: combining marks take none, wide characters two."""
    if text.isascii():
        return len(text)
    total = 0
    for character in text:
        if unicodedata.combining(character):
            continue
        total += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return total


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Text filled up with spaces to `width` columns; `right` puts the spaces in front."""
    fill = " " * max(0, width - columns(text))
    return fill + text if right else text + fill


def count(number: int, noun: str) -> str:
    """1 GPU, 2 GPUs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranges(numbers: Sequence[int]) -> str:
    """CPU or index lists as the kernel prints them: 0-13,28-41."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def number(value: float) -> str:
    """Three significant digits without exponent: 0.123, 5.53, 55.4, 1240."""
    size = abs(value)
    if size >= 99.95 or value == 0:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.9995 else f"{value:.3f}"


def trimmed(value: float) -> str:
    """As `number` without trailing zeros: 2.5, 24, 0.1."""
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(value: float) -> str:
    """Bytes with a binary unit: 126 GiB, 64 MiB."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{trimmed(amount)} {unit}" if unit != "B" else f"{amount:.0f} B"
        amount /= 1024
    return f"{trimmed(amount)} TiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How text is laid out: `width` None means never fold (piped or a file)."""

    width: int | None = None
    unicode: bool = True
    color: bool = False
    verbose: int = 0  # -1 quiet, 0, 1 verbose

    def glyph(self, name: str) -> str:
        return _GLYPHS[name][0 if self.unicode else 1]

    def text(self, value: object) -> str:
        """Text from outside, made printable for this terminal."""
        return printable(value, unicode=self.unicode)

    def paint(self, text: str, *colours: str) -> str:
        if not self.color or not text:
            return text
        return f"\x1b[{';'.join(_COLOURS[colour] for colour in colours)}m{text}\x1b[0m"

    def joined(self, parts: Sequence[str | None]) -> str:
        """Parts with dots between them, for `fold`, which will break between the parts only."""
        dot = self.glyph("dot").replace(" ", _KEPT, 1)
        return dot.join(part.replace(" ", _KEPT) for part in parts if part)

    def fold(self, text: str, *, first: str = "", rest: str | None = None) -> list[str]:
        """Lines of at most `width` columns, `first` in front of the first and `rest` in front of the others.

        A word that is longer than a line stays whole: paths and commands must survive copying.
        """
        rest = " " * columns(first) if rest is None else rest
        if self.width is None:
            return [first + text.replace(_KEPT, " ")]
        room = max(20, self.width - max(columns(first), columns(rest)))
        lines = textwrap.wrap(
            text, room, break_long_words=False, break_on_hyphens=False, drop_whitespace=True, expand_tabs=False
        ) or [""]
        return [(rest if index else first) + line.replace(_KEPT, " ") for index, line in enumerate(lines)]

    def table(self, rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "") -> list[str]:
        """Aligned columns with two spaces between them; `right` are the columns of numbers."""
        if not rows:
            return []
        widths = [max(columns(row[index]) for row in rows) for index in range(len(rows[0]))]
        return [
            (
                indent + "  ".join(pad(cell, widths[index], right=index in right) for index, cell in enumerate(row))
            ).rstrip()
            for row in rows
        ]
