"""Copies of one GPU at a time, one child process a GPU; the readings taken meanwhile go into the Case."""

from __future__ import annotations

import collections
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpudoctor import judge
from gpudoctor.measure import early
from gpudoctor.measure.gpu_copies import BLOCK_BYTES
from gpudoctor.measure.nvml_watch import reason_names
from gpudoctor.measure.series import outliers, spread
from gpudoctor.model import Case, Gpu, Measurement, PcieHop, PcieLink, Setting, Source, gpu_path

TARGET = "gpudoctor.measure.gpu_copies:copies"
WARM_UP_S = 0.12  # the first copies wake the link and the clocks
ROUNDS = 3  # what disturbs a copy often lasts longer than its share of the time: each is taken up again later
BUSY_PCT = 10  # utilisation that idle GPUs do not show
LOAD_ORIGIN = "nvml during a copy"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One kind of copy (see gpu_copies.copies), which is also the name of its metric."""

    kind: str
    weight: float  # share of the time of one GPU
    unit: str = "GB/s"
    judges_link: bool = False  # the link is read during it
    rounds: int = 1  # in which its time is spent, with the other copies between them


# Pinned first and longer: they are judged, and the link is read during them.
ONE_WAY = (
    Probe(kind="h2d", weight=0.2, judges_link=True, rounds=ROUNDS),
    Probe(kind="d2h", weight=0.2, judges_link=True, rounds=ROUNDS),
)
BOTH_WAYS = (
    Probe(kind="h2d_while_d2h", weight=0.2, judges_link=True, rounds=ROUNDS),
    Probe(kind="d2h_while_h2d", weight=0.2, judges_link=True, rounds=ROUNDS),
)
LOCAL = (Probe(kind="d2d", weight=0.05, rounds=ROUNDS),)
LATENCY = (
    Probe(kind="h2d_latency", weight=0.05, unit="us"),
    Probe(kind="d2h_latency", weight=0.05, unit="us"),
)
PAGEABLE = (Probe(kind="h2d_pageable", weight=0.2), Probe(kind="d2h_pageable", weight=0.2))
CURVES = (Probe(kind="h2d_curve", weight=0.4), Probe(kind="d2h_curve", weight=0.4))


@dataclass(slots=True, kw_only=True)
class Run:
    """What has been measured so far; an interruption leaves it whole."""

    case: Case
    deadline_s: float
    engine: str | None = None
    total: int = 0
    done: int = 0
    disturbed: set[str] = field(default_factory=set)  # subjects whose low figures mean nothing
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    on_progress: Progress | None = None

    def step(self, text: str) -> None:
        """One more probe begins."""
        if self.on_progress:
            self.on_progress(self.done, self.total, text)
        self.done += 1

    def add(self, item: Measurement) -> None:
        """Judged against what is expected of the Case as it is known now: with its links read under load."""
        self.measurements.append(judge.judged(self.case, item))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def gpu(self, index: int) -> Gpu:
        return next(gpu for gpu in self.case.gpus if gpu.index == index)

    def payload(self, gpu: Gpu, kind: str, seconds: float, **more: Any) -> dict[str, Any]:
        """What a measuring child wants to know; `cpus` near the GPU unless told otherwise."""
        return {
            "engine": self.engine,
            "bdf": gpu.bdf,
            "kind": kind,
            "cpus": binding(gpu, self.case.limits.allowed_cpus)[0],
            "node": None,
            "block_bytes": BLOCK_BYTES,
            "seconds": seconds,
            "warm_up_s": WARM_UP_S,
            "memory_bytes": self.case.limits.memory_bytes,
            "hops": [hop.bdf for hop in gpu.pcie_path[1:]],
            **more,
        }


def reason_to_leave_alone(gpu: Gpu, *, allow_busy: bool) -> str | None:
    """Why this GPU is not loaded, or None."""
    if gpu.lost:
        return f"it does not answer ({gpu.lost_reason or 'lost'})"
    if gpu.bdf is None:
        return "its bus address is unknown"
    if gpu.compute_mode == "prohibited":
        return "its compute mode is prohibited (nvidia-smi -c 0 would change that)"
    foreign = [process for process in gpu.processes or () if process.pid != os.getpid()]
    if foreign and not allow_busy:
        pids = ", ".join(str(process.pid) for process in foreign[:5])
        return f"process {pids} runs on it (--allow-busy measures all the same)"
    if gpu.utilization_pct is not None and gpu.utilization_pct >= BUSY_PCT and not allow_busy:
        # The processes of other containers are hidden, their work is not.
        return f"it is {gpu.utilization_pct} % busy (--allow-busy measures all the same)"
    return None


def binding(gpu: Gpu, allowed: Sequence[int] | None) -> tuple[list[int], str]:
    """CPUs near the GPU to run on, and the words for it. No CPUs where its place is not known for sure."""
    if gpu.numa_node is None or not gpu.local_cpus:
        return [], "none: locality unknown"
    usable = [cpu for cpu in gpu.local_cpus if allowed is None or cpu in set(allowed)]
    if not usable:
        return [], f"none: no CPU of node {gpu.numa_node} may be used"
    return usable, f"node {gpu.numa_node}"


def described(
    metric: str,
    subject: str,
    samples: Sequence[float],
    settings: dict[str, Setting],
    notes: Iterable[str] = (),
    *,
    unit: str = "GB/s",
) -> Measurement:
    """Median and spread of samples, with a note about those that lie far from the rest; not judged yet."""
    said = list(notes)
    strange = outliers(samples) if unit == "GB/s" else ()  # the scheduler makes outliers of any latency
    if strange:
        said.append(
            f"{len(strange)} of {len(samples)} samples lie far from the rest (down to {min(samples):.1f}, up to "
            f"{max(samples):.1f} {unit}): something else used the link or the memory; repeat on a quiet machine"
        )
    return Measurement(
        metric=metric,
        subject=subject,
        value=statistics.median(samples),
        unit=unit,
        spread=spread(samples),
        samples=len(samples),
        settings=settings,
        notes=tuple(said),
    )


def measure_gpu(run: Run, gpu: Gpu, probes: Sequence[Probe], seconds: float) -> bool:
    """All probes of one GPU, `seconds` of copying in all. False when the next GPU would fail for the same reason."""
    _, words = binding(gpu, run.case.limits.allowed_cpus)
    end = time.monotonic() + run.deadline_s
    share = seconds / sum(probe.weight for probe in probes)
    answers: dict[Probe, list[dict[str, Any]]] = {}
    failed: set[Probe] = set()
    go_on = True
    server = early.server(run.engine)
    try:
        for turn, probe in ((turn, probe) for turn in range(ROUNDS) for probe in probes if turn < probe.rounds):
            if probe in failed:
                continue
            if turn == 0:
                run.step(f"gpu:{gpu.index} {probe.kind}")
            left = end - time.monotonic()
            if left <= 0:
                if probe not in answers:
                    failed.add(probe)
                    run.errors.append(f"gpu:{gpu.index} {probe.kind}: no time left of {run.deadline_s:g} s")
                continue
            warm_up = WARM_UP_S if not answers else WARM_UP_S / 6
            payload = run.payload(gpu, probe.kind, share * probe.weight / probe.rounds, warm_up_s=warm_up)
            answer = server.call(TARGET, payload, deadline_s=left)
            if answer.status == "ok" and "unusable" in answer.value:
                run.errors.append(f"copies cannot be measured: {answer.value['unusable']}")
                go_on = False
                break
            if answer.status == "ok":
                answers.setdefault(probe, []).append(answer.value)
                continue
            failed.add(probe)
            run.errors.append(f"gpu:{gpu.index} {probe.kind}: {answer.error}")
            if answer.status == "error" and not answers:
                run.done += len(probes) - len(failed)  # the others would say the same: hidden or refused
                break
    except BaseException:  # Ctrl-C: what was measured stays, the child does not
        server.close()
        raise
    else:
        early.close(server)
    finally:
        _take(run, gpu, [(probe, _joined(answers[probe])) for probe in probes if probe in answers], words)
    return go_on


def _joined(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answers of all rounds of one probe as one; `readings` becomes a list."""
    stopped = "stable" if all(one["stopped"] == "stable" for one in rounds) else "time"
    return rounds[-1] | {
        "samples": [sample for one in rounds for sample in one["samples"]],
        "stopped": stopped,
        "notes": list(dict.fromkeys(note for one in rounds for note in one["notes"])),
        "problem": next((one["problem"] for one in rounds if one.get("problem")), None),
        "readings": [one["readings"] for one in rounds],
    }


