"""What tune-loader found: the loader, the curve of rate over workers, the choice, and the diff of its line."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from gpudoctor.model import LoaderStudy, LoaderTrial, Prescription
from gpudoctor.report.text import Style, columns, count, number, pad, size

_BAR = 30
_LIMITS = {
    "storage": "reading from storage",
    "waiting": "waiting inside the rows (disk, network, sleep), which more workers overlap",
    "decoding": "computing the rows (decoding, augmentation, Python)",
    "collating": "collating the rows into batches",
    "transport": "handing batches over between processes",
    "step": "the training step, not the loader",
}


def study(item: LoaderStudy, prescription: Prescription | None, style: Style) -> list[str]:
    """All sections of one study."""
    lines = _facts(item, style)
    lines += ["", *_curve(item, style)] if any(trial.rate for trial in item.trials) else []
    lines += _faults(item, style)
    if item.limit != "unknown":
        lines += style.fold(f"{_LIMITS[item.limit]} ({style.text(item.limit_reason)})", first="limit    ", rest=" " * 9)
    lines += _verdict(item, style)
    if prescription is not None:
        lines += _diff(prescription, style)
    return lines


def _facts(item: LoaderStudy, style: Style) -> list[str]:
    loader, preflight = item.loader, item.preflight
    rows = f"{loader.dataset_len} rows" if loader.dataset_len is not None else "rows of unknown number"
    parts = [
        style.text(item.site),
        style.text(loader.dataset_class),
        rows,
        f"batches of {loader.batch_size}" if loader.batch_size else "batches made by the dataset",
        f"{size(preflight.batch_bytes)} each" if preflight.batch_bytes else None,
        f"num_workers {loader.num_workers}" if item.present_known else None,
        item.start_method if item.start_method != "fork" else None,
        count(item.ranks, "rank") if item.ranks > 1 else None,
    ]
    lines = style.fold("loader: " + style.joined(parts), rest="  ")
    costs = []
    if preflight.row_ms is not None:
        costs.append(f"a row takes {number(preflight.row_ms)} ms")
        if preflight.row_variation is not None and preflight.row_variation > 0.5:
            costs.append(f"and up to {number(preflight.row_max_ms or 0.0)} ms")
    if preflight.cpu_share is not None:
        costs.append(f"{preflight.cpu_share:.0%} of it CPU time")
    if preflight.collate_ms is not None:
        costs.append(f"collating {number(preflight.collate_ms)} ms a batch")
    if item.step_ms:
        costs.append(f"a step {number(item.step_ms)} ms ({item.step_from or 'given'})")
    lines += style.fold(", ".join(costs), first="  ", rest="  ") if costs else []
    if item.most_because:
        lines += style.fold(
            f"at most {count(item.most_workers, 'worker')}: {style.text(item.most_because)}", first="  ", rest="  "
        )
    return lines


def groups(trials: Iterable[LoaderTrial]) -> list[list[LoaderTrial]]:
    """The trials of the real loader that gave a rate, by setting: rows first, then by workers and prefetch."""
    found: dict[tuple[bool, int, int, bool, bool], list[LoaderTrial]] = {}
    for trial in trials:
        if trial.rate is not None and trial.part == "real" and trial.purpose not in ("pin", "check"):
            key = (trial.whole_batch, trial.workers, trial.prefetch, not trial.in_order, trial.one_thread)
            found.setdefault(key, []).append(trial)
    return [found[key] for key in sorted(found)]


def _curve(item: LoaderStudy, style: Style) -> list[str]:
    rows = groups(item.trials)
    medians = [statistics.median(trial.rate or 0.0 for trial in group) for group in rows]
    top = max(medians)
    chosen = item.choice
    cells = []
    for group, rate in zip(rows, medians, strict=True):
        first = group[0]
        rates = [trial.rate or 0.0 for trial in group]
        spread = f"{style.glyph('plus-minus')}{(max(rates) - min(rates)) / 2 / rate:.0%}" if len(rates) > 1 else ""
        memory = [trial.private_bytes for trial in group if trial.private_bytes]
        starts = [trial.first_batch_s for trial in group if trial.first_batch_s is not None]
        shared = [trial.shm_bytes for trial in group if trial.shm_bytes]
        own = is_present(first, item)
        best = chosen is not None and is_choice(first, item)
        marks = ["now" if own else None, "best" if best and item.verdict == "change" else None]
        cells.append(
            (
                str(first.workers),
                extras(first),
                number(rate),
                spread,
                f"{number(statistics.median(starts))} s" if starts else "",
                size(max(memory)) if memory else "",
                size(max(shared)) if shared and first.workers else "",
                " ".join(mark for mark in marks if mark),
            )
        )
    head = ("workers", "", "samples/s", "", "first batch", "memory", "shm", "")
    plain = style.table([head, *cells], right=(0, 2, 4, 5, 6), indent="  ")
    for least in (6, 5, 4, 3):  # a narrow terminal loses columns from the right, but for the marks
        if style.width is None or max(columns(line) for line in plain) <= style.width:
            break
        rows_shown = [(*row[:least], row[-1]) for row in (head, *cells)]
        plain = style.table(rows_shown, right=(0, 2, 4, 5)[: least // 2 + 1], indent="  ")
    width = max(columns(line) for line in plain)
    room = 0 if style.width is None else min(_BAR, style.width - width - 2)
    lines = [plain[0]]
    for line, rate in zip(plain[1:], medians, strict=True):
        bar = "  " + style.glyph("block") * max(0, round(room * rate / top)) if room >= 8 and top > 0 else ""
        lines.append((pad(line, width) + bar).rstrip())
    return lines


def extras(trial: LoaderTrial) -> str:
    """How the loader was run besides its number of workers; empty for rows in order with torch's own prefetch."""
    words = [
        f"prefetch {trial.prefetch}" if trial.workers and trial.prefetch != 2 else None,
        "whole batches" if trial.whole_batch else None,
        "any order" if not trial.in_order else None,
        "1 thread each" if trial.one_thread else None,
    ]
    return ", ".join(word for word in words if word)


