"""The curve of a loader study as SVG: samples a second over workers, each trial a dot; light and dark by itself."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from html import escape

from gpudoctor.model import LoaderStudy, LoaderTrial
from gpudoctor.report.loader_curve import extras, groups, is_choice, is_present
from gpudoctor.report.svg import clean, document
from gpudoctor.report.text import number

_WIDTH, _HEIGHT = 720.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 88.0, 24.0, 56.0, 92.0
_TICKS = 5
_STYLE = """
:root{color-scheme:light dark}
svg{background:#fff}
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1f2328}
.title{font-size:16px;font-weight:600}.dim{fill:#636c76}.mid{text-anchor:middle}.end{text-anchor:end}
.strong{font-weight:600}.grid{stroke:#d1d9e0;stroke-width:1}.need{stroke:#9a6700;stroke-width:1.5;stroke-dasharray:6 4}
.line{stroke-width:2}.mark{fill:none;stroke-width:2;stroke:#1f2328}
.s0{stroke:#0969da;fill:#0969da}.s1{stroke:#1a7f37;fill:#1a7f37}.s2{stroke:#8250df;fill:#8250df}
.s3{stroke:#bc4c00;fill:#bc4c00}.s4{stroke:#bf3989;fill:#bf3989}
circle.dot{stroke:none;fill-opacity:.55}polyline.line{fill:none}
@media (prefers-color-scheme:dark){
svg{background:#0d1117}text{fill:#e6edf3}.dim{fill:#9198a1}.grid{stroke:#30363d}.need{stroke:#d29922}
.mark{stroke:#e6edf3}.s0{stroke:#58a6ff;fill:#58a6ff}.s1{stroke:#3fb950;fill:#3fb950}.s2{stroke:#bc8cff;fill:#bc8cff}
.s3{stroke:#ffa657;fill:#ffa657}.s4{stroke:#ff7bc5;fill:#ff7bc5}}
text.s0,text.s1,text.s2,text.s3,text.s4{stroke:none}
""".strip()
Series = dict[str, dict[int, list[LoaderTrial]]]


def render_loader_svg(study: LoaderStudy) -> str:
    """A whole SVG document. Raises ValueError when no trial gave a rate."""
    series = _series(study)
    rates = [trial.rate or 0.0 for cells in series.values() for cell in cells.values() for trial in cell]
    if not rates:
        raise ValueError("no trial gave a rate")
    batch = study.loader.batch_size or 1
    need = batch * 1000 / study.step_ms if study.step_ms else None
    # a step that could use far more than any setting gives would press the curve to the ground
    shown_need = need if need is not None and need <= 2 * max(rates) else None
    top = _nice(max([*rates, shown_need or 0.0]) * 1.05)
    counts = sorted({workers for cells in series.values() for workers in cells})
    x = {count: _LEFT + (_WIDTH - _LEFT - _RIGHT) * (place + 0.5) / len(counts) for place, count in enumerate(counts)}

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * rate / top

    parts = [_text(f"{study.site} \u00b7 {study.loader.dataset_class}", _LEFT, 26, "title")]
    parts.append(_text(f"{study.verdict}: {study.reason}", _LEFT, 45, "dim"))
    for tick in range(_TICKS + 1):
        level = top * tick / _TICKS
        parts.append(f'<path class="grid" d="M{_LEFT:.1f} {y(level):.1f}H{_WIDTH - _RIGHT:.1f}"/>')
        parts.append(_text(number(level), _LEFT - 8, y(level) + 4, "dim end"))
    parts += [_text(str(count), x[count], _HEIGHT - _BOTTOM + 20, "mid") for count in counts]
    parts.append(_text("workers", (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - _BOTTOM + 40, "dim mid"))
    parts.append(_text("samples/s", _LEFT - 8, _TOP - 10, "dim end"))
    if shown_need is not None:
        parts.append(f'<path class="need" d="M{_LEFT:.1f} {y(shown_need):.1f}H{_WIDTH - _RIGHT:.1f}"/>')
        told = f"the step can use {number(shown_need)}"
        parts.append(_text(told, _WIDTH - _RIGHT, y(shown_need) - 6, "dim end"))
    legend = _LEFT
    for place, (name, cells) in enumerate(series.items()):
        colour = f"s{place % 5}"
        parts += _drawn(study, cells, x, y, colour)
        parts.append(_text(f"\u25cf {name}", legend, _HEIGHT - 18, colour))
        legend += 8.2 * (len(name) + 5)
    return document(f"DataLoader settings of {study.site}", max(_WIDTH, legend), _HEIGHT, _STYLE, parts)


def _series(study: LoaderStudy) -> Series:
    """Trials by how the loader is run, then by workers: one line of the picture each."""
    found: Series = {}
    for cell in groups(study.trials):
        found.setdefault(extras(cell[0]) or "rows, prefetch 2", {})[cell[0].workers] = cell
    return found


def _drawn(
    study: LoaderStudy,
    cells: dict[int, list[LoaderTrial]],
    x: dict[int, float],
    y: Callable[[float], float],
    colour: str,
) -> list[str]:
    """One line: its medians, its trials as dots, and rings around the present and the chosen setting."""
    parts, line = [], []
    for workers, trials in sorted(cells.items()):
        middle = statistics.median(trial.rate or 0.0 for trial in trials)
        line.append(f"{x[workers]:.1f},{y(middle):.1f}")
        parts += [
            f'<circle class="dot {colour}" cx="{x[workers]:.1f}" cy="{y(trial.rate or 0.0):.1f}" r="4"/>'
            for trial in trials
        ]
        first = trials[0]
        own = is_present(first, study)
        best = study.verdict == "change" and is_choice(first, study)
        if own or best:
            parts.append(f'<circle class="mark" cx="{x[workers]:.1f}" cy="{y(middle):.1f}" r="8"/>')
            parts.append(_text("now" if own else "best", x[workers] + 12, y(middle) - 8, "strong"))
    if len(line) > 1:
        parts.insert(0, f'<polyline class="line {colour}" points="{" ".join(line)}"/>')
    return parts


def _nice(value: float) -> float:
    """The next number that five steps divide well."""
    if value <= 0:
        return 1.0
    unit = 10 ** math.floor(math.log10(value / _TICKS))
    return float(
        next(step for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * unit * _TICKS >= value) * unit * _TICKS
    )


def _text(text: str, x: float, y: float, tone: str) -> str:
    return f'<text class="{tone}" x="{x:.1f}" y="{y:.1f}">{escape(clean(text))}</text>'
