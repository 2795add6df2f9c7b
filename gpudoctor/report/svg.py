"""Pictures as SVG: one file without script, foreign style sheet or outside address; light and dark by itself.

Every text is escaped, and lies on the same cells as in a terminal: the font is monospaced, and `textLength` keeps the
cells where a viewer has another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape  # xml.sax.saxutils asks for urllib, which takes longer than the picture

from gpudoctor.report.draw import Line, Picture, Placed, Tone, cut, standing
from gpudoctor.report.text import columns

CELL = 8.0  # width of a character
ROW = 18.0  # height of a line
MARGIN = 16.0
_STYLE = """
:root{color-scheme:light dark}
svg{background:#fff}
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1f2328;white-space:pre}
.title{font-size:17px;font-weight:600}
.strong{font-weight:600}.dim{fill:#636c76}.good{fill:#1a7f37}.warn{fill:#9a6700;font-weight:600}
.bad{fill:#cf222e;font-weight:600}.ask{fill:#0969da}
rect{fill:#fff;stroke:#afb8c1;stroke-width:1}
.numa{fill:#f6f8fa}.host-bridge,.group{fill:#eef1f4}.switch{fill:#e6ebf1}.gpu{fill:#fff}.nic{fill:#fbfcfd}
.fabric{fill:#eefbf1;stroke:#4ac26b}
.is-bad{stroke:#cf222e;stroke-width:2.5;fill:#fff5f5}.is-warn{stroke:#bf8700;stroke-width:2.5;fill:#fffbea}
.heat text{text-anchor:middle}.heat rect{stroke:none}
@media (prefers-color-scheme:dark){
svg{background:#0d1117}text{fill:#e6edf3}.dim{fill:#9198a1}.good{fill:#3fb950}.warn{fill:#d29922}.bad{fill:#ff7b72}
.ask{fill:#58a6ff}rect{fill:#0d1117;stroke:#3d444d}.numa{fill:#12181f}.host-bridge,.group{fill:#161c24}
.switch{fill:#1b222c}.gpu{fill:#0d1117}.nic{fill:#10161d}.fabric{fill:#0f1f16;stroke:#238636}
.is-bad{stroke:#f85149;fill:#25131a}.is-warn{stroke:#bb8009;fill:#211a0c}}
""".strip()


class Heat:
    """A square of figures, such as the rates between GPUs; None is a figure that is missing."""

    def __init__(self, title: str, labels: Sequence[str], rows: Sequence[Sequence[float | None]]) -> None:
        self.title = title
        self.labels = labels
        self.rows = rows


def to_svg(title: str, picture: Picture, notes: Sequence[Line] = (), heats: Sequence[Heat] = ()) -> str:
    """A whole SVG document; the texts in it are printable already, and are escaped here."""
    below = MARGIN + 2 * ROW + picture.height * ROW
    parts = [_text(title, MARGIN, MARGIN + ROW * 0.8, "title", fit=False)]
    for one in picture.every():
        parts += _box(one)
    y = below + ROW
    wide = picture.width * CELL
    for line in notes:
        parts.append(_text(line.text, MARGIN, y, line.tone, fit=False))
        wide = max(wide, columns(line.text) * CELL)
        y += ROW
    for heat in heats:
        drawn, width, y = _heat(heat, y + ROW / 2)
        parts += drawn
        wide = max(wide, width)
    width, height = max(wide, columns(title) * 10.5) + 2 * MARGIN, y + MARGIN / 2
    return document(title, width, height, _STYLE, parts)


def document(title: str, width: float, height: float, style: str, parts: Sequence[str]) -> str:
    """The file around the parts, which are escaped already."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(clean(title))}">'
    )
    lines = [head, f"<title>{escape(clean(title))}</title>", f"<style>{style}</style>", *parts, "</svg>"]
    return "\n".join(lines) + "\n"


def _x(column: float) -> float:
    return MARGIN + column * CELL


def _y(row: float) -> float:
    return MARGIN + 2 * ROW + row * ROW


def _box(one: Placed) -> list[str]:
    """The border runs through the middle of its cells, the title stands in the upper one."""
    tone = f" is-{one.box.tone}" if one.box.tone in ("bad", "warn") else ""
    x, y = _x(one.column + 0.5), _y(one.row + 0.1)
    width, height = (one.width - 1) * CELL, (one.height - 0.35) * ROW
    parts = [
        f'<rect class="{one.box.kind}{tone}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5"/>'
    ]
    room = one.width - 6
    label = one.box.label if columns(one.box.title) + columns(one.box.label) + 3 <= room else ""
    parts.append(_text(cut(one.box.title, room), _x(one.column + 2), _y(one.row + 0.85), "strong"))
    if label:
        place = one.column + one.width - 2 - columns(label)
        parts.append(_text(label, _x(place), _y(one.row + 0.85), one.box.label_tone))
    for number, line in enumerate(one.lines):
        parts.append(_text(line.text, _x(one.column + 2), _y(one.row + 1.85 + number), line.tone))
    return parts


def _heat(heat: Heat, y: float) -> tuple[list[str], float, float]:
    """Squares from pale (low) to full (high) colour, with the figure in each; the rows send, the columns receive."""
    best = max((value for row in heat.rows for value in row if value is not None), default=0.0)
    cell, height = 6.5 * CELL, 1.5 * ROW
    left = MARGIN + (max((columns(label) for label in heat.labels), default=0) + 2) * CELL
    parts = [_text(heat.title, MARGIN, y + ROW * 0.7, "strong", fit=False), '<g class="heat">']
    y += ROW
    for number, label in enumerate(heat.labels):
        parts.append(_text(label, left + (number + 0.5) * cell, y + ROW * 0.7, "dim", fit=False))
    y += ROW
    for label, row in zip(heat.labels, heat.rows, strict=True):
        place = f'x="{MARGIN:.1f}" y="{y + height * 0.65:.1f}"'
        parts.append(f'<text class="dim" style="text-anchor:start" {place}>{escape(clean(label))}</text>')
        for number, value in enumerate(row):
            x = left + number * cell
            if value is None:
                parts.append(_text("-", x + cell / 2, y + height * 0.65, "dim", fit=False))
                continue
            hue = 10 + 130 * standing(value, best)  # from red over yellow to green
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell - 1:.1f}" height="{height - 1:.1f}" rx="3" '
                f'style="fill:hsl({hue:.0f} 60% 50%);fill-opacity:.45"/>'
            )
            parts.append(_text(_figure(value), x + cell / 2, y + height * 0.65, "plain", fit=False))
        y += height
    parts.append("</g>")
    return parts, left + len(heat.labels) * cell, y


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _text(text: str, x: float, y: float, tone: Tone | str, *, fit: bool = True) -> str:
    if not text:
        return ""
    length = f' textLength="{columns(text) * CELL:.1f}" lengthAdjust="spacingAndGlyphs"' if fit else ""
    shown = escape(clean(text)).replace("  ", "\u00a0 ")  # blanks count, also where white-space is not known
    return f'<text class="{tone}" x="{x:.1f}" y="{y:.1f}"{length}>{shown}</text>'


def clean(text: str) -> str:
    """Without the characters that XML does not know at all; the printable ones are escaped elsewhere."""
    return "".join(
        c if c in "\t\n" or 0x20 <= ord(c) <= 0xD7FF or 0xE000 <= ord(c) <= 0xFFFD or ord(c) > 0xFFFF else "?"
        for c in text
    )
