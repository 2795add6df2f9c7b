"""`tune --nproc 1,2,4`: the command once for each count of ranks, what each rank waits for, and what grows.

Under data parallelism the steps of all ranks are in lock-step, so step times do not tell who is slow. What tells is a
rank's own time: the step without the communication that is not hidden behind work. The others spend the difference
waiting for the slow one; what even that one waits is the data on their way.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import (
    Measurement,
    Scaling,
    ScalingRank,
    ScalingRow,
    ScalingUnit,
    Step,
    Watched,
    WatchPlan,
    WatchRecord,
)
from gpudoctor.tune.first_run import MINIMUM_STEPS, FirstRun
from gpudoctor.tune.proof import training_records
from gpudoctor.tune.rank_commands import with_ranks
from gpudoctor.tune.runner import START_UP_ALLOWANCE_S, CommandRunner, failure
from gpudoctor.tune.sandbox import Sandbox

BUDGET_SHARE = 0.4  # of tune's budget, for all counts together
SHORTEST_RUN_S = 12.0  # starting the ranks and importing torch must fit
PARTS_STEPS = 30  # of the second run on a GPU, which tells what several ranks wait for
WARM = 2.0  # leading steps this many times as long as the median are warm-up
APART = 0.10  # a rank is slow when it needs this share of a step longer than the others' median,
OFTEN = 0.6  # and longest in this share of the steps
GROWN = 0.10  # of the step at the smallest count; less is no cause
EFFICIENT = 0.9


def scale(
    command: Sequence[str],
    counts: Sequence[int],
    *,
    cwd: Path,
    sandbox: Sandbox,
    budget_s: float,
    steps: int | None,
    step_at: str | None,
    gpu: bool,
    cpus: int | None,
    check: Callable[[Watched], None],
    on_stage: Callable[[str], None],
) -> tuple[Scaling, FirstRun]:
    """Run `command` with each count of ranks (sorted, each once) and judge the table. Also returns the run with the
    largest count that gave a rate: calls and loaders are watched in it, so tune needs no other first run.

    budget_s: for all runs. steps: of each run; None: as many as fit. gpu: whether the machine has one; what several
    ranks wait for then comes from a second, short run, because timing it holds up each backward. cpus: that the ranks
    may use. check sees the first run, before anything is run again.
    Raises GpudoctorError when the command has no place for a count, or no count gave a rate.
    """
    commands = [(count, with_ranks(command, count)) for count in sorted(set(counts))]
    runs = len(commands) + (sum(count > 1 for count, _ in commands) if gpu else 0)
    share = max(SHORTEST_RUN_S, budget_s / runs)
    last: FirstRun | None = None
    rows: list[ScalingRow] = []
    units: list[ScalingUnit] = []
    for count, words in commands:
        told = f"{count} {'rank' if count == 1 else 'ranks'}"
        on_stage(told)
        runner = CommandRunner(
            words, cwd=cwd, sandbox=sandbox, deadline=0.0, step_at=step_at, guard_writes=False, on_trial=on_stage
        )
        plan = WatchPlan(
            record_dir="",
            steps=steps,
            max_seconds=share,
            least_steps=MINIMUM_STEPS,
            step_at=step_at,
            watch_calls=True,
            watch_ranks=not gpu,
            probe_fetch=count == commands[-1][0],
            write_root=str(cwd),
        )
        begun = time.monotonic()
        timed, _ = runner.watch(plan, deadline_s=share + START_UP_ALLOWANCE_S)
        seconds = time.monotonic() - begun
        if not rows:
            check(timed)
        parts = timed
        if gpu and count > 1 and failure(timed) is None:
            on_stage(f"{told}: what the steps wait for")
            few = min(steps or PARTS_STEPS, PARTS_STEPS)
            plan = dataclasses.replace(plan, steps=few, watch_ranks=True, probe_fetch=False)
            parts, _ = runner.watch(plan, deadline_s=share + START_UP_ALLOWANCE_S)
        row, unit = row_of(count, timed, parts)
        if row.rate is not None:
            last = FirstRun(seen=timed, seconds=seconds)
        rows.append(row)
        units.append(unit)
    if last is None:
        raise GpudoctorError(
            f"no count of ranks gave a rate; with {rows[0].ranks}: {rows[0].error}",
            "run the command alone first; tune needs one that works",
        )
    unit, rows = _one_unit(rows, units)
    rows = with_efficiency(rows)
    return Scaling(unit=unit, rows=tuple(rows), cause=growing_cause(rows, cpus=cpus), notes=_notes(rows)), last


def row_of(count: int, timed: Watched, parts: Watched) -> tuple[ScalingRow, ScalingUnit]:
    """One row: the rate from `timed`, what the steps wait for from `parts` (the same run where there is one)."""
    records = training_records(timed)
    error = failure(timed)
    if error is None and not any(record.steps for record in records):
        error = "no step was seen"
    if error is None and len(records) != count:
        error = f"{len(records)} of {count} ranks made steps"
    if error is None and count > 1 and not any(record.communication for record in training_records(parts)):
        error = "its processes joined no process group: each does the whole work for itself"
    if error is not None:
        return ScalingRow(ranks=count, error=error), "samples/s"
    by_rank = {_number(record, at): record for at, record in enumerate(training_records(parts))}
    ranks, unit = [], _unit(records)
    for at, record in enumerate(records):
        number = _number(record, at)
        ranks.append(_rank(number, record, by_rank.get(number), unit))
    rates = [rank.rate for rank in ranks if rank.rate]
    slowest, because = slow_rank(ranks, _own_steps(by_rank))
    known = [rank.communication_ms for rank in ranks if rank.communication_ms is not None]
    row = ScalingRow(
        ranks=count,
        rate=min(rates) * count if rates else None,
        steps=min(len(record.steps) for record in records),
        exposed_ms=min(known) if known and count > 1 else None,
        slowest_rank=slowest,
        slowest_because=because,
        per_rank=tuple(ranks),
        samples_per_step=min((size for record in records if (size := _samples_per_step(record))), default=None),
    )
    return row, unit


def _number(record: WatchRecord, at: int) -> int:
    return record.rank if record.rank is not None else at


def settled(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps behind the warm-up: back ends connect, workers start and kernels are chosen in the first ones."""
    usual = statistics.median(step.wall_ms for step in steps)
    begin = 0
    while begin < len(steps) // 2 and (steps[begin].wall_ms > WARM * usual or (begin == 0 and len(steps) >= 8)):
        begin += 1
    return steps[begin:]


