"""From a Recording to TraceFacts: breakdown, idle by cause, copies, waits, steps, and what bounds the step."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Literal

from gpudoctor.model import Bound, DeviceWork, TraceCopies, TraceFacts, TraceIdle, TraceKernel
from gpudoctor.read import breakdown
from gpudoctor.read.breakdown import Device, ms
from gpudoctor.read.intervals import Union, union
from gpudoctor.read.kineto_names import copy_of
from gpudoctor.read.recording import COMMUNICATION, COMPUTE, COPY, MEMSET, Recording
from gpudoctor.read.trace_steps import (
    Steps,
    find_steps,
    loader_facts,
    loader_union,
    operators_in,
    step_facts,
    timeline,
    typical_step,
)
from gpudoctor.read.trace_waits import Origins, Waits, find_waits, group_waits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_KERNELS_SHOWN = 10
_LOADER_BOUND = 0.10  # of the step, as in rule LDR021
_KINDS: dict[int, DeviceWork] = {COMPUTE: "compute", COMMUNICATION: "communication", COPY: "copy", MEMSET: "copy"}


def trace_facts(
    recording: Recording,
    *,
    file: str,
    form: Literal["kineto", "nsys"],
    rank: int,
    rank_from: Literal["trace", "name", "order"],
    device: int | None = None,
) -> TraceFacts:
    """The facts of one rank. A trace without device activity gives its steps and loader waits; the rest is None.

    `device`: whose work counts; without it the busiest device's, and the recording is used up.
    """
    steps = find_steps(recording, "ProfilerStep" if form == "kineto" else "nvtx")
    work = breakdown.device_work(recording, steps.window_before, device, keep=device is not None)
    loader = loader_union(recording)
    waits = find_waits(recording, work, steps.span)
    origins = Origins(recording, waits)
    shown = typical_step(steps)
    lanes: dict[str, Union] = {"loader": loader, "operators": operators_in(recording, shown), "waits": waits.union()}
    if device is None:
        recording.operators.clear()
        recording.frames.clear()
    whole = step_facts(steps, work, loader, lanes["waits"])
    facts = TraceFacts(
        file=file,
        format=form,
        rank=rank,
        rank_from=rank_from,
        world_size=recording.world_size,
        device=work.device if work else None,
        device_name=_device_name(recording, work),
        events=recording.events,
        truncated=recording.truncated,
        steps_from=steps.source,
        whole_steps=len(steps.whole),
        steps=whole,
        median_step_ms=round(median(step.wall_ms for step in whole), 4) if whole else None,
        loader=loader_facts(recording, steps.span),
        timeline=timeline(shown, lanes, work),
        notes=_notes(recording, steps, work),
    )
    return _with_device(facts, recording, steps, work, loader, waits, origins) if work else facts


def _with_device(
    facts: TraceFacts,
    recording: Recording,
    steps: Steps,
    work: Device,
    loader: Union,
    waits: Waits,
    origins: Origins,
) -> TraceFacts:
    import dataclasses

    import numpy as np

    start, end = work.window
    window = max(1, end - start)
    compute, communication, copy = work.of(COMPUTE), work.of(COMMUNICATION), work.of(COPY, MEMSET)
    busy = work.of(COMPUTE, COMMUNICATION, COPY, MEMSET)
    waiting = waits.union()
    gaps, launched = breakdown.gaps_with_next(work, work.window)
    idle = breakdown.idle_causes(gaps, launched, loader, waiting)
    grouped = group_waits(origins, waits, idle_after(gaps, launched, loader, waits), len(steps.whole) or None)
    del gaps, launched  # as large as the trace
    span = steps.span or work.window
    bound, verdict, in_steps = judge(steps, busy, work, loader, waiting, span)
    kernels = work.kind <= COMMUNICATION
    counted = int((kernels & (work.launched >= span[0]) & (work.launched < span[1])).sum())
    computing = work.kind == COMPUTE
    lengths = work.end[computing] - work.start[computing]
    return dataclasses.replace(
        facts,
        activities=len(work.start),
        window_ms=ms(window),
        idle_pct=_pct(window - busy.total(), window),
        compute_pct=_pct(compute.total(), window),
        other_pct=_pct(busy.total() - compute.total(), window),
        overlap_pct=_pct(compute.overlap(communication), communication.total()) if communication.total() else None,
        compute_ms=ms(compute.total()),
        communication_ms=ms(communication.total()),
        copy_ms=ms(copy.total()),
        exposed_communication_ms=ms(communication.without(compute)),
        exposed_copy_ms=ms(busy.total() - work.of(COMPUTE, COMMUNICATION).total()),
        idle=idle,
        kernels_per_step=round(counted / len(steps.whole), 2) if steps.whole else None,
        median_kernel_us=round(float(np.median(lengths)) / 1e3, 3) if len(lengths) else None,
        streams=breakdown.streams(work),
        copies=_copies(recording, work, compute),
        waits=grouped,
        kernels=_kernels(recording, work),
        loader=dataclasses.replace(facts.loader, idle_ms=in_steps.loader_ms) if facts.loader else None,
        bound=bound,
        verdict=verdict,
    )


def _pct(part: int, whole: int) -> float:
    return round(100 * part / whole, 3)


def idle_after(gaps: Union, launched: Ints, loader: Union, waits: Waits) -> Ints:
    """For each wait, how long the device idled from a moment in it until the next work was launched."""
    import numpy as np

    found = np.zeros(len(waits), dtype=np.int64)
    if not len(waits):
        return found
    place = np.searchsorted(waits.start, gaps.start, side="right") - 1
    within = (place >= 0) & (waits.end[np.maximum(place, 0)] >= gaps.start) & (launched > gaps.start)
    until = np.clip(launched, gaps.start, gaps.end)
    idle = until - gaps.start - (loader.before(until) - loader.before(gaps.start))
    np.add.at(found, place[within], idle[within])
    return found


def _copies(recording: Recording, work: Device, compute: Union) -> tuple[TraceCopies, ...]:
    import numpy as np

    names = list(recording.names)
    rows, size = work.copies, work.copy_bytes
    numbers, stream = work.name[rows], work.stream[rows]
    start, end = work.start[rows], work.end[rows]
    kinds: dict[tuple[str, str], list[int]] = {}
    for number in np.unique(numbers).tolist():
        kinds.setdefault(copy_of(names[number]), []).append(number)
    main = _main_stream(work)
    found = []
    for (kind, memory), members in kinds.items():
        mine = np.isin(numbers, members)
        known = bool((size[mine] >= 0).all())
        total = int(size[mine].sum()) if known else 0
        time = int((end[mine] - start[mine]).sum())
        found.append(
            TraceCopies(
                kind=kind,  # type: ignore[arg-type]
                memory=memory,  # type: ignore[arg-type]
                calls=int(mine.sum()),
                bytes=total if known else None,
                ms=ms(time),
                gb_s=round(total / time, 4) if time and known else None,
                exposed_ms=ms(union(start[mine], end[mine], ordered=True).without(compute)),
                with_compute=int((mine & (stream == main)).sum()) if main is not None else 0,
            )
        )
    return tuple(sorted(found, key=lambda item: -item.ms))


def _main_stream(work: Device) -> int | None:
    """The stream that computes for the longest time."""
    import numpy as np

    times: dict[int, int] = {}
    for stream in work.streams:
        rows = np.flatnonzero((work.stream == stream) & (work.kind == COMPUTE))
        if len(rows):
            times[stream] = int((work.end[rows] - work.start[rows]).sum())
    return max(times, key=lambda one: times[one], default=None)


def _kernels(recording: Recording, work: Device) -> tuple[TraceKernel, ...]:
    """The names with the most time."""
    import numpy as np

    sums = np.bincount(work.name, weights=work.end - work.start)
    counts = np.bincount(work.name)
    kinds = np.zeros(len(sums), dtype=np.int8)
    kinds[work.name] = work.kind
    names = list(recording.names)
    total = max(1.0, float(sums.sum()))
    return tuple(
        TraceKernel(
            name=names[number][:500],
            kind=_KINDS[int(kinds[number])],
            calls=int(counts[number]),
            ms=ms(sums[number]),
            pct=round(100 * float(sums[number]) / total, 2),
        )
        for number in np.argsort(-sums, kind="stable")[:_KERNELS_SHOWN].tolist()
        if counts[number]
    )


def judge(
    steps: Steps,
    busy: Union,
    work: Device,
    loader: Union,
    waiting: Union,
    span: tuple[int, int],
) -> tuple[Bound, str, TraceIdle]:
    """What bounds the whole steps (the window, where there are none), in one sentence with the most it can win, and
    the idle time in them by cause."""
    start, end = span
    wall = max(1, end - start)
    compute = work.of(COMPUTE).within(start, end)
    communication = work.of(COMPUTE, COMMUNICATION).within(start, end) - compute
    copy = busy.within(start, end) - compute - communication
    gaps, launched = breakdown.gaps_with_next(work, span)
    idle = breakdown.idle_causes(gaps, launched, loader, waiting)
    count = max(1, len(steps.whole))
    unit = " a step" if steps.whole else ""

    def of_wall(part: float) -> str:
        return f"{part / count / 1e6:.3g} of {wall / count / 1e6:.3g} ms{unit} ({100 * part / wall:.0f} %)"

    by_loader = idle.loader_ms * 1e6
    if by_loader >= _LOADER_BOUND * wall:
        text = f"loader bound: the device idles {of_wall(by_loader)} while the host waits for a batch"
        return "loader", f"{text}: {_at_most(by_loader, wall)} from loading ahead", idle
    idling = gaps.total()
    by_host = (idle.host_ms + idle.sync_ms + idle.launch_ms) * 1e6
    by_others = (idle.dependency_ms + idle.unknown_ms) * 1e6
    parts: dict[Bound, float] = {
        "device": compute,
        "communication": communication,
        "copy": copy,
        "host": by_host,
        "unknown": by_others,
    }
    bound = max(parts, key=lambda name: parts[name])
    if bound == "device":
        rest = f"; it idles {of_wall(idling)}, {_reason(idle)}: {_at_most(idling, wall)}" if idling >= wall / 20 else ""
        return bound, f"device bound: it computes {of_wall(compute)}{rest}", idle
    if bound == "host":
        only = TraceIdle(host_ms=idle.host_ms, sync_ms=idle.sync_ms, launch_ms=idle.launch_ms)
        text = f"host bound: the device idles {of_wall(by_host)} for work that the host has not launched yet"
        why = "" if only.host_ms >= max(only.sync_ms, only.launch_ms) else f", {_reason(only)}"
        return bound, f"{text}{why}: {_at_most(by_host, wall)}", idle
    if bound == "unknown":
        text = f"the device idles {of_wall(by_others)}, {_reason(idle)}"
        return bound, f"{text}: {_at_most(by_others, wall)}", idle
    does = "communicates" if bound == "communication" else "copies"
    text = f"{bound} bound: the device only {does} in {of_wall(parts[bound])}"
    return bound, f"{text}: {_at_most(parts[bound], wall)} if it were hidden", idle


def _at_most(part: float, wall: float) -> str:
    """The factor that is left when a part of the time is gone."""
    factor = wall / max(1.0, wall - part)
    return f"at most {factor:.2f}x" if factor < 10 else "at most 10x and more"


def _reason(idle: TraceIdle) -> str:
    """The largest cause, in words."""
    words = {
        "loader": "mostly while the host waits for the loader",
        "sync": "mostly after a wait for the device",
        "host": "mostly for launches that come late",
        "launch": "mostly launch latency",
        "kernel": "mostly in short gaps between queued kernels",
        "dependency": "mostly with work queued that waits for another stream, event or process",
        "unknown": "for reasons that the trace does not show",
    }
    return words[max(words, key=lambda name: getattr(idle, f"{name}_ms"))]


def _device_name(recording: Recording, work: Device | None) -> str | None:
    if work is not None and work.device in recording.device_names:
        return recording.device_names[work.device]
    names = set(recording.device_names.values())
    return names.pop() if len(names) == 1 else None


def _notes(recording: Recording, steps: Steps, work: Device | None) -> tuple[str, ...]:
    notes = list(recording.notes)
    if work is None:
        notes.append("no GPU events: record with ProfilerActivity.CUDA (torch.profiler) or --trace=cuda (nsys)")
    elif work.others:
        notes.append(f"{work.others} activities on other devices are left out")
    if steps.source == "none":
        notes.append("no steps are marked (profiler.step() marks them): the figures are of the whole recording")
    elif steps.source == "optimizer":
        notes.append("no steps are marked: they are counted from one optimizer step to the next")
    elif len(steps.whole) == 1 and steps.window_before is None:
        notes.append("only one step is marked: the device's work of it may be cut off")
    if recording.truncated:
        notes.append(f"the file is cut off or damaged: what its first {recording.events} events tell is shown")
    if recording.not_understood:
        notes.append(f"{recording.not_understood} events were not understood")
    return tuple(notes)
