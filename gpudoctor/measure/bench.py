"""What `bench-pcie` measures, and in which order; see bench_copies."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpudoctor.errors import GpudoctorError
from gpudoctor.measure import conditions, copies, early, groups
from gpudoctor.measure.copies import Probe, Progress, Run
from gpudoctor.measure.lock import exclusive
from gpudoctor.model import Case, Gpu, Measurement

Level = Literal["quick", "default", "thorough"]

PROBES: dict[Level, tuple[Probe, ...]] = {
    "quick": (*copies.ONE_WAY, *copies.BOTH_WAYS, *copies.LOCAL, *copies.LATENCY),
    "default": (*copies.ONE_WAY, *copies.BOTH_WAYS, *copies.LOCAL, *copies.LATENCY, *copies.PAGEABLE),
    "thorough": (
        *copies.ONE_WAY,
        *copies.BOTH_WAYS,
        *copies.LOCAL,
        *copies.LATENCY,
        *copies.PAGEABLE,
        *copies.CURVES,
    ),
}
SECONDS: dict[Level, float] = {"quick": 1.5, "default": 3.0, "thorough": 12.0}
_GROUP_SECONDS: dict[Level, float] = {"quick": 0.3, "default": 0.5, "thorough": 2.0}  # of one window
_PEER_SECONDS: dict[Level, float] = {"quick": 0.05, "default": 0.1, "thorough": 0.5}  # of one kind of one pair
_NODE_SECONDS: dict[Level, float] = {"quick": 0.3, "default": 0.5, "thorough": 2.0}  # of one node of one GPU
METRICS = tuple(probe.kind for probe in PROBES["thorough"])


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """`case`: the Case with link and throttle readings under load (state "load"). `interrupted`: by Ctrl-C."""

    case: Case
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    interrupted: bool = False


def bench_copies(
    case: Case,
    *,
    level: Level = "default",
    seconds_per_gpu: float | None = None,
    allow_busy: bool = False,
    indices: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    engine: str | None = None,
    deadline_s: float = 60.0,
    on_progress: Progress | None = None,
) -> BenchResult:
    """Measure copies of the GPUs in `case`: one GPU after the other, then all at once, per NUMA node, and between them.

    level: "quick" leaves out pageable copies and everything beyond one GPU; "thorough" adds rate by size and takes its
    time. seconds_per_gpu: copying time of one GPU; start-up comes on top. indices: only these GPUs. only: these metrics
    of single GPUs and nothing else. engine: "cuda" (cuda-bindings), "torch", or None for the lightest that is there.
    deadline_s: after which a GPU is given up. A GPU that works for somebody else is left alone unless allow_busy. What
    fails becomes a line in `errors` and costs that probe only; Ctrl-C ends the run and keeps what was measured.
    Rates are GB/s (1e9 bytes per second) one way, latencies microseconds.
    Raises GpudoctorError for an unknown index or metric, and when another gpudoctor is measuring on this machine.
    """
    chosen = _choose(case, indices)
    probes = _probes(level, only)
    run = Run(case=case, deadline_s=deadline_s, engine=engine, on_progress=on_progress)
    run.total = len(chosen) * len(probes)
    if not chosen:
        early.discard()
        run.notes.append("no GPU answers: nothing to measure")
        return _result(run, interrupted=False)
    interrupted = False
    before = conditions.read()
    try:
        with exclusive() as without_lock:
            if without_lock:
                run.notes.append(without_lock)
            # A choice among the copies takes its share of the time, not all of it.
            usual = SECONDS[level] * min(1.0, _weight(probes) / _weight(PROBES[level]))
            _measure(run, chosen, probes, level, seconds_per_gpu or usual, allow_busy, alone=only is not None)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        early.discard()  # where no GPU was measured
    said, busy = conditions.judge(before, conditions.read(early.closing()), os.cpu_count() or 0)
    run.notes += said
    run.measurements = [
        _without_verdict(item, "the host was busy" if busy else "another process used the GPU")
        if busy or item.subject in run.disturbed
        else item
        for item in run.measurements
    ]
    return _result(run, interrupted=interrupted)


def _measure(
    run: Run,
    chosen: Sequence[Gpu],
    probes: Sequence[Probe],
    level: Level,
    seconds: float,
    allow_busy: bool,
    *,
    alone: bool,
) -> None:
    usable: list[Gpu] = []
    for gpu in chosen:
        reason = copies.reason_to_leave_alone(gpu, allow_busy=allow_busy)
        if reason:
            run.notes.append(f"gpu:{gpu.index} is not measured: {reason}")
            run.done += len(probes)
            continue
        before = len(run.measurements)
        if not copies.measure_gpu(run, gpu, probes, seconds):
            return
        if len(run.measurements) > before:
            usable.append(gpu)
    if alone or level == "quick":
        return
    places = groups.usable_nodes(run)
    pairs = len(usable) * (len(usable) - 1)
    run.total += 2 * len(usable) * len(places) if len(places) > 1 else 0
    run.total += (2 + pairs) if len(usable) > 1 else 0
    if len(places) > 1:
        for gpu in usable:
            groups.nodes(run, gpu, places, _NODE_SECONDS[level])
    if len(usable) > 1:
        groups.together(run, usable, _GROUP_SECONDS[level], always_pairs=level == "thorough")
        whole = [gpu for gpu in usable if not gpu.mig]
        if len(whole) < len(usable):
            run.notes.append("GPUs with MIG switched on have no peer access: copies between them are left out")
        groups.peers(run, whole, _PEER_SECONDS[level])


def _choose(case: Case, indices: Sequence[int] | None) -> list[Gpu]:
    if indices is None:
        return list(case.gpus)
    known = {gpu.index: gpu for gpu in case.gpus}
    for index in indices:
        if index not in known:
            there = ", ".join(map(str, sorted(known))) or "none"
            raise GpudoctorError(f"there is no GPU {index}", f"the GPUs of this machine are: {there}")
    return [known[index] for index in dict.fromkeys(indices)]


def _probes(level: Level, only: Sequence[str] | None) -> tuple[Probe, ...]:
    if only is None:
        return PROBES[level]
    for metric in only:
        if metric not in METRICS:
            raise GpudoctorError(f"there is no copy {metric!r} to measure", f"known: {' '.join(METRICS)}")
    return tuple(probe for probe in PROBES["thorough"] if probe.kind in only)


def _weight(probes: Sequence[Probe]) -> float:
    return sum(probe.weight for probe in probes)


def _without_verdict(item: Measurement, why: str) -> Measurement:
    if item.verdict not in ("low", "bad"):
        return item
    return dataclasses.replace(item, verdict="no verdict", notes=(*item.notes, why))


def _result(run: Run, *, interrupted: bool) -> BenchResult:
    if run.on_progress:
        run.on_progress(run.total, run.total, "")
    return BenchResult(
        case=run.case,
        measurements=tuple(run.measurements),
        notes=tuple(run.notes),
        errors=tuple(run.errors),
        interrupted=interrupted,
    )