def _unit(records: Sequence[WatchRecord]) -> ScalingUnit:
    return "samples/s" if all(_samples_per_step(record) for record in records) else "steps/s x ranks"


def _samples_per_step(record: WatchRecord) -> float | None:
    samples = sum(loader.samples for loader in record.feeding)
    return samples / len(record.steps) if samples and record.steps else None


def _rank(number: int, record: WatchRecord, parts: WatchRecord | None, unit: ScalingUnit) -> ScalingRank:
    steps = settled(record.steps)
    step_ms = statistics.fmean(step.wall_ms for step in steps)
    each = (_samples_per_step(record) or 0.0) if unit == "samples/s" else 1.0
    waits = communication(parts) if parts is not None else None
    if waits is not None and parts is not None and parts is not record:  # its share of the steps in another run
        waits *= step_ms / statistics.fmean(step.wall_ms for step in settled(parts.steps))
    return ScalingRank(
        rank=number,
        rate=round(each * 1000 / step_ms, 3) if step_ms else None,
        step_ms=round(step_ms, 3),
        loader_wait_ms=round(statistics.fmean(step.loader_wait_ms for step in steps), 3),
        communication_ms=None if waits is None else round(waits, 3),
        own_ms=None if waits is None else round(max(0.0, step_ms - waits), 3),
        h2d_gb_s=_h2d(parts) if parts is not None else None,
    )