def is_present(trial: LoaderTrial, item: LoaderStudy) -> bool:
    """Whether the trial ran the user's own setting."""
    plain = not (trial.whole_batch or trial.one_thread or not trial.in_order)
    same = trial.workers == item.loader.num_workers
    same = same and (not trial.workers or trial.prefetch == (item.loader.prefetch_factor or 2))
    return item.present_known and plain and same


def is_choice(trial: LoaderTrial, item: LoaderStudy) -> bool:
    choice = item.choice
    assert choice is not None
    prefetch = choice.arguments.get("prefetch_factor") or item.loader.prefetch_factor or 2
    in_order = choice.arguments.get("in_order", item.loader.in_order)
    return (
        trial.workers == choice.arguments.get("num_workers")
        and (not trial.workers or trial.prefetch == prefetch)
        and trial.whole_batch == choice.whole_batch
        and (not trial.workers or trial.in_order == in_order)
        and (not trial.workers or trial.one_thread == choice.one_thread)
    )


def _faults(item: LoaderStudy, style: Style) -> list[str]:
    lines: list[str] = []
    seen: set[str] = set()
    failed: Sequence[tuple[str, object]] = [
        (f"{count(trial.workers, 'worker')}", trial.fault) for trial in item.trials if trial.fault is not None
    ]
    if item.preflight.fault is not None:
        failed = [("preflight", item.preflight.fault), *failed]
    for where, fault in failed:
        text = getattr(fault, "text", "")
        if text in seen:
            continue
        seen.add(text)
        site = getattr(fault, "site", None)
        lines += style.fold(
            f"{where}: {style.text(text)}" + (f" ({style.text(site)})" if site else ""), first="failed   ", rest=" " * 9
        )
        for frame in getattr(fault, "stack", ())[: 6 if style.verbose > 0 else 3]:
            lines += style.fold(style.text(frame), first=" " * 9, rest=" " * 11)
    return lines


def _verdict(item: LoaderStudy, style: Style) -> list[str]:
    choice = item.choice
    text = f"{item.verdict}: {style.text(item.reason)}"
    lines = [style.paint(line, "bold") for line in style.fold(text, first="", rest="  ")]
    if choice is None or item.verdict == "no verdict":
        return lines
    told = ", ".join(f"{style.text(name)}={value}" for name, value in choice.arguments.items())
    if choice.whole_batch:
        told = f"fetch whole batches, {told}"
    if choice.one_thread:
        told += ", one BLAS/OpenMP/OpenCV thread a worker (OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1)"
    if choice.rate is not None:
        told += f": {number(choice.rate)} samples/s"
        if choice.low is not None and choice.high is not None:
            told += f" ({number(choice.low)}{style.glyph('dash')}{number(choice.high)})"
    return lines + style.fold(told, first="settings ", rest=" " * 9)


def _diff(prescription: Prescription, style: Style) -> list[str]:
    lines: list[str] = []
    if prescription.patch:
        for line in prescription.patch.split("\n"):
            colour = {"+": "green", "-": "red"}.get(line[:1], "dim")
            shown = style.text(line.removesuffix("\r"))
            lines.append(style.paint(shown, colour) if line else "")
        return ["", *lines[:-1]] if lines and not lines[-1] else ["", *lines]
    for change in prescription.changes:
        if not change.edits and change.reason:
            lines += style.fold(style.text(change.reason), first="diff     ", rest=" " * 9)
    return lines
