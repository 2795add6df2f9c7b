"""Where the time of a watched command went: its verdict, the host's and the device's share of a step, one step as a
picture, and the lines that wait."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from gpudoctor.model import Case, CopySite, SyncSite, TraceFacts, Watched, WatchRecord
from gpudoctor.report.text import Style, columns, count, number, size
from gpudoctor.report.trace import picture

_SITES = 8  # lines of code before "and n more"
_BAR = 24
_DEVICE = (
    ("compute", "the GPU computes"),
    ("communication", "the GPU only communicates"),
    ("copy", "the GPU only copies"),
    ("idle_loader", "it idles: the step waits for a batch"),
    ("idle_sync", "it idles: after a wait for the GPU"),
    ("idle_host", "it idles: work is launched late"),
    ("idle_other", "it idles: between queued work"),
)


def watched(case: Case, style: Style) -> list[str]:
    """One block for each process that made steps; nothing when no command was watched."""
    item = case.watched
    if item is None:
        return []
    lines = style.fold("watched: " + " ".join(style.text(part) for part in item.command), rest="  ")
    for place, record in enumerate(item.records):
        lines += _record(case, item, place, record, style)
    if not item.records:
        lines.append("  no step was seen")
    return lines


def _record(case: Case, item: Watched, place: int, record: WatchRecord, style: Style) -> list[str]:
    several = len(item.records) > 1
    lines = style.fold(style.joined(_head(record, several, style)), first="  ", rest="    ")
    if record.counts_differ:
        lines += style.fold(
            f"counts differ: {record.optimizer_steps} optimizer steps, {record.batches} batches,"
            f" {record.backwards} backward calls (--step-at FILE:LINE decides)",
            first="  ",
            rest="    ",
        )
    if record.verdict:
        lines += [style.paint(line, "bold") for line in style.fold(style.text(record.verdict), first="  ", rest="    ")]
    if record.steps:
        lines += _breakdown(record, style)
        lines += _device(case, f"rank:{record.rank if record.rank is not None else place}", style)
    facts = _trace(case, record, place)
    if facts is not None and facts.timeline is not None and (not several or style.verbose > 0 or not place):
        lines += picture(facts.timeline, style)
    lines += _sites(record, style)
    for loader in record.loaders:
        if loader in record.feeding or (style.verbose > 0 and loader.batches):
            details = [
                f"{style.text(loader.site)}",
                style.text(loader.loader_class),
                f"num_workers {loader.num_workers}",
                f"batch {loader.batch_size}" if loader.batch_size is not None else None,
                f"pin_memory {'on' if loader.pin_memory else 'off'}",
                f"{size(loader.batch_bytes)} a batch" if loader.batch_bytes else None,
            ]
            lines += style.fold("loader " + style.joined(details), first="  ", rest="    ")
    for note in record.notes:
        lines += style.fold(style.text(note), first="  note: ", rest="    ")
    return lines


def _head(record: WatchRecord, several: bool, style: Style) -> list[str | None]:
    steps = record.steady
    rate = record.batches_per_s if record.counts_differ else record.steps_per_s
    unit = "batches/s" if record.counts_differ else "steps/s"
    warm_up = len(record.steps) - len(steps)
    return [
        f"rank {record.rank}" if several and record.rank is not None else None,
        count(len(record.steps), "step") + (f" in {number(record.watched_s)} s" if record.watched_s else ""),
        f"the first {warm_up} are warm-up" if warm_up > 1 else "the first is warm-up" if warm_up else None,
        f"{number(rate)} {unit}" if rate is not None else None,
        f"median step {number(median(step.wall_ms for step in steps))} ms" if steps else None,
        style.text(record.device) if record.device else None,
    ]


def _breakdown(record: WatchRecord, style: Style) -> list[str]:
    steps = record.steady
    total = fmean(step.wall_ms for step in steps)
    waits = {
        "waiting for the loader": fmean(step.loader_wait_ms for step in steps),
        "waiting for copies": fmean(step.copy_wait_ms for step in steps),
        "waiting for the GPU": fmean(step.sync_wait_ms for step in steps) + _hidden(record),
        "waiting for other ranks": fmean(step.communication_ms for step in steps),
    }
    if record.communication is None:
        del waits["waiting for other ranks"]
    if not record.cuda and not any(copy.kind != "none" for copy in record.copies):
        del waits["waiting for copies"], waits["waiting for the GPU"]
    waits["the host's own work" if record.cuda else "the rest"] = max(0.0, total - sum(waits.values()))
    return _bars(list(waits.items()), total, style)


def _hidden(record: WatchRecord) -> float:
    """Waits that only the profiler times, in milliseconds a step."""
    return sum(sync.window_waited_ms or 0.0 for sync in record.syncs if sync.detected_by == "sync-debug-mode")


def _bars(values: Sequence[tuple[str, float]], total: float, style: Style) -> list[str]:
    rows = []
    for name, value in values:
        share = value / total if total else 0.0
        bar = style.glyph("block") * round(_BAR * min(1.0, share))
        rows.append((name, f"{number(value)} ms/step", f"{100 * share:.0f} %", bar))
    lines = style.table(rows, right=(1, 2), indent="  ")
    if style.width is not None and any(columns(line) > style.width for line in lines):
        lines = style.table([row[:3] for row in rows], right=(1, 2), indent="  ")
    return lines


def _device(case: Case, subject: str, style: Style) -> list[str]:
    """The device's share of the same step, from the Measurements."""
    found = {item.metric: item for item in case.measurements if item.subject == subject}
    step, busy = found.get("step.ms"), found.get("step.device_busy")
    if step is None or busy is None:
        return []
    rows = []
    for name, words in _DEVICE:
        item = found.get(f"step.device_{name}_ms")
        if item is not None and (item.value > 0 or name == "compute"):
            rows.append((words, item.value))
    lines = _bars(rows, step.value, style)
    kernels, length = found.get("step.kernels"), found.get("step.kernel_us")
    if kernels is not None and length is not None:
        steps = busy.settings.get("profiled_steps")
        profiled = f"in {count(steps, 'profiled step')}" if isinstance(steps, int) else "in the profiled steps"
        text = f"{number(kernels.value)} kernels a step, median {number(length.value)} us, {profiled}"
        lines += style.fold(text, first="  ", rest="    ")
    return lines