def _take(run: Run, gpu: Gpu, answers: list[tuple[Probe, dict[str, Any]]], words: str) -> None:
    """Merge the readings under load into the Case first: they are the link that the figures are judged by."""
    if not answers:
        return
    judging = [answer for probe, answer in answers if probe.judges_link] or [answer for _, answer in answers]
    merge_readings(run, gpu, [reading for answer in judging for reading in answer["readings"]])
    loaded = run.gpu(gpu.index)
    link = loaded.pcie
    known = link is not None and link.state == "load"
    if problem := next((answer["problem"] for _, answer in answers if answer["problem"]), None):
        run.note(f"gpu:{gpu.index}: the link was not (always) read during the copies: {problem}")
    for probe, answer in answers:
        settings: dict[str, Setting] = {
            "bytes": answer["bytes"],
            "copies": answer["copies"],
            "pinned": not probe.kind.endswith("_pageable"),
            "binding": words if answer["cpus"] or words.startswith("none") else "none: refused",
            "backend": answer["engine"],
            "link": f"Gen{link.generation} x{link.width}" if link is not None and known else None,
            "sm_clock_mhz": _usual(_sum(reading.get("sm_clock_mhz", {}) for reading in answer["readings"])),
            "stopped": answer["stopped"],
        }
        subject = f"gpu:{gpu.index}"
        for size, rate in answer.get("curve", ()):
            place = {**settings, "bytes": size}
            run.measurements.append(
                Measurement(metric=probe.kind, subject=subject, value=rate, unit="GB/s", settings=place)
            )
        if answer["samples"]:
            run.add(described(probe.kind, subject, answer["samples"], settings, answer["notes"], unit=probe.unit))
    readings = [reading for _, answer in answers for reading in answer["readings"]]
    _count_errors(run, gpu, readings)
    expected = 1 + len(gpu.processes or ())  # ours is one of them; in a container others are not shown
    counts = _sum(reading.get("processes", {}) for reading in readings)
    if sum(count for number, count in counts.items() if number > expected) > 1:
        run.disturbed.add(f"gpu:{gpu.index}")
        run.note(f"gpu:{gpu.index}: another process came onto this GPU during the copies; low figures give no verdict")


