"""Trials in the user's own process: requests out of settings, LoaderTrials out of replies, and the clock."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from gpudoctor import codec
from gpudoctor.model import LoaderFault, LoaderPreflight, LoaderTrial, WorkerCounts
from gpudoctor.observe.candidates import Candidates, Reply
from gpudoctor.read.torch_errors import fault_kind
from gpudoctor.tune.loader.search import Purpose, Setting

# Before anything was measured: to start one worker, beside a fixed part (ours, idle: fork 0.13, 0.21, 0.44 s to the
# first batch with 1, 2, 4 workers; spawn 5.3, 8.3, 10.2 s).
START_S = {"fork": (0.1, 0.1), "spawn": (3.5, 1.8), "forkserver": (3.0, 1.8)}
HANG_S = (3.0, 8.0)  # a row that takes a fifth of the budget, within these bounds, hangs at the earliest
HANG_ROWS = 50  # a row that takes so many times the slowest one seen hangs
END_S, END_EACH_S = 0.1, 0.02  # to end the workers
_CUT_OFF = re.compile(r"(EOFError|ConnectionResetError|ConnectionRefusedError|BrokenPipeError)\b")
GRACE_S = 5.0  # for an answer, beyond the deadline that the other side keeps itself
LEAST_BATCHES = 8
SLOW_ROW_MS = 0.02  # below it, following each row would cost more than it tells


class LiveRunner:
    """Makes trials through Candidates. `trials` holds every one made; `deadline` is a time.monotonic() value."""

    def __init__(
        self,
        candidates: Candidates,
        *,
        deadline: float,
        start_method: str,
        on_trial: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.candidates = candidates
        self.deadline = deadline
        self.hang_least_s = min(HANG_S[1], max(HANG_S[0], self.left_s() / 5))
        self.on_trial = on_trial
        self.trials: list[LoaderTrial] = []
        self.preflight = LoaderPreflight()
        self.step_ms: float | None = None
        self.step_cpu_ms = 0.0  # of it, CPU time of the training thread
        self.batch_size = 1
        self.expected_batches: int | None = None
        self.persistent = False  # as the user has it
        self.least_epochs = 0  # a trial goes on until so many have ended
        self.follow = False  # each row is followed, after one has hung
        self.whole_epochs = False  # epochs end before the deepest queue is settled: whole ones are timed instead
        self.fixed_s, self.each_s = START_S.get(start_method, START_S["spawn"])
        self.starts: dict[int, float] = {}  # measured start and end, by workers
        self.plain_ratio: float | None = None  # distinct rows over all rows without workers

    # the Runner of the search

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def expected_s(self, setting: Setting, seconds: float) -> float:
        batch_s = self._batch_s() / max(1, setting.workers)
        needed = LEAST_BATCHES + 2 * setting.workers * (setting.prefetch + 1) if setting.workers else LEAST_BATCHES
        window = max(seconds, min(3 * seconds, needed * batch_s)) + batch_s
        if self.whole_epochs:
            window = max(seconds, min(4 * seconds, 2 * (self.expected_batches or 1) * batch_s)) + batch_s
        return window + (self._start_s(setting.workers) if setting.workers else 0.1)

    def run(self, setting: Setting, seconds: float, purpose: Purpose) -> float | None:
        trial = self.trial(setting, seconds, purpose)
        return trial.rate

    # trials of any kind

    def trial(
        self,
        setting: Setting,
        seconds: float,
        purpose: str,
        *,
        part: Literal["real", "rows", "batch"] = "real",
        device: bool = False,
        pin_memory: bool = False,
    ) -> LoaderTrial:
        """One trial on every rank at once; kept in `trials`."""
        self.on_trial(_told(setting, purpose, part))
        expected = self.expected_s(setting, seconds)
        persistent = setting.workers > 0 and (setting.persistent or self.persistent or self.whole_epochs)
        deadline_s = max(2.0, min(3 * expected + 10.0, self.left_s()))
        request: dict[str, Any] = {
            "do": "trial",
            "workers": setting.workers,
            "prefetch": setting.prefetch,
            "whole_batch": setting.whole_batch,
            "in_order": setting.in_order,
            "one_thread": setting.one_thread,
            "persistent": persistent,
            "whole_epochs": self.whole_epochs,
            "epochs": self.least_epochs,
            "pin_memory": pin_memory,
            "part": part,
            "device": device,
            "seed": None if device else len(self.trials),  # on the device it is the user's own process that draws
            "seconds": seconds,
            "step_ms": self.step_ms,
            "step_cpu_ms": self.step_cpu_ms,
            "deadline_s": deadline_s,
            "hang_s": self.hang_s(),
            "follow": self.follow or (self.preflight.row_ms or 1.0) > SLOW_ROW_MS,
        }
        replies = self.candidates.ask(request, deadline_s=deadline_s + GRACE_S)
        trials = [self._read(reply, setting, purpose, part, persistent, pin_memory) for reply in replies]
        slowest = min(trials, key=lambda trial: trial.rate if trial.rate is not None else -1.0)
        if slowest.rate is not None and part == "real":
            self._learn(setting, slowest)
        self.follow = self.follow or (slowest.fault is not None and slowest.fault.kind == "hang")
        self.trials.append(slowest)
        if slowest.stopped_at is not None:
            self.deadline = time.monotonic()  # epochs end early: there is nothing to compare until that is mended
        return slowest

    def hang_s(self) -> float:
        """How long one row (or batch, where rows are not followed) may take before it counts as hanging."""
        slowest = max(self.preflight.row_max_ms or 0.0, self.preflight.row_mean_ms or 0.0) / 1000
        return max(self.hang_least_s, HANG_ROWS * slowest)

    def decide_window(self, most_workers: int, prefetch: int) -> None:
        """The same way of timing for all candidates: windows, or whole epochs with workers that persist."""
        least = 2 * most_workers * prefetch + max(LEAST_BATCHES, 2 * most_workers)
        self.whole_epochs = self.expected_batches is not None and self.expected_batches < least

    def _batch_s(self) -> float:
        rows = (self.preflight.row_mean_ms or 0.0) * self.batch_size + (self.preflight.collate_ms or 0.0)
        return rows / 1000 + (self.step_ms or 0.0) / 1000

    def _start_s(self, workers: int) -> float:
        if workers in self.starts:
            return self.starts[workers]
        if self.starts:
            near = min(self.starts, key=lambda count: abs(count - workers))
            return self.starts[near] * max(0.5, min(4.0, (workers + 1) / (near + 1)))
        return self.fixed_s + self.each_s * workers

    def _learn(self, setting: Setting, trial: LoaderTrial) -> None:
        if setting.workers and trial.first_batch_s is not None:
            self.starts[setting.workers] = trial.first_batch_s + END_S + END_EACH_S * setting.workers

    def _read(
        self,
        reply: Reply,
        setting: Setting,
        purpose: str,
        part: Literal["real", "rows", "batch"],
        persistent: bool,
        pin_memory: bool,
    ) -> LoaderTrial:
        value: Mapping[str, Any] = reply.get("value") or {}
        fault = read_fault(reply)
        hashed, distinct = reply.get("hashed") or 0, reply.get("distinct")
        ratio = distinct / hashed if hashed and distinct is not None else None
        if part == "real" and setting.workers == 0 and ratio and self.plain_ratio is None:
            self.plain_ratio = ratio
        samples, seconds = int(value.get("samples") or 0), float(value.get("seconds") or 0.0)
        rate = samples / seconds if fault is None and samples and seconds > 0 else None
        if rate is not None and ratio is not None:
            # rows that a dataset repeats by itself are rows; what workers repeat of each other is not
            rate *= min(1.0, ratio / (self.plain_ratio or 1.0))
        if fault is None and rate is None:
            fault = LoaderFault(kind="exception", text="the loader gave no batch")
        stopped = reply.get("stopped_at")
        epoch_batches = value.get("epoch_batches")
        if stopped is not None and fault is None:
            epoch_batches = epoch_batches or value.get("batches")
        return LoaderTrial(
            workers=setting.workers,
            prefetch=setting.prefetch,
            whole_batch=setting.whole_batch,
            in_order=setting.in_order,
            one_thread=setting.one_thread,
            persistent=persistent,
            pin_memory=pin_memory,
            part=part,
            purpose=purpose,
            rate=rate,
            over=value.get("over"),
            samples=samples,
            distinct=distinct if hashed else None,
            hashed=hashed,
            batches=int(value.get("batches") or 0),
            seconds=seconds,
            first_batch_s=value.get("first_batch_s"),
            restart_s=value.get("restart_s"),
            wait_ms=value.get("wait_ms"),
            wait_p95_ms=value.get("wait_p95_ms"),
            epochs=int(value.get("epochs") or 0),
            epoch_batches=epoch_batches,
            epoch_samples=value.get("epoch_samples"),
            expected_batches=value.get("expected_batches"),
            stopped_at=stopped,
            per_worker=tuple(
                codec.decode(json.dumps(worker), WorkerCounts, what="a worker's counts")
                for worker in reply.get("workers") or ()
            ),
            shm_bytes=reply.get("shm_bytes"),
            private_bytes=value.get("private_bytes"),
            foreign_cpu=reply.get("foreign_cpu"),
            wall_s=float(reply.get("wall_s") or 0.0),
            fault=fault,
        )


def read_preflight(reply: Reply) -> LoaderPreflight:
    """The preflight of one rank; what failed stands in its `fault`."""
    value = dict(reply.get("value") or {})
    value.pop("fault", None)
    inner = (reply.get("value") or {}).get("fault")
    fault = read_fault({"fault": inner}) if inner else read_fault(reply)
    found = codec.decode(json.dumps(value), LoaderPreflight, what="the preflight")
    return dataclasses.replace(found, fault=fault)


def read_fault(reply: Reply) -> LoaderFault | None:
    """The fault of a reply, its kind told by its text where torch's own words say more than the exception's type."""
    raw = reply.get("fault")
    faults: Sequence[Mapping[str, Any]] = reply.get("faults") or ()
    if raw is None:
        return None
    # the worker that raised knows the row; the process that asked only gets its text
    own: Mapping[str, Any] = faults[0] if faults and raw.get("kind") == "exception" else {}
    text = " ".join(str(own.get("text") or raw.get("text") or "no reason given").split())
    whole = f"{raw.get('text') or ''}\n{text}\n{reply.get('stderr') or ''}"
    kind = raw.get("kind", "exception")
    if kind in ("exception", "lost", "killed"):
        kind = fault_kind(whole) or kind
    if kind == "exception" and not own and _CUT_OFF.match(text):
        kind, text = "killed", f"a worker ended while it handed a batch over ({text})"
    if kind in ("oom", "killed"):  # a log that says Killed means the kernel; here its counter is at hand
        kind = "oom" if reply.get("oom_kills") else "killed"
    return LoaderFault(
        kind=kind,
        text=text,
        index=own.get("index", raw.get("index")),
        worker=own.get("worker", raw.get("worker")),
        site=own.get("site") or raw.get("site"),
        stack=tuple(raw.get("stack") or ()),
        waits_in=raw.get("waits_in"),
    )


def foreign_cpu(trials: Sequence[LoaderTrial]) -> float | None:
    """CPUs that other processes kept busy, the median over the trials."""
    known = [trial.foreign_cpu for trial in trials if trial.foreign_cpu is not None]
    return statistics.median(known) if known else None


def _told(setting: Setting, purpose: str, part: str) -> str:
    text = f"{purpose}: {setting.workers} workers"
    if setting.workers and setting.prefetch != 2:
        text += f", prefetch {setting.prefetch}"
    for name in ("whole_batch", "one_thread", "persistent"):
        if getattr(setting, name):
            text += f", {name.replace('_', ' ')}"
    if not setting.in_order:
        text += ", out of order"
    return text if part == "real" else f"{text}, {part} ready-made"