def _trace(case: Case, record: WatchRecord, place: int) -> TraceFacts | None:
    rank = record.rank if record.rank is not None else place
    return next((facts for facts in case.traces if facts.rank == rank), None)


def _sites(record: WatchRecord, style: Style) -> list[str]:
    """Lines by waiting time a step. The first wait of a step takes the time that the later ones then need not wait."""
    steps = len(record.steady) or 1
    found: list[tuple[float, tuple[str, str, str, str]]] = []
    for sync in record.syncs:
        calls = _calls(sync)
        if calls:
            what = f"{style.text(sync.function)}()" if sync.detected_by != "sync-debug-mode" else "hidden sync"
            if sync.via is not None:
                what += f" in {style.text(sync.via.rpartition('.')[2])}()"
            waited = _waited(sync) / steps if sync.detected_by != "sync-debug-mode" else sync.window_waited_ms
            detail = "" if sync.on_device or record.cuda else "on CPU tensors"
            found.append(
                (waited or 0.0, (style.text(sync.site), what, _ms(waited, style), _a_step(calls, steps, detail)))
            )
    for copy in record.copies:
        calls = _calls(copy)
        if calls and copy.kind != "none":
            waited = _waited(copy) / steps
            what = f"{style.text(copy.function)}() {'to the GPU' if copy.kind == 'h2d' else 'to the host'}"
            detail = _a_step(calls, steps, _traits(copy))
            found.append((waited, (style.text(copy.site), what, _ms(waited, style), detail)))
    found.sort(key=lambda entry: -entry[0])
    shown = [row for _, row in (found if style.verbose > 0 else found[:_SITES])]
    lines = style.table(shown, right=(2,), indent="    ")
    if style.width is not None and any(columns(line) > style.width for line in lines):
        lines = []
        for site, what, waited_text, detail in shown:
            lines += style.fold(f"{site}  {what}  {waited_text}, {detail}", first="    ", rest="      ")
    if len(shown) < len(found):
        lines.append(f"    and {len(found) - len(shown)} more (-v)")
    if not lines:
        return []
    waiting = sum(waited >= 0.001 for waited, _ in found)
    title = "waited here, by line"
    if waiting > 1 and record.cuda:
        title += " (the first wait of a step covers for the later ones: only all of them together can be won)"
    return [*style.fold(title, first="  ", rest="    "), *lines]


def _calls(site: SyncSite | CopySite) -> int:
    return site.steady_calls if site.steady_calls is not None else site.calls_in_steps


def _waited(site: SyncSite | CopySite) -> float:
    return site.steady_waited_ms if site.steady_waited_ms is not None else site.waited_ms


def _ms(value: float | None, style: Style) -> str:
    return f"{number(value)} ms/step" if value is not None else f"{style.glyph('none')} ms/step"


def _a_step(calls: int, steps: int, more: str) -> str:
    rate = calls / steps
    text = f"{rate:.0f}" if round(rate) and abs(rate - round(rate)) < 0.05 else number(rate)
    return f"{text}x a step" + (f", {more}" if more else "")


def _traits(copy: CopySite) -> str:
    traits = [
        f"{size(copy.bytes / max(1, copy.calls))} each" if copy.bytes else None,
        "pinned" if copy.pinned == copy.calls else "not pinned" if not copy.pinned else "partly pinned",
        "non_blocking" if copy.non_blocking == copy.calls else None,
    ]
    return ", ".join(trait for trait in traits if trait)