def _count_errors(run: Run, gpu: Gpu, readings: Sequence[dict[str, Any]]) -> None:
    """How far the error counters of the link moved during the copies; nothing where they cannot be read."""
    grown: collections.Counter[str] = collections.Counter()
    for reading in readings:
        for name, (before, after) in reading.get("errors", {}).items():
            grown[name] += max(0, after - before)
    for name, count in sorted(grown.items()):
        metric, _, device = name.partition(" ")
        settings: dict[str, Setting] = {"device": device} if device else {}
        subject = f"gpu:{gpu.index}"
        run.measurements.append(
            Measurement(metric=metric, subject=subject, value=float(count), unit="count", settings=settings)
        )


def merge_readings(run: Run, gpu: Gpu, readings: Sequence[dict[str, Any]]) -> None:
    """What NVML and /sys said during the copies becomes the state of the GPU and of the ports above it."""
    names = ("generation", "width", "pstate", "reasons", "temperature_c")
    counts = {name: _sum(reading.get(name, {}) for reading in readings) for name in names}
    generation, width = _usual(counts["generation"]), _usual(counts["width"])
    known: list[str] = []
    changes: dict[str, Any] = {}
    if generation and width:
        link = gpu.pcie or PcieLink()
        changes["pcie"] = dataclasses.replace(link, generation=generation, width=width, state="load")
        known += ["pcie.generation", "pcie.width"]
        if len(counts["generation"]) > 1 or len(counts["width"]) > 1:
            seen = ", ".join(f"Gen{value}" for value in sorted(counts["generation"]))
            lanes = ", ".join(f"x{value}" for value in sorted(counts["width"]))
            run.note(f"gpu:{gpu.index}: the link changed during the copies: {seen}; {lanes}")
    hops = _hops(gpu, readings)
    if hops != gpu.pcie_path:
        changes["pcie_path"] = hops
    if counts["reasons"]:
        seen_bits = 0
        for bits in counts["reasons"]:
            seen_bits |= bits
        changes |= {"throttle_reasons": reason_names(seen_bits), "throttle_state": "load"}
        known.append("throttle_reasons")
    if counts["pstate"]:
        changes["pstate"] = _usual(counts["pstate"])
        known.append("pstate")
    if counts["temperature_c"]:
        changes["temperature_c"] = max(counts["temperature_c"])
        known.append("temperature_c")
    paths = {gpu_path(gpu, fact) for fact in known}
    run.case = dataclasses.replace(
        run.case,
        gpus=tuple(dataclasses.replace(one, **changes) if one.index == gpu.index else one for one in run.case.gpus),
        gaps=tuple(gap for gap in run.case.gaps if gap.path not in paths),
        sources=(
            *(source for source in run.case.sources if source.path not in paths),
            *(Source(path=path, origin=LOAD_ORIGIN) for path in sorted(paths)),
        ),
    )


def _hops(gpu: Gpu, readings: Sequence[dict[str, Any]]) -> tuple[PcieHop, ...]:
    found = []
    for hop in gpu.pcie_path:
        seen: collections.Counter[str] = collections.Counter()
        for reading in readings:
            seen.update(reading.get("hops", {}).get(hop.bdf, {}))
        if seen and hop.link is not None:
            generation, width = (int(word) for word in seen.most_common(1)[0][0].split())
            link = dataclasses.replace(hop.link, generation=generation, width=width, state="load")
            hop = dataclasses.replace(hop, link=link)
        found.append(hop)
    return tuple(found)


def _sum(readings: Iterable[dict[str, int]]) -> collections.Counter[int]:
    total: collections.Counter[int] = collections.Counter()
    for reading in readings:
        total.update({int(value): count for value, count in reading.items()})
    return total


def _usual(counts: collections.Counter[int]) -> int | None:
    """The value read most often; None when nothing was read."""
    return counts.most_common(1)[0][0] if counts else None
