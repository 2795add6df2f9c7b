"""Two traces, or the traces of two jobs, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpudoctor.model import TraceFacts, TraceWait
from gpudoctor.report.text import Style, number
from gpudoctor.report.trace import short_name

_SHOWN = 6
_SMALL_MS = 0.005  # a step; smaller differences are not listed


def compare(before: Sequence[TraceFacts], after: Sequence[TraceFacts], style: Style) -> str:
    """Rank by rank where both have the rank (else the first of each), with what changed most."""
    pairs = [(a, b) for a in before for b in after if a.rank == b.rank] or [(before[0], after[0])]
    blocks = [_pair(a, b, style) for a, b in pairs]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _pair(a: TraceFacts, b: TraceFacts, style: Style) -> list[str]:
    lines = [
        *style.fold(f"A  {style.text(a.file)}  rank {a.rank}"),
        *style.fold(f"B  {style.text(b.file)}  rank {b.rank}"),
    ]
    for letter, facts in (("A", a), ("B", b)):
        if facts.verdict:
            lines += style.fold(f"{letter} is {style.text(facts.verdict)}", first="  ", rest="    ")
    if a.median_step_ms and b.median_step_ms:
        ratio = a.median_step_ms / b.median_step_ms
        words = f"B is {number(ratio)}x as fast as A" if ratio >= 1 else f"B takes {number(1 / ratio)}x as long as A"
        colour = "green" if ratio >= 1.02 else "yellow"
        lines += [style.paint(line, "bold", colour) for line in style.fold(f"{words}, by the median step", first="  ")]
    rows: list[tuple[str, ...]] = [("", "A", "B", "B - A")]
    for name, get in _FIGURES:
        left, right = get(a), get(b)
        if left is None and right is None:
            continue
        rows.append((name, _cell(left, style), _cell(right, style), _difference(left, right, style)))
    lines += style.table(rows, right=(1, 2, 3), indent="  ")
    lines += _changes("waits", _by_wait(a), _by_wait(b), style)
    lines += _changes("kernels", _by_kernel(a), _by_kernel(b), style)
    return lines


def _mean(get: Callable[[TraceFacts], Sequence[float | None]]) -> Callable[[TraceFacts], float | None]:
    def value(facts: TraceFacts) -> float | None:
        known = [item for item in get(facts) if item is not None]
        return sum(known) / len(known) if known else None

    return value


_FIGURES: tuple[tuple[str, Callable[[TraceFacts], float | None]], ...] = (
    ("median step, ms", lambda facts: facts.median_step_ms),
    ("waiting for the loader, ms/step", _mean(lambda facts: [step.loader_wait_ms for step in facts.steps])),
    ("host waiting for the device, ms/step", _mean(lambda facts: [step.sync_wait_ms for step in facts.steps])),
    ("computing, ms/step", _mean(lambda facts: [step.compute_ms for step in facts.steps])),
    ("only communicating, ms/step", _mean(lambda facts: [step.communication_ms for step in facts.steps])),
    ("only copying, ms/step", _mean(lambda facts: [step.copy_ms for step in facts.steps])),
    ("device idle, ms/step", _mean(lambda facts: [step.idle_ms for step in facts.steps])),
    ("device idle, %", lambda facts: facts.idle_pct),
    ("computing, %", lambda facts: facts.compute_pct),
    ("other, %", lambda facts: facts.other_pct),
    ("communication beside computing, %", lambda facts: facts.overlap_pct),
    ("kernels a step", lambda facts: facts.kernels_per_step),
    ("median kernel, us", lambda facts: facts.median_kernel_us),
)


def _cell(value: float | None, style: Style) -> str:
    return style.glyph("none") if value is None else number(value)


def _difference(left: float | None, right: float | None, style: Style) -> str:
    if left is None or right is None:
        return style.glyph("none")
    change = right - left
    return f"{'+' if change > 0 else '-' if change < 0 else ''}{number(abs(change))}"


def _by_wait(facts: TraceFacts) -> dict[str, float]:
    steps = max(1, facts.whole_steps)
    found: dict[str, float] = {}
    for wait in facts.waits:
        name = _wait_name(wait)
        found[name] = found.get(name, 0.0) + wait.waited_ms / steps
    return found


def _wait_name(wait: TraceWait) -> str:
    origin = " > ".join(part for part in (wait.origin, wait.inner) if part)
    return " ".join(part for part in (wait.site, origin, wait.call, wait.copy) if part)


def _by_kernel(facts: TraceFacts) -> dict[str, float]:
    steps = max(1, facts.whole_steps)
    found: dict[str, float] = {}
    for kernel in facts.kernels:
        name = short_name(kernel.name)
        found[name] = found.get(name, 0.0) + kernel.ms / steps
    return found


def _changes(title: str, left: dict[str, float], right: dict[str, float], style: Style) -> list[str]:
    """What both or one of them has, the largest changes first."""
    names = sorted({*left, *right}, key=lambda name: (-abs(right.get(name, 0.0) - left.get(name, 0.0)), name))
    names = [name for name in names if abs(right.get(name, 0.0) - left.get(name, 0.0)) >= _SMALL_MS]
    if not names:
        return []
    rows = [
        (
            number(left[name]) if name in left else style.glyph("none"),
            number(right[name]) if name in right else style.glyph("none"),
            style.text(name),
        )
        for name in names[: None if style.verbose > 0 else _SHOWN]
    ]
    return [f"  {title} that changed most, ms/step: A, B", *style.table(rows, right=(0, 1), indent="    ")]
