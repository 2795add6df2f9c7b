"""What profiler traces say: the device's time, idle by cause, one step as a picture, waits, copies, kernels, ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from gpudoctor.model import Case, TraceFacts, TraceTimeline, TraceWait
from gpudoctor.report.text import Style, columns, count, number, pad, size

_SHOWN = 6  # waits, copies and kernels before "and n more"
_RANKS_DETAILED = 2
_LEVELS = (" ░▒▓█", " .:+#")
_LANE_NAMES = {
    "loader": "loader",
    "operators": "operators",
    "waits": "waits",
    "compute": "computing",
    "communication": "communicating",
    "copy": "copying",
}
_CAUSES = (
    ("loader_ms", "the host waits for the loader"),
    ("sync_ms", "after a wait for the device"),
    ("host_ms", "the host launches late"),
    ("launch_ms", "launch latency"),
    ("kernel_ms", "gaps between queued kernels"),
    ("dependency_ms", "queued work waits for others"),
    ("unknown_ms", "launch not in the trace"),
)


def traces(job: Sequence[TraceFacts], style: Style) -> list[str]:
    """The ranks of one job: a table where there are several, and the details of the one that matters most."""
    lines: list[str] = []
    if len(job) > 1:
        lines += ranks(job, style)
    detailed = list(job) if style.verbose > 0 or len(job) <= _RANKS_DETAILED else [_most_telling(job)]
    for facts in detailed:
        if lines:
            lines.append("")
        lines += one(facts, style)
    if len(detailed) < len(job):
        lines += style.fold(f"the other {count(len(job) - len(detailed), 'rank')} in detail with -v", first="  ")
    return lines


def _most_telling(job: Sequence[TraceFacts]) -> TraceFacts:
    """The rank that the others wait for, else the one that idles most."""
    waited_for = [facts for facts in job if facts.waits_for_peers_ms == 0.0 and facts.pace == "slow"]
    return waited_for[0] if waited_for else max(job, key=lambda facts: facts.idle_pct or 0.0)


def ranks(job: Sequence[TraceFacts], style: Style) -> list[str]:
    """One row a rank, and which ranks are slow and fast."""
    none = style.glyph("none")

    def cell(value: float | None, unit: str = "") -> str:
        return none if value is None else number(value) + unit

    rows: list[tuple[str, ...]] = [
        ("rank", "step ms", "idle %", "computing %", "other %", "overlap %", "communication ms", "waits for peers", "")
    ]
    for facts in job:
        steps = max(1, facts.whole_steps)
        communication = facts.communication_ms / steps if facts.communication_ms is not None else None
        rows.append(
            (
                str(facts.rank),
                cell(facts.median_step_ms),
                cell(facts.idle_pct),
                cell(facts.compute_pct),
                cell(facts.other_pct),
                cell(facts.overlap_pct),
                cell(communication),
                cell(facts.waits_for_peers_ms, " ms"),
                facts.pace if facts.pace in ("slow", "fast") else "",
            )
        )
    kept = [place for place in range(len(rows[0])) if any(row[place] not in ("", none) for row in rows[1:])]
    table = style.table([[row[place] for place in kept] for row in rows], right=range(len(kept) - 1), indent="  ")
    if style.width is not None and any(columns(line) > style.width for line in table):
        short = [place for place in kept if place in (0, 1, 2, 3, 4, 8)]
        table = style.table([[row[place] for place in short] for row in rows], right=range(4), indent="  ")
    return [*table, *pace(job, style)]


def pace(job: Sequence[TraceFacts], style: Style) -> list[str]:
    """Which ranks the others wait for."""
    slow = sorted((facts for facts in job if facts.pace == "slow"), key=lambda facts: facts.waits_for_peers_ms or 0.0)
    fast = sorted((facts for facts in job if facts.pace == "fast"), key=lambda facts: -(facts.waits_for_peers_ms or 0))
    if not slow or not fast:
        return []
    most = fast[0].waits_for_peers_ms or 0.0
    text = (
        f"slow: {_listed(slow)} (they come last to the collectives); fast: {_listed(fast)}"
        f" (rank {fast[0].rank} waits {number(most)} ms a step longer than rank {slow[0].rank})"
    )
    return style.fold(text, first="  ", rest="    ")


def _listed(job: Sequence[TraceFacts]) -> str:
    return ("rank " if len(job) == 1 else "ranks ") + ", ".join(str(facts.rank) for facts in job)


def one(facts: TraceFacts, style: Style) -> list[str]:
    """One rank in full."""
    parts = [
        f"trace {style.text(PurePath(facts.file).name)}",
        f"rank {facts.rank}" + (f" of {facts.world_size}" if facts.world_size else ""),
        style.text(facts.device_name) if facts.device_name else None,
        f"{count(facts.whole_steps, 'whole step')}, median {number(facts.median_step_ms)} ms"
        if facts.median_step_ms is not None
        else "no steps marked",
    ]
    lines = style.fold(style.joined(parts), rest="  ")
    if facts.verdict:
        lines += [style.paint(line, "bold") for line in style.fold(style.text(facts.verdict), first="  ", rest="    ")]
    lines += _device_time(facts, style)
    lines += _loader(facts, style)
    if facts.timeline is not None:
        lines += picture(facts.timeline, style)
    lines += _waits(facts, style)
    lines += _copies(facts, style)
    lines += _kernels(facts, style)
    for note in facts.notes:
        lines += style.fold(style.text(note), first="  note: ", rest="    ")
    return lines


def _device_time(facts: TraceFacts, style: Style) -> list[str]:
    if facts.window_ms is None or facts.idle is None:
        return []
    window = facts.window_ms
    rows: list[tuple[str, float]] = [
        ("computing", facts.compute_ms or 0.0),
        ("only communicating", facts.exposed_communication_ms or 0.0),
        ("only copying", facts.exposed_copy_ms or 0.0),
        ("idle", window * (facts.idle_pct or 0.0) / 100),
    ]
    causes = [(f"  {words}", getattr(facts.idle, name)) for name, words in _CAUSES]
    rows += sorted((row for row in causes if row[1] > 0), key=lambda row: -row[1])
    table = []
    for name, value in rows:
        if value <= 0 and name.startswith("only"):
            continue
        share = value / window if window else 0.0
        table.append((name, number(value), f"{100 * share:.1f} %", style.glyph("block") * round(20 * min(1.0, share))))
    text = f"the device in {number(window)} ms"
    if facts.overlap_pct is not None and facts.communication_ms:
        text += (
            f"; {number(facts.communication_ms)} ms of communication, {facts.overlap_pct:.1f} % of it beside computing"
        )
    fits = style.width is None or all(columns(line) <= style.width for line in style.table(table, indent="    "))
    shown = table if fits else [row[:3] for row in table]
    return [
        *style.fold(text, first="  ", rest="    "),
        *style.table(shown, right=(1, 2), indent="    "),
    ]


def _loader(facts: TraceFacts, style: Style) -> list[str]:
    loader = facts.loader
    if loader is None:
        return []
    workers = {True: "with workers", False: "num_workers=0", None: None}[loader.workers]
    mean = loader.waited_ms / max(1, loader.calls)
    batches = "1 batch" if loader.calls == 1 else f"{loader.calls} batches"
    parts = [f"loader {style.text(loader.name)}", workers, batches, f"waited {number(mean)} ms for each"]
    return style.fold(style.joined(parts), first="  ", rest="    ")


def picture(timeline: TraceTimeline, style: Style) -> list[str]:
    """One step: a row a lane, darker where more of the time is occupied."""
    label = max((columns(_LANE_NAMES[lane.name]) for lane in timeline.lanes), default=0)
    room = min(96, (style.width or 112) - label - 13)
    if room < 16 or not timeline.lanes:
        return []
    levels = _LEVELS[0 if style.unicode else 1]
    lines = style.fold(
        f"one step ({style.text(timeline.step)}, {number(timeline.wall_ms)} ms)", first="  ", rest="    "
    )
    for lane in timeline.lanes:
        cells = _resampled(lane.occupied, room)
        bar = "".join(_glyph(share, levels) for share in cells)
        mean = sum(lane.occupied) / len(lane.occupied)
        lines.append(f"    {pad(_LANE_NAMES[lane.name], label)} |{bar}| {100 * mean:3.0f} %")
    middle = f"{number(timeline.wall_ms / 2)}"
    end = f"{number(timeline.wall_ms)} ms"
    scale = "0" + middle.rjust(room // 2 - 1 + len(middle) // 2)
    lines.append(" " * (label + 6) + scale + end.rjust(max(len(end) + 1, room - len(scale))))
    return lines


def _resampled(values: Sequence[float], room: int) -> list[float]:
    """The mean of each of `room` equal parts."""
    if not values:
        return [0.0] * room
    result = []
    for cell in range(room):
        low, high = cell * len(values) / room, (cell + 1) * len(values) / room
        total = 0.0
        place = int(low)
        while place < high and place < len(values):
            total += values[place] * (min(high, place + 1) - max(low, place))
            place += 1
        result.append(total / (high - low))
    return result


def _glyph(share: float, levels: str) -> str:
    limits = (0.04, 0.3, 0.6, 0.9)
    return levels[sum(share >= limit for limit in limits)]


def _waits(facts: TraceFacts, style: Style) -> list[str]:
    if not facts.waits:
        return []
    shown = facts.waits if style.verbose > 0 else facts.waits[:_SHOWN]
    steps = max(1, facts.whole_steps)
    unit = "ms/step" if facts.whole_steps else "ms"
    rows = [
        (
            style.text(_where(wait)),
            style.text(wait.call) + {"h2d": ", to the GPU", "d2h": ", to the host"}.get(wait.copy or "", ""),
            f"{number(wait.waited_ms / steps)} {unit}",
            f"{number(wait.calls / steps)} calls" + ("/step" if facts.whole_steps else ""),
            f"then {number(wait.idle_after_ms / steps)} {unit} idle" if wait.idle_after_ms > 0 else "",
        )
        for wait in shown
    ]
    lines = ["  host waits for the device, by origin", *_fitted(rows, style, right=(2, 3))]
    return lines + _more(len(facts.waits) - len(shown))


def _where(wait: TraceWait) -> str:
    """The line where the trace knows it, else the operators around the call."""
    operators = " > ".join(part for part in (wait.origin, wait.inner) if part)
    if wait.site:
        return f"{wait.site} {operators}".rstrip()
    return operators or "outside of any operator"


def _copies(facts: TraceFacts, style: Style) -> list[str]:
    if not facts.copies:
        return []
    names = {"h2d": "to the GPU", "d2h": "to the host", "d2d": "on the GPU", "p2p": "to another GPU"}
    shown = facts.copies if style.verbose > 0 else facts.copies[:_SHOWN]
    rows = [
        (
            names.get(item.kind, item.kind),
            item.memory if item.memory != "device" else "",
            count(item.calls, "call"),
            size(item.bytes) if item.bytes is not None else "",
            f"{number(item.ms)} ms",
            f"{number(item.gb_s)} GB/s" if item.gb_s is not None else "",
            f"{number(item.exposed_ms)} ms alone",
        )
        for item in shown
    ]
    return ["  copies", *_fitted(rows, style, right=(2, 3, 4, 5, 6)), *_more(len(facts.copies) - len(shown))]


def _kernels(facts: TraceFacts, style: Style) -> list[str]:
    if not facts.kernels:
        return []
    shown = facts.kernels if style.verbose > 0 else facts.kernels[:_SHOWN]
    rows = [
        (
            f"{number(item.ms)} ms",
            f"{item.pct:.1f} %",
            count(item.calls, "call"),
            style.text(item.name if style.verbose > 0 else short_name(item.name)),
        )
        for item in shown
    ]
    title = "  longest on the device"
    if facts.kernels_per_step is not None and facts.median_kernel_us is not None:
        title += f" ({number(facts.kernels_per_step)} kernels a step, median {number(facts.median_kernel_us)} us)"
    return [*style.fold(title.strip(), first="  ", rest="    "), *_fitted(rows, style, right=(0, 1, 2))]


def _fitted(rows: Sequence[Sequence[str]], style: Style, right: Sequence[int]) -> list[str]:
    """Aligned rows, or folded ones where the terminal is too narrow."""
    lines = style.table(rows, right=right, indent="    ")
    if style.width is None or all(columns(line) <= style.width for line in lines):
        return lines
    return [
        line
        for row in rows
        for line in style.fold("  ".join(cell for cell in row if cell), first="    ", rest="      ")
    ]


def _more(left: int) -> list[str]:
    return [f"    and {left} more (-v)"] if left > 0 else []


def short_name(name: str) -> str:
    """A kernel's name without return type, template and call arguments."""
    plain = re.sub(r"\(anonymous namespace\)::", "", name)
    plain = re.sub(r"^(?:void|static|int) ", "", plain)
    return re.split(r"[<(]", plain, maxsplit=1)[0].strip()[:80] or name[:80]


def device_names(case: Case) -> list[str]:
    """The GPUs that the traces of a Case name, each once."""
    return list(dict.fromkeys(facts.device_name for facts in case.traces if facts.device_name))
