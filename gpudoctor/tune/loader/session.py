"""`gpudoctor tune-loader`: preflight, the step, the search, the cause, the choice."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpudoctor import codec
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Case, FetchProbe, LoaderChoice, LoaderPreflight, LoaderStudy, WatchedLoader
from gpudoctor.observe.candidates import Candidates
from gpudoctor.source.device_use import device_lines
from gpudoctor.tune.loader import judge
from gpudoctor.tune.loader.limits import Limits, limits, present_setting
from gpudoctor.tune.loader.live import LiveRunner, foreign_cpu, read_preflight
from gpudoctor.tune.loader.search import UNEVEN_WINDOW_S, WINDOW_S, Outcome, Search, Setting, Space
from gpudoctor.tune.loader.targets import Target
from gpudoctor.tune.sandbox import open_sandbox

START_UP_ALLOWANCE_S = 120.0  # for imports and reading data, before the loader is iterated
PREFLIGHT_SHARE = 0.08
STEP_SHARE = 0.15  # of the budget, for the steps that are watched
STEPS = 24
PROBE_S = 6.0
FEWEST_BATCHES = 3
CAUSE_WINDOW_S = 0.8
UNEVEN_SHARE = 0.04  # of the budget, for one trial of uneven rows at most
UNEVEN = 0.2  # variation of the batches' cost from which order and prefetch may matter
HELPERS = 0.1  # CPU time of other threads beside the fetching one
WHOLE_FACTOR = 2.0  # whole batches at least so much faster than row by row
PIN_PAIRS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: Target
    cwd: Path
    budget_s: float = 60.0
    step_ms: float | None = None
    ranks: int = 1
    site: str | None = None
    start_up_s: float = START_UP_ALLOWANCE_S


@dataclass(slots=True, kw_only=True)
class Session:
    """State of one search, so that an interruption can report what was measured so far."""

    options: Options
    machine: Case
    on_stage: Callable[[str], None] = lambda _: None
    hello: dict[str, Any] = field(default_factory=dict)
    preflight: LoaderPreflight = field(default_factory=LoaderPreflight)
    probe: FetchProbe | None = None
    runner: LiveRunner | None = None
    limits: Limits | None = None
    rows: Outcome | None = None  # of the search over rows
    whole: Outcome | None = None  # of the search over whole batches
    ceiling: float | None = None  # samples per second that the step can use
    step_from: Literal["given", "observed"] | None = None
    pin: judge.Pinning | None = None
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    interrupted: bool = False
    ranks: int = 1

    def run(self) -> LoaderStudy | None:
        """The study; None only when an interruption came before anything was known."""
        options = self.options
        commands = [options.target.command] * (options.ranks if options.target.is_callable else 1)
        environments = [_rank_environment(rank, options.ranks) for rank in range(len(commands))]
        self.on_stage("starting the command")
        sandbox = open_sandbox(options.cwd)
        try:
            with Candidates(
                commands, cwd=options.cwd, site=options.site, environments=environments, wrap=sandbox.wrap
            ) as candidates:
                self._connect(candidates)
                self._study(candidates)
                candidates.finish()
                written = candidates.written() if sandbox.own is None else ()
                if written:
                    self.notes.append(f"the command wrote {', '.join(written[:5])}")
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            sandbox.close()
        return self.study() if self.hello else None

    # the parts

    def _connect(self, candidates: Candidates) -> None:
        greetings = candidates.connect(self.options.budget_s + self.options.start_up_s)
        self.hello = greetings[0]
        self.ranks = max(len(greetings), 1)
        known = int(self.hello.get("local_ranks") or 1)
        if known > self.ranks:
            self.notes.append(f"{self.ranks} of {known} local ranks reached the loader; the others were not measured")
        self.runner = LiveRunner(
            candidates,
            deadline=time.monotonic() + self.options.budget_s,
            start_method=str(self.hello.get("start_method") or "fork"),
            on_trial=self.on_stage,
        )
        self.runner.step_ms = self.options.step_ms
        self.step_from = "given" if self.options.step_ms else None

    def _study(self, candidates: Candidates) -> None:
        runner = self.runner
        assert runner is not None
        budget = self.options.budget_s
        self._preflight(candidates, budget)
        if self.preflight.fault is not None:
            self._confirm_fault()
            self.errors.append(judge.verdict(self).reason)
            return
        if not self.preflight.rows:
            self.notes.append("the loader gives no batch: nothing to tune")
            return
        if (self.loader().length or FEWEST_BATCHES) < FEWEST_BATCHES:
            self.notes.append(f"the dataset is too small for a verdict: {self.loader().length} batches")
            return
        self.limits = limits(self.machine, self.hello, self.preflight, ranks=self.ranks)
        present = self.present()
        runner.decide_window(max(self.limits.most, present.workers if present else 0), 2)
        if self.step_from is None and not self.options.target.is_callable:
            self._watch_steps(candidates, budget)
        self._probe(candidates)
        self._search()
        self._cause()
        self._pinning(candidates)

    def _preflight(self, candidates: Candidates, budget: float) -> None:
        runner = self.runner
        assert runner is not None
        self.on_stage("preflight")
        seconds = max(1.0, min(4.0, PREFLIGHT_SHARE * budget))
        deadline = max(5.0, min(30.0, budget / 2))
        request = {"do": "preflight", "seconds": seconds, "deadline_s": deadline, "hang_s": runner.hang_least_s}
        reply = candidates.ask(request, deadline_s=deadline + 5.0)[0]
        found = read_preflight(reply)
        sources: dict[str, set[str]] = {str(item["file"]): set() for item in self.hello.get("sources") or ()}
        for item in self.hello.get("sources") or ():
            sources[str(item["file"])].add(str(item["name"]))
        lines = [line for file, names in sources.items() for line in device_lines(self.options.cwd, file, names)]
        self.preflight = dataclasses.replace(found, device_lines=tuple(lines))
        loader = self.loader()
        runner.preflight = self.preflight
        runner.batch_size = loader.batch_size or 1
        runner.expected_batches = loader.length
        runner.persistent = loader.persistent_workers

    def _confirm_fault(self) -> None:
        """A row failed in the preflight: does it fail in a worker too, and do others?"""
        runner = self.runner
        assert runner is not None
        present = self.present() or Setting(workers=2)
        if runner.left_s() > 4.0:
            runner.trial(dataclasses.replace(present, workers=max(1, present.workers)), 1.0, "ladder")

    def _watch_steps(self, candidates: Candidates, budget: float) -> None:
        """The user's loop, for some steps. With a worker at least: this process must not touch the dataset."""
        runner = self.runner
        assert runner is not None
        present = self.present() or Setting(workers=0)
        workers = max(1, min(present.workers or 1, self.limits.most if self.limits else 1))
        first = runner.trial(Setting(workers=workers), 0.6, "check")
        if first.rate is None:
            return
        seconds = STEP_SHARE * budget
        self.on_stage("watching steps")
        arguments = {"num_workers": workers, "persistent_workers": False}
        going = candidates.ask(
            {"do": "continue", "arguments": arguments, "steps": STEPS, "seconds": seconds}, deadline_s=10.0
        )
        replies = candidates.next_messages(seconds + 30.0) if "fault" not in going[0] else going
        steps = [step for reply in replies for step in reply.get("steps") or ()]
        if "fault" in replies[0]:
            last = last_line(candidates) or replies[0]["fault"]["text"]
            raise GpudoctorError(
                f"the command ended while its steps were watched: {last}",
                "run it alone first, or give the step with --step-ms",
            )
        self.hello["cuda"] = replies[0].get("cuda", False)
        settled = [max(0.0, step["wall_ms"] - step["loader_wait_ms"]) for step in steps[len(steps) // 2 :]]
        if replies[0].get("source") in ("optimizer", "step-at", "module") and len(settled) >= 3:
            runner.step_ms = statistics.median(settled)
            runner.step_cpu_ms = min(runner.step_ms, max(reply.get("cpu_ms") or 0.0 for reply in replies))
            self.step_from = "observed"
        else:
            self.notes.append("no training step was seen: the rate is judged without one (--step-ms gives it)")

    def _probe(self, candidates: Candidates) -> None:
        loader = self.loader()
        if loader.iterable_dataset or loader.custom_collate or not loader.batch_size:
            return
        runner = self.runner
        assert runner is not None
        seconds = min(PROBE_S, runner.left_s() / 4)
        reply = candidates.ask({"do": "fetch", "deadline_s": seconds}, deadline_s=seconds + 5.0)[0]
        if reply.get("value"):
            import json

            self.probe = codec.decode(json.dumps(reply["value"]), FetchProbe, what="the fetch probe")

    # the search

    def _space(self, base: Setting) -> Space:
        runner, bounds = self.runner, self.limits
        assert runner is not None
        assert bounds is not None
        first = None
        if runner.step_ms:
            batch_ms = runner._batch_s() * 1000 - runner.step_ms
            first = max(1, math.ceil(batch_ms / runner.step_ms))
        # of batches: the costs of their rows even out
        uneven = (self.preflight.row_variation or 0.0) / math.sqrt(max(1, runner.batch_size)) > UNEVEN
        variants: list[Callable[[Setting], Setting]] = []
        if uneven and base.in_order and not base.whole_batch:
            variants.append(
                lambda setting: dataclasses.replace(setting, in_order=False) if setting.workers else setting
            )
        threads = max((pool.threads for pool in self.preflight.pools), default=1)
        if (self.preflight.helper_share or 0.0) > HELPERS and threads > 1:
            variants.append(
                lambda setting: dataclasses.replace(setting, one_thread=True) if setting.workers else setting
            )
        return Space(
            most_workers=bounds.most if not base.whole_batch else min(bounds.most, 4),
            cpus=max(1, int(self.hello.get("cpus") or 1) // self.ranks),
            present=None if base.whole_batch else self.present(),
            target=self.ceiling,
            first=first,
            fits=bounds.fits,
            variants=tuple(variants),
            prefetches=(2, 4, 8) if uneven else (2,),
            window_s=max(WINDOW_S, min(UNEVEN_WINDOW_S, UNEVEN_SHARE * self.options.budget_s)) if uneven else WINDOW_S,
            base=base,
        )

    def _ceiling(self) -> None:
        """The rate that the step can use: as computed, or, where lower, as seen with batches that cost nothing."""
        runner, bounds = self.runner, self.limits
        assert runner is not None
        if not runner.step_ms:
            return
        self.ceiling = (self.loader().batch_size or 1) * 1000 / runner.step_ms
        if self.loader().iterable_dataset or bounds is None or not bounds.most:
            return
        setting = Setting(workers=min(2, bounds.most))
        trials = [runner.trial(setting, CAUSE_WINDOW_S, "cause", part="batch") for _ in range(2)]
        seen = max((trial.rate or 0.0 for trial in trials), default=0.0)
        if seen > 0:
            self.ceiling = min(self.ceiling, seen)

    def _search(self) -> None:
        runner = self.runner
        assert runner is not None
        self._ceiling()
        present = self.present()
        base = Setting(workers=0, in_order=present.in_order if present else True)
        end = runner.deadline
        left = runner.left_s() - self._cause_s()
        whole = self.whole_batches_pay()
        runner.deadline = time.monotonic() + (left * 0.45 if whole else left)
        search = Search(runner, self._space(base))
        self.rows = search.outcome
        search.search()
        if whole:
            runner.deadline = time.monotonic() + left * 0.45
            other = Search(runner, self._space(dataclasses.replace(base, whole_batch=True)))
            self.whole = other.outcome
            other.search()
        runner.deadline = end
        if self.rows.best is None:
            self.errors.append(judge.verdict(self).reason)

    def whole_batches_pay(self) -> bool:
        """Whether indexing the dataset with a whole batch gives the same, and much faster."""
        probe = self.probe
        if probe is None or probe.error is not None or not probe.equal or not probe.repeatable or probe.draws_random:
            return False
        return probe.row_by_row_ms >= WHOLE_FACTOR * max(probe.whole_batch_ms, 1e-3)

    def _cause_s(self) -> float:
        """Time kept for the trials without rows and without batches."""
        assert self.runner is not None
        return min(0.12 * self.options.budget_s, 2 * (CAUSE_WINDOW_S + 1.0))

    def _cause(self) -> None:
        """The same loader with its rows, then its whole batches, ready-made: what remains is what they cost."""
        runner, rows = self.runner, self.rows
        assert runner is not None
        if rows is None or rows.best is None or self.loader().iterable_dataset:
            return
        setting = dataclasses.replace(rows.best, workers=max(1, rows.best.workers))
        allowed = self.limits is not None and setting.workers <= self.limits.most
        if setting not in rows.repeats and allowed and runner.expected_s(setting, CAUSE_WINDOW_S) < runner.left_s():
            runner.trial(setting, CAUSE_WINDOW_S, "cause")
        for part in ("rows", "batch"):
            if runner.expected_s(setting, CAUSE_WINDOW_S) < runner.left_s():
                runner.trial(setting, CAUSE_WINDOW_S, "cause", part=part)

    def _pinning(self, candidates: Candidates) -> None:
        """Pinned against unpinned batches, with the copy to the GPU, in the process itself and therefore last."""
        runner, rows = self.runner, self.rows
        assert runner is not None
        if not self.hello.get("cuda") or rows is None or rows.best is None:
            return
        setting = dataclasses.replace(rows.best, workers=max(1, rows.best.workers))
        pairs: list[tuple[float, float]] = []
        for _ in range(PIN_PAIRS):
            if 2 * runner.expected_s(setting, CAUSE_WINDOW_S) > runner.left_s() or not candidates.alive:
                break
            rates = [
                runner.trial(setting, CAUSE_WINDOW_S, "pin", device=True, pin_memory=pinned).rate
                for pinned in (False, True)
            ]
            if rates[0] is None or rates[1] is None:
                break
            pairs.append((rates[0], rates[1]))
        if pairs:
            self.pin = judge.pinning(pairs)

    # what is known

    def loader(self) -> WatchedLoader:
        """The loader as the process described it; its site is the call's line, where that is known."""
        raw = dict(self.hello.get("loader") or {})
        site = str(raw.get("site") or "")
        if site.startswith("<") or not site or "_gpudoctor_watch" in site:
            raw["site"] = self.options.target.site or self.options.target.shown
        import json

        found = codec.decode(json.dumps(raw), WatchedLoader, what="the loader")
        return dataclasses.replace(found, batch_bytes=self.preflight.batch_bytes, fetch_probe=self.probe)

    def present(self) -> Setting | None:
        """The user's own setting; None for a bare dataset that no call in its file loads."""
        if not self.options.target.present_known and self._bare():
            return None
        return present_setting(self.hello.get("loader") or {})

    def _bare(self) -> bool:
        site = str((self.hello.get("loader") or {}).get("site") or "")
        return site.startswith("<") or not site

    def study(self) -> LoaderStudy:
        """All of it, judged."""
        runner = self.runner
        trials = tuple(runner.trials) if runner is not None else ()
        verdict = judge.verdict(self)
        limit, why = judge.limit(self)
        fewer = judge.smaller(self) if verdict.word == "keep" else None
        return LoaderStudy(
            site=self.loader().site,
            target=self.options.target.shown,
            loader=self.loader(),
            preflight=self.preflight,
            start_method=str(self.hello.get("start_method") or "fork"),
            ranks=self.ranks,
            cpus=float(self.hello.get("cpus") or 1),
            most_workers=self.limits.most if self.limits else 0,
            most_because=self.limits.because if self.limits else "",
            step_ms=runner.step_ms if runner else None,
            step_from=self.step_from,
            trials=trials,
            fetch_probe=self.probe,
            present_known=self.present() is not None,
            choice=verdict.choice or LoaderChoice(arguments={"num_workers": self.loader().num_workers}),
            verdict=verdict.word,
            reason=verdict.reason,
            limit=limit,
            limit_reason=why,
            noise=self.rows.noise if self.rows else None,
            foreign_cpu=foreign_cpu(trials),
            as_good_workers=fewer[0].workers if fewer else None,
            saves_bytes=int(fewer[1]) if fewer else None,
            pin_gain=self.pin.ratio if self.pin else None,
            gain=verdict.gain,
            torch=str(self.hello.get("torch") or "") or None,
        )


def last_line(candidates: Candidates) -> str:
    """The last line that the command printed."""
    lines = candidates.last_words().splitlines()
    return lines[-1].strip() if lines else ""


def _rank_environment(rank: int, ranks: int) -> Mapping[str, str]:
    if ranks < 2:
        return {}
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {**{name: str(value) for name, value in given.items()}, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": os.environ.get("MASTER_PORT", "29500")}  # fmt: skip