def communication(record: WatchRecord) -> float | None:
    """Exposed communication in ms a step; None where the host does not see it (NCCL outside of DDP, FSDP)."""
    told = record.communication
    if told is None or not record.steps or not (told.reductions or (told.calls and not told.untimed)):
        return None
    return statistics.fmean(step.communication_ms for step in settled(record.steps))


def _h2d(record: WatchRecord) -> float | None:
    """GB/s of the copies to the GPU that waited for their end, all sites together."""
    waited = [copy for copy in record.copies if copy.kind == "h2d" and copy.bytes and not copy.non_blocking]
    seconds = sum(copy.waited_ms for copy in waited) / 1000
    return round(sum(copy.bytes for copy in waited) / seconds / 1e9, 3) if seconds > 0 else None


def _own_steps(records: dict[int, WatchRecord]) -> dict[int, list[float]]:
    """Own time of each steady step by rank; empty where communication is unknown for one of them."""
    if any(communication(record) is None for record in records.values()):
        return {}
    begin = max((len(record.steps) - len(settled(record.steps)) for record in records.values()), default=0)
    return {
        rank: [step.wall_ms - step.communication_ms for step in record.steps[begin:]]
        for rank, record in records.items()
    }


def slow_rank(ranks: Sequence[ScalingRank], own: dict[int, list[float]]) -> tuple[int | None, str | None]:
    """The rank that the others wait for, and why it is slow; (None, None) when none stands out.

    Where communication is unknown only the loader can give a rank away.
    """
    if len(ranks) < 2:
        return None, None
    if not own:
        slow = max(ranks, key=lambda rank: rank.loader_wait_ms)
        others = statistics.median(rank.loader_wait_ms for rank in ranks if rank is not slow)
        if slow.loader_wait_ms - others < APART * slow.step_ms:
            return None, None
        return slow.rank, _loader_text(slow.loader_wait_ms, others)
    slow = max(ranks, key=lambda rank: rank.own_ms or 0.0)
    rest = [rank for rank in ranks if rank is not slow]
    slow_ms, others = slow.own_ms or 0.0, statistics.median(rank.own_ms or 0.0 for rank in rest)
    columns = list(zip(*(own[rank.rank] for rank in (slow, *rest)), strict=False))
    first = sum(column[0] == max(column) for column in columns)
    if slow_ms - others < APART * slow.step_ms or not columns or first < OFTEN * len(columns):
        return None, None
    loader = statistics.median(rank.loader_wait_ms for rank in rest)
    if slow.loader_wait_ms - loader >= (slow_ms - others) / 2:
        return slow.rank, _loader_text(slow.loader_wait_ms, loader)
    return (
        slow.rank,
        f"its own work without the loader: {_ms(slow_ms)} a step before it waits, the others {_ms(others)}",
    )


def _loader_text(slow: float, others: float) -> str:
    return f"its loader: {_ms(slow)} a step waiting for batches, the others {_ms(others)}"


def _ms(value: float) -> str:
    return f"{value:.1f} ms"


def _one_unit(rows: Sequence[ScalingRow], units: Sequence[ScalingUnit]) -> tuple[ScalingUnit, list[ScalingRow]]:
    """Samples are counted only when every row could count them."""
    used = {unit for row, unit in zip(rows, units, strict=True) if row.rate is not None}
    if len(used) == 1:
        return used.pop(), list(rows)
    plain = []
    for row in rows:
        ranks = tuple(dataclasses.replace(rank, rate=round(1000 / rank.step_ms, 3)) for rank in row.per_rank)
        rate = min((rank.rate or 0.0 for rank in ranks), default=0.0) * row.ranks
        plain.append(dataclasses.replace(row, per_rank=ranks, rate=rate or None))
    return "steps/s x ranks", plain


