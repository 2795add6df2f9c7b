"""Profiler traces among the artifacts: which files are some, one TraceFacts a rank, and one Case a job."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import BinaryIO, Literal

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Artifact, Case, Gap, Measurement, Source, TraceFacts
from gpudoctor.read import nsys
from gpudoctor.read.files import one_line
from gpudoctor.read.kineto import KIND as KINETO
from gpudoctor.read.kineto import read_kineto
from gpudoctor.read.recording import Recording
from gpudoctor.read.trace_facts import trace_facts

NOT_READ = "not-read"  # a file of a kind that is known and refused, with the reason
_HEAD_BYTES = 256 * 1024
_OURS = re.compile(rb'"schema"\s*:\s*"gpudoctor/')
_KINETO = re.compile(rb'"traceEvents"\s*:')
_KINETO_HEAD = re.compile(rb'^\s*\{.*?"(?:deviceProperties|distributedInfo|traceName)"\s*:', re.DOTALL)
_BARE_EVENTS = re.compile(rb'^\s*\[\s*\{[^{}]{0,2000}"ph"\s*:')
_RANK = re.compile(r"(?:rank|worker)[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_SAME_TIME_NS = 60_000_000_000  # clocks of hosts differ; recordings of one job overlap but for this
_PACE_SHARE = 0.05  # of the step: ranks whose waiting differs by less are even


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """`jobs`: for each job its ranks in order. `artifacts` and `errors` as in ReadResult."""

    jobs: tuple[tuple[TraceFacts, ...], ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    errors: tuple[str, ...] = ()


def identify_trace(head: bytes) -> str | None:
    """The kind of trace by the first bytes of a file, NOT_READ for one that is refused, or None for anything else."""
    if head.startswith(b"SQLite format 3\0"):
        return nsys.KIND
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
        except zlib.error:
            return NOT_READ
        return identify_trace(head) or NOT_READ
    if re.match(rb"\x80[\x02-\x05]", head) or head.startswith((b"NVIDIA Nsight", b"QDSTRM", b"PK\x03\x04")):
        return NOT_READ
    head = head.removeprefix(b"\xef\xbb\xbf")
    if _OURS.search(head) or not head.lstrip().startswith((b"{", b"[")):
        return None
    return KINETO if any(pattern.search(head) for pattern in (_KINETO, _KINETO_HEAD, _BARE_EVENTS)) else None


def sniff(path: str) -> str | None:
    """As `identify_trace`, for a file; None also for one that cannot be opened (its reader tells why)."""
    try:
        with Path(path).open("rb") as file:
            kind = identify_trace(file.read(_HEAD_BYTES))
    except (OSError, ValueError):
        return None
    if kind is None and path.endswith((".nsys-rep", ".qdrep")):
        return NOT_READ
    return kind


def read_traces(paths: Sequence[Path], stdin: BinaryIO | None = None) -> Traces:
    """Read trace files; those of one job (different ranks, same size, same time) come together.

    Never raises for a bad file: it becomes a line in `errors`. `stdin` is one more kineto trace.
    """
    found: list[_Rank] = []
    artifacts: list[Artifact] = []
    errors: list[str] = []
    for path in [*paths, *([None] if stdin is not None else [])]:
        name = one_line(str(path)) if path is not None else "stdin"
        kind = (sniff(str(path)) or NOT_READ) if path is not None else KINETO
        lines = lines_not_understood = 0
        truncated = False
        try:
            ranks = _read(path, stdin, kind, name)
        except GpudoctorError as error:
            errors.append(str(error))
            lines = lines_not_understood = 1
        else:
            found += ranks
            lines = max((rank.facts.events for rank in ranks), default=0)
            truncated = any(rank.facts.truncated for rank in ranks)
            lines_not_understood = max((rank.not_understood for rank in ranks), default=0)
            errors += [f"{name} is cut off or damaged: the first {lines} events were read"] if truncated else []
        artifacts.append(
            Artifact(
                file=name,
                kind=kind if kind != NOT_READ else "unknown",
                lines=lines,
                lines_not_understood=lines_not_understood,
                truncated=truncated,
            )
        )
    jobs = tuple(_with_pace(_numbered(job)) for job in _jobs(found))
    return Traces(jobs=jobs, artifacts=tuple(artifacts), errors=tuple(errors))


@dataclass(slots=True, kw_only=True)
class _Rank:
    facts: TraceFacts
    begin_ns: int
    end_ns: int
    not_understood: int = 0


def _read(path: Path | None, stdin: BinaryIO | None, kind: str, name: str) -> list[_Rank]:
    if kind == NOT_READ:
        raise _refusal(path, name)
    if kind == nsys.KIND:
        assert path is not None
        return [
            _rank(recording, name, "nsys", index, device)
            for index, (recording, device) in enumerate(nsys.read_nsys(path, name=name))
        ]
    recording = read_kineto(path, stdin, name=name)
    return [_rank(recording, name, "kineto", None, None)]


def _rank(
    recording: Recording, name: str, form: Literal["kineto", "nsys"], index: int | None, device: int | None
) -> _Rank:
    rank, rank_from = recording.rank, "trace"
    if rank is None:
        told = _RANK.search(Path(name).name)
        rank, rank_from = (int(told[1]), "name") if told and index in (None, 0) else (index or 0, "order")
    last = _last(recording)
    facts = trace_facts(
        recording,
        file=name,
        form=form,
        rank=rank,
        rank_from=rank_from,  # type: ignore[arg-type]
        device=device,
    )
    return _Rank(
        facts=facts,
        begin_ns=recording.base_ns,
        end_ns=recording.base_ns + last,
        not_understood=recording.not_understood,
    )


def _last(recording: Recording) -> int:
    """The end of the last activity or operator."""
    ends = [int(recording.activities.ints("end").max())] if len(recording.activities) else [0]
    if len(recording.operators):
        ends.append(int(recording.operators.ints("start").max()))
    return max(ends)


def _refusal(path: Path | None, name: str) -> GpudoctorError:
    with path.open("rb") if path is not None else open("/dev/null", "rb") as file:  # noqa: PTH123
        head = file.read(16)
    if head.startswith(b"\x1f\x8b"):
        return GpudoctorError(f"{name} is gzip, but no profiler trace is in it", "unpack it")
    if re.match(rb"\x80[\x02-\x05]", head) or head.startswith(b"PK\x03\x04"):
        return GpudoctorError(
            f"{name} is a pickle or an archive, which is never loaded", "export the trace as JSON or SQLite"
        )
    return GpudoctorError(
        f"{name} is a report of Nsight Systems, which only its own program reads",
        f"nsys export --type sqlite {name}",
    )


def _jobs(found: Sequence[_Rank]) -> list[list[_Rank]]:
    """Ranks that may be of one job together, in the order in which they came."""
    jobs: list[list[_Rank]] = []
    for item in found:
        for job in jobs:
            if all(_same_job(item, other) for other in job):
                job.append(item)
                break
        else:
            jobs.append([item])
    return jobs


def _same_job(a: _Rank, b: _Rank) -> bool:
    same_size = a.facts.world_size == b.facts.world_size or None in (a.facts.world_size, b.facts.world_size)
    told = a.facts.rank_from != "order" and b.facts.rank_from != "order"
    if a.facts.format != b.facts.format or not same_size or (told and a.facts.rank == b.facts.rank):
        return False
    if a.facts.file == b.facts.file:
        return True
    return a.begin_ns <= b.end_ns + _SAME_TIME_NS and b.begin_ns <= a.end_ns + _SAME_TIME_NS


def _numbered(job: Sequence[_Rank]) -> tuple[TraceFacts, ...]:
    """Sorted by rank; those without a recorded rank take the free numbers in the order of their files."""
    taken = {item.facts.rank for item in job if item.facts.rank_from != "order"}
    ranks = []
    for item in job:
        facts = item.facts
        if facts.rank_from == "order":
            rank = next(number for number in range(len(job) + len(taken) + 1) if number not in taken)
            taken.add(rank)
            facts = dataclasses.replace(facts, rank=rank)
        ranks.append(facts)
    return tuple(sorted(ranks, key=lambda facts: facts.rank))


def _with_pace(job: tuple[TraceFacts, ...]) -> tuple[TraceFacts, ...]:
    """Who waits for whom. In a collective the ranks that come early wait inside its kernel for the last one, so the
    rank with the least time in communication is the one that the others wait for."""
    size = next((facts.world_size for facts in job if facts.world_size), None)
    if len(job) > 1 and size is not None and len(job) < size:
        note = f"{len(job)} of {size} ranks: one that the others wait for may be missing"
        job = tuple(dataclasses.replace(facts, notes=(*facts.notes, note)) for facts in job)
    times = [_communication_a_step(facts) for facts in job]
    known = [time for time in times if time is not None]
    if len(known) < 2 or len(known) < len(job):
        return job
    least, most = min(known), max(known)
    steps = [facts.median_step_ms or facts.window_ms or 0.0 for facts in job]
    differ = most - least >= _PACE_SHARE * median(steps)
    paced = []
    for facts, time in zip(job, known, strict=True):
        place = (time - least) / (most - least) if differ else 0.5
        pace: Literal["slow", "even", "fast"] = "slow" if place < 0.25 else "fast" if place > 0.75 else "even"
        paced.append(dataclasses.replace(facts, waits_for_peers_ms=round(time - least, 4), pace=pace))
    return tuple(paced)


def _communication_a_step(facts: TraceFacts) -> float | None:
    return facts.communication_ms / max(1, facts.whole_steps) if facts.communication_ms else None


def trace_case(job: tuple[TraceFacts, ...]) -> Case:
    """One Case for the ranks of one job."""
    detail = "not a part of a profiler trace"
    paths = ("host", "gpus", "pairs", "nics", "numa_nodes", "software", "limits", "watched")
    gaps = [Gap(path=path, reason="not in this artifact", detail=detail) for path in paths]
    for facts in job:
        if facts.window_ms is None:
            gaps.append(Gap(path=f"traces[{facts.rank}].window_ms", reason="not present", detail="no GPU events"))
        if not facts.steps:
            gaps.append(Gap(path=f"traces[{facts.rank}].steps", reason="not present", detail="no steps are marked"))
        if facts.loader is None:
            gaps.append(
                Gap(path=f"traces[{facts.rank}].loader", reason="not present", detail="no DataLoader is recorded")
            )
    return Case(
        traces=job,
        measurements=tuple(item for facts in job for item in measurements(facts)),
        gaps=tuple(gaps),
        sources=tuple(Source(path=f"traces[{facts.rank}]", origin=facts.file) for facts in job),
    )


def measurements(facts: TraceFacts) -> list[Measurement]:
    """trace.* of one rank in percent of the window, and its step times in milliseconds."""
    subject = f"rank:{facts.rank}"
    shares = {
        "trace.idle_pct": facts.idle_pct,
        "trace.compute_pct": facts.compute_pct,
        "trace.other_pct": facts.other_pct,
        "trace.overlap_pct": facts.overlap_pct,
    }
    found = [
        Measurement(
            metric=metric,
            subject=subject,
            value=value,
            unit="%",
            samples=max(1, facts.whole_steps),
            settings={"file": facts.file, "window_ms": facts.window_ms},
        )
        for metric, value in shares.items()
        if value is not None
    ]
    waits = [step.loader_wait_ms for step in facts.steps if step.loader_wait_ms is not None]
    for metric, values in (("step.ms", [step.wall_ms for step in facts.steps]), ("step.loader_wait_ms", waits)):
        if values:
            tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
            found.append(
                Measurement(
                    metric=metric,
                    subject=subject,
                    value=round(fmean(values), 4),
                    unit="ms",
                    spread=(round(tenths[0], 4), round(tenths[-1], 4)),
                    samples=len(values),
                    settings={"file": facts.file, "median_ms": round(median(values), 4)},
                )
            )
    return found
