"""Host-device copies of each GPU, one child process a GPU; see bench_copies."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpudoctor import child
from gpudoctor.errors import GpudoctorError
from gpudoctor.measure.gpu_copies import BLOCK_BYTES
from gpudoctor.measure.judge import measurement
from gpudoctor.measure.lock import exclusive
from gpudoctor.measure.nvml_watch import reason_names
from gpudoctor.model import Case, Gpu, Measurement, PcieLink, Setting, Source, gpu_path

TARGET = "gpudoctor.measure.gpu_copies:copies"
WARM_UP_S = 0.3  # the first copies wake the link and the clocks
BUSY_PCT = 10  # utilisation that idle GPUs do not show
LOAD_ORIGIN = "nvml during a copy"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    metric: str
    direction: str
    pinned: bool
    share: float  # of the time of one GPU


# Pinned first and longer: they are judged, and the link is read during them.
PROBES = (
    _Probe(metric="h2d", direction="h2d", pinned=True, share=0.3),
    _Probe(metric="d2h", direction="d2h", pinned=True, share=0.3),
    _Probe(metric="h2d_pageable", direction="h2d", pinned=False, share=0.2),
    _Probe(metric="d2h_pageable", direction="d2h", pinned=False, share=0.2),
)


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
    seconds_per_gpu: float = 3.0,
    allow_busy: bool = False,
    indices: Sequence[int] | None = None,
    deadline_s: float = 60.0,
    on_progress: Progress | None = None,
) -> BenchResult:
    """Measure h2d, d2h, h2d_pageable and d2h_pageable of the GPUs in `case`, one after the other, in GB/s one way.

    seconds_per_gpu: copying time; start-up (importing torch) comes on top. deadline_s: after which a GPU is given up.
    indices: only these GPUs. A GPU that works for somebody else is left alone unless allow_busy. What fails becomes a
    line in `errors` and costs that probe only; Ctrl-C ends the run and keeps what was measured.
    Raises GpudoctorError for an unknown index, and when another gpudoctor is measuring on this machine.
    """
    chosen = _choose(case, indices)
    run = _Run(case=case, seconds=seconds_per_gpu, deadline_s=deadline_s, total=len(chosen) * len(PROBES))
    run.on_progress = on_progress
    if not chosen:
        run.notes.append("no GPU answers: nothing to measure")
        return run.result(interrupted=False)
    interrupted = False
    with exclusive() as without_lock:
        if without_lock:
            run.notes.append(without_lock)
        try:
            for gpu in chosen:
                reason = _reason_to_leave_alone(gpu, allow_busy=allow_busy)
                if reason:
                    run.notes.append(f"gpu:{gpu.index} is not measured: {reason}")
                    run.done += len(PROBES)
                elif not run.measure(gpu):
                    break
        except KeyboardInterrupt:
            interrupted = True
    return run.result(interrupted=interrupted)


def _choose(case: Case, indices: Sequence[int] | None) -> list[Gpu]:
    if indices is None:
        return list(case.gpus)
    known = {gpu.index: gpu for gpu in case.gpus}
    for index in indices:
        if index not in known:
            there = ", ".join(map(str, sorted(known))) or "none"
            raise GpudoctorError(f"there is no GPU {index}", f"the GPUs of this machine are: {there}")
    return [known[index] for index in dict.fromkeys(indices)]


def _reason_to_leave_alone(gpu: Gpu, *, allow_busy: bool) -> str | None:
    if gpu.lost:
        return f"it does not answer ({gpu.lost_reason or 'lost'})"
    if gpu.bdf is None:
        return "its bus address is unknown"
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


class _Run:
    """What has been measured so far; an interruption leaves it whole."""

    def __init__(self, *, case: Case, seconds: float, deadline_s: float, total: int) -> None:
        self.case = case
        self.seconds = seconds
        self.deadline_s = deadline_s
        self.total = total
        self.done = 0
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.measurements: list[Measurement] = []
        self.on_progress: Progress | None = None

    def measure(self, gpu: Gpu) -> bool:
        """All probes of one GPU. False when the next GPU would fail for the same reason."""
        cpus, words = binding(gpu, self.case.limits.allowed_cpus)
        end = time.monotonic() + self.deadline_s
        answers: list[tuple[_Probe, dict[str, Any]]] = []
        go_on = True
        try:
            with child.Server() as server:
                for number, probe in enumerate(PROBES):
                    if self.on_progress:
                        self.on_progress(self.done, self.total, f"gpu:{gpu.index} {probe.metric}")
                    self.done += 1
                    left = end - time.monotonic()
                    if left <= 0:
                        self.errors.append(f"gpu:{gpu.index} {probe.metric}: no time left of {self.deadline_s:g} s")
                        continue
                    payload = self._payload(gpu, probe, cpus, first=number == 0)
                    answer = server.call(TARGET, payload, deadline_s=left)
                    if answer.status == "ok" and "unusable" in answer.value:
                        self.errors.append(f"copies cannot be measured: {answer.value['unusable']}")
                        go_on = False
                        break
                    if answer.status == "ok":
                        answers.append((probe, answer.value))
                        continue
                    self.errors.append(f"gpu:{gpu.index} {probe.metric}: {answer.error}")
                    if answer.status == "error" and not answers:
                        self.done += len(PROBES) - number - 1  # the others would say the same: hidden or refused
                        break
        finally:
            self._take(gpu, answers, words)
        return go_on

    def _payload(self, gpu: Gpu, probe: _Probe, cpus: list[int], *, first: bool) -> dict[str, Any]:
        return {
            "device": "cuda",
            "bdf": gpu.bdf,
            "direction": probe.direction,
            "pinned": probe.pinned,
            "cpus": cpus,
            "block_bytes": BLOCK_BYTES,
            "seconds": self.seconds * probe.share,
            "warm_up_s": WARM_UP_S if first else WARM_UP_S / 3,
            "memory_bytes": self.case.limits.memory_bytes,
        }

    def _take(self, gpu: Gpu, answers: list[tuple[_Probe, dict[str, Any]]], words: str) -> None:
        """Merge the readings under load into the Case first: they are the link that the figures are judged by."""
        if not answers:
            return
        judged = [answer for probe, answer in answers if probe.pinned] or [answer for _, answer in answers]
        loaded = self._merge(gpu, [answer["readings"] for answer in judged])
        link = loaded.pcie
        known = link is not None and link.state == "load"
        for probe, answer in answers:
            settings: dict[str, Setting] = {
                "bytes": answer["bytes"],
                "copies": answer["copies"],
                "pinned": probe.pinned,
                "binding": words if answer["cpus"] or words.startswith("none") else "none: refused",
                "link": f"Gen{link.generation} x{link.width}" if link is not None and known else None,
                "stopped": answer["stopped"],
            }
            self.measurements.append(measurement(loaded, probe.metric, answer["samples"], settings, answer["notes"]))

    def _merge(self, gpu: Gpu, readings: Sequence[dict[str, dict[str, int]]]) -> Gpu:
        counts = {name: _sum(readings, name) for name in ("generation", "width", "pstate", "reasons", "temperature_c")}
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
                self.notes.append(f"gpu:{gpu.index}: the link changed during the copies: {seen}; {lanes}")
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
        loaded = dataclasses.replace(gpu, **changes)
        paths = {gpu_path(gpu, fact) for fact in known}
        self.case = dataclasses.replace(
            self.case,
            gpus=tuple(loaded if one is gpu else one for one in self.case.gpus),
            gaps=tuple(gap for gap in self.case.gaps if gap.path not in paths),
            sources=(
                *(source for source in self.case.sources if source.path not in paths),
                *(Source(path=path, origin=LOAD_ORIGIN) for path in sorted(paths)),
            ),
        )
        return loaded

    def result(self, *, interrupted: bool) -> BenchResult:
        if self.on_progress:
            self.on_progress(self.done, self.total, "")
        return BenchResult(
            case=self.case,
            measurements=tuple(self.measurements),
            notes=tuple(self.notes),
            errors=tuple(self.errors),
            interrupted=interrupted,
        )


def _sum(readings: Sequence[dict[str, dict[str, int]]], name: str) -> collections.Counter[int]:
    total: collections.Counter[int] = collections.Counter()
    for reading in readings:
        total.update({int(value): count for value, count in reading.get(name, {}).items()})
    return total


def _usual(counts: collections.Counter[int]) -> int | None:
    """The value read most often; None when nothing was read."""
    return counts.most_common(1)[0][0] if counts else None