def with_efficiency(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    """Each row's rate over that of the smallest count that worked, as if every further rank added as much."""
    base = next((row for row in rows if row.rate), None)
    if base is None or base.rate is None:
        return list(rows)
    each = base.rate / base.ranks
    return [
        dataclasses.replace(row, rate=round(row.rate, 3), efficiency=round(row.rate / (each * row.ranks), 4))
        if row.rate
        else row
        for row in rows
    ]


def growing_cause(rows: Sequence[ScalingRow], *, cpus: int | None) -> str | None:
    """What makes the step longer from the smallest to the largest count that worked; None with fewer than two.

    The rank that decides is the one with the most own time, or the longest loader wait where that is unknown.
    Times are scaled to the samples of a step at the smallest count, since a script may share its batch out.
    """
    worked = [row for row in rows if row.rate is not None and row.per_rank]
    if len(worked) < 2:
        return None
    first, last = worked[0], worked[-1]
    if (last.efficiency or 0.0) >= EFFICIENT:
        return f"nothing that matters: with {last.ranks} ranks the efficiency is {last.efficiency:.0%}"
    scale = 1.0
    if first.samples_per_step and last.samples_per_step:
        scale = first.samples_per_step / last.samples_per_step
    before, after = _parts(first), _parts(last, scale)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    name = max(grown, key=lambda part: grown[part])
    step_ms = _deciding(first).step_ms
    if grown[name] < GROWN * step_ms:
        return None
    text = (
        f"{name}: from {_ms(before.get(name, 0.0))} a step with {first.ranks} to {_ms(after[name])} with {last.ranks}"
    )
    if name == _LOADER:
        text += f" on rank {_deciding(last).rank}"
    if name in (_WORK, _WORK_AND_COMMUNICATION) and cpus is not None and last.ranks > cpus:
        text += f" ({last.ranks} ranks share {cpus} CPUs)"
    return text


_LOADER = "waiting for the loader"
_COMMUNICATION = "exposed communication"
_WORK = "the ranks' own work"
_WORK_AND_COMMUNICATION = "work and communication, which cannot be told apart here"


def _deciding(row: ScalingRow) -> ScalingRank:
    if row.slowest_rank is not None:
        return next(rank for rank in row.per_rank if rank.rank == row.slowest_rank)
    if all(rank.own_ms is not None for rank in row.per_rank):
        return max(row.per_rank, key=lambda rank: rank.own_ms or 0.0)
    return max(row.per_rank, key=lambda rank: rank.loader_wait_ms)


def _parts(row: ScalingRow, scale: float = 1.0) -> dict[str, float]:
    rank = _deciding(row)
    parts = {_LOADER: rank.loader_wait_ms * scale}
    left = max(0.0, rank.step_ms - rank.loader_wait_ms)
    if rank.communication_ms is None and row.ranks > 1:
        parts[_WORK_AND_COMMUNICATION] = left * scale
    elif row.ranks > 1:
        exposed = min(left, rank.communication_ms or 0.0)
        parts |= {_COMMUNICATION: exposed * scale, _WORK: (left - exposed) * scale}
    else:  # a lone rank waits for nobody: what its collectives take is part of its work
        parts |= {_WORK: left * scale, _WORK_AND_COMMUNICATION: left * scale}
    return parts


def _notes(rows: Sequence[ScalingRow]) -> tuple[str, ...]:
    notes = []
    sizes = {round(row.samples_per_step) for row in rows if row.samples_per_step}
    if len(sizes) > 1:
        notes.append(
            "a step of one rank has another number of samples at another count: the script shares its batch out"
        )
    if len(rows) > 1 and rows[0].ranks == 1 and "OMP_NUM_THREADS" not in os.environ:
        notes.append("OMP_NUM_THREADS is not set: torchrun gives each of several ranks one CPU thread, a lone rank all")
    return tuple(notes)


def measurements(scaling: Scaling) -> tuple[Measurement, ...]:
    """scaling.rate and scaling.efficiency by count of ranks."""
    result = []
    for row in scaling.rows:
        if row.rate is None:
            continue
        subject = f"ranks:{row.ranks}"
        result.append(
            Measurement(metric="scaling.rate", subject=subject, value=row.rate, unit=scaling.unit, samples=row.steps)
        )
        if row.efficiency is not None:
            result.append(
                Measurement(
                    metric="scaling.efficiency", subject=subject, value=row.efficiency, unit="1", samples=row.steps
                )
            )
    return tuple(result)
