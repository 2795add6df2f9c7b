"""What the trials mean: change, keep or no verdict; and what limits the rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpudoctor.model import Gain, Limit, LoaderChoice, LoaderFault, LoaderTrial
from gpudoctor.tune.loader.live import foreign_cpu
from gpudoctor.tune.loader.search import MINIMUM_GAIN, Outcome, Ratio, Setting

if TYPE_CHECKING:
    from gpudoctor.tune.loader.session import Session

BUSY_NOISE = 0.18  # of one trial: nothing but a clear difference can be told then
BUSY_SHARE = 0.3  # of the CPUs, kept busy by others during the median trial: the same
CLEAR = 1.25  # a gain that even a busy host does not fake, when its whole interval lies above
WIDE = 1.5  # high over low of an interval that tells nothing
REACHED = 0.95  # of what the step can use: its wait is then about 5 %
NEARLY = 0.85  # of the rate with a part ready-made: that part costs little
COLD = 2.0  # rows from storage that cost so many times the same rows from memory
BOUND_BY_CPU = 0.6  # share of a row's time that is CPU time
WHOLE_GAIN = 1.1
WORTH = 1.05  # less of the loader alone is not worth a change of settings that were chosen before


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    word: Literal["change", "keep", "no verdict"]
    reason: str
    choice: LoaderChoice | None = None
    gain: Gain | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinning:
    """Rate with pinned batches over the rate without, the copy to the GPU included."""

    ratio: float
    faster: bool


def pinning(pairs: Sequence[tuple[float, float]]) -> Pinning:
    """From (unpinned, pinned) rates of neighbouring trials."""
    logs = [math.log(pinned / plain) for plain, pinned in pairs]
    middle = statistics.fmean(logs)
    spread = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.1
    return Pinning(ratio=math.exp(middle), faster=middle - 2 * spread > 0 and math.exp(middle) > MINIMUM_GAIN)


def verdict(session: Session) -> Judgement:
    """From the outcomes of the searches; every branch says why."""
    fault = session.preflight.fault
    if fault is not None:
        return Judgement(word="no verdict", reason=f"the dataset fails{_where(fault)}: {fault.text}")
    rows = session.rows
    if rows is None:
        return Judgement(word="no verdict", reason=session.notes[-1] if session.notes else "nothing was measured")
    if rows.best is None:
        failed = next((trial.fault for trial in _trials(session) if trial.fault is not None), None)
        why = f"{failed.text}{_where(failed)}" if failed is not None else "no trial fitted into the budget"
        return Judgement(word="no verdict", reason=f"no setting gave a rate: {why}")
    stopped = next((trial.stopped_at for trial in _trials(session) if trial.stopped_at is not None), None)
    if stopped is not None:
        reason = f"an epoch ends early: row {stopped} raises StopIteration, which no row may do"
        return Judgement(word="no verdict", reason=reason, choice=_present_choice(session))
    whole = _whole_gain(session)
    if whole is not None:
        return _whole(session, whole)
    best = _with_variants(rows)
    present = session.present()
    ratio = rows.over_present
    busy = _is_busy(session, rows)
    choice = _choice(session, best, rows)
    reached = _reaches(session, present)
    if present is None:
        if busy and (rows.over_zero is None or not _clear(rows.over_zero)):
            return Judgement(word="no verdict", reason=_unclear(session, rows), choice=choice)
        return Judgement(word="change", reason="the best of what was tried", choice=choice, gain=_gain(rows.over_zero))
    if reached and present.workers <= best.workers:
        return Judgement(
            word="keep", reason="the loader keeps up with the step as it is", choice=_present_choice(session)
        )
    failed = _failure(session, present)
    if failed is not None:
        # too little memory or too few files is a matter of settings; anything else has to be mended first
        word: Literal["change", "no verdict"] = "change" if failed.kind in ("shm", "files", "oom") else "no verdict"
        reason = f"with workers the loader fails{_where(failed)}: {failed.text}"
        return Judgement(word=word, reason=reason, choice=choice if word == "change" else _present_choice(session))
    if ratio is None:
        return Judgement(
            word="no verdict", reason="the present setting could not be measured in the budget", choice=choice
        )
    gains = ratio.low > 1 and ratio.value >= WORTH
    if gains and (not busy or _clear(ratio)):
        return Judgement(
            word="change",
            reason=f"{ratio.value:.2f}x of the present rate ({ratio.low:.2f} to {ratio.high:.2f})",
            choice=choice,
            gain=_gain(ratio),
        )
    if busy or ratio.high / ratio.low > WIDE:
        return Judgement(word="no verdict", reason=_unclear(session, rows), choice=_present_choice(session))
    if ratio.value == 1:
        return Judgement(
            word="keep", reason="the present setting is the best of what was tried", choice=_present_choice(session)
        )
    return Judgement(
        word="keep",
        reason=f"the present setting is within the noise of the best ({ratio.low:.2f} to {ratio.high:.2f} of it)",
        choice=_present_choice(session),
    )


def smaller(session: Session) -> tuple[Setting, float] | None:
    """A setting with fewer workers than the present one that is as good, and the private memory that it saves."""
    rows, present = session.rows, session.present()
    if rows is None or rows.best is None or present is None or rows.best.workers >= present.workers:
        return None
    sizes = [trial.private_bytes / trial.workers for trial in _trials(session) if trial.private_bytes and trial.workers]
    each = statistics.median(sizes) if sizes else 0.0
    return rows.best, each * (present.workers - rows.best.workers)


def limit(session: Session) -> tuple[Limit, str]:
    """What the rate of the best setting waits for, and why that is believed."""
    rows, preflight = session.rows, session.preflight
    if rows is None or rows.best is None:
        return "unknown", ""
    rate = rows.rates.get(rows.best)
    if session.ceiling and rate and rate >= REACHED * session.ceiling:
        given = min(rate, session.ceiling)
        return "step", f"the loader gives {given:.0f} of the {session.ceiling:.0f} samples/s that the step can use"
    real, ready_rows, ready_batch = (_cause_rate(session, part) for part in ("real", "rows", "batch"))
    if real and ready_rows:
        if real >= NEARLY * ready_rows:
            if ready_batch and ready_rows < NEARLY * ready_batch:
                return (
                    "collating",
                    f"{ready_rows:.0f} samples/s with rows from memory, {ready_batch:.0f} without collating",
                )
            return "transport", f"{real:.0f} samples/s, and {ready_batch or ready_rows:.0f} with ready-made batches"
        told = f"{real:.0f} samples/s, {ready_rows:.0f} with rows from memory"
    elif not preflight.row_ms:
        return "unknown", ""
    else:
        told = f"a row takes {preflight.row_ms:.2f} ms"
    if preflight.cold_ms and preflight.warm_ms and preflight.cold_ms >= COLD * preflight.warm_ms:
        return (
            "storage",
            f"{told}; a row takes {preflight.cold_ms:.1f} ms from storage, {preflight.warm_ms:.1f} ms from memory",
        )
    share = preflight.cpu_share
    if share is not None and share < BOUND_BY_CPU:
        return "waiting", f"{told}; {1 - share:.0%} of a row's time is waiting, not computing"
    return "decoding", f"{told}; {share:.0%} of a row's time is CPU time" if share is not None else told


def _cause_rate(session: Session, part: str) -> float | None:
    """The rate of the settings in which the parts were compared: the same workers, newest trials."""
    trials = _trials(session)
    compared = next((trial for trial in reversed(trials) if trial.part == "rows"), None)
    if compared is None:
        return None
    rates = [
        trial.rate
        for trial in trials
        if trial.part == part and trial.rate and trial.workers == compared.workers and not trial.whole_batch
        and trial.prefetch == compared.prefetch and trial.in_order == compared.in_order and not trial.one_thread
        and trial.purpose not in ("pin", "check")
    ]  # fmt: skip
    return statistics.median(rates) if rates else None


def _trials(session: Session) -> list[LoaderTrial]:
    return session.runner.trials if session.runner is not None else []


def _whole_gain(session: Session) -> Ratio | None:
    """How much faster whole batches are than the better of the rows' best and the present setting; None if not."""
    whole, rows = session.whole, session.rows
    if whole is None or whole.best is None or rows is None or rows.best is None:
        return None
    one, other = whole.rates[whole.best], rows.rates[rows.best]
    noise = max(whole.noise, rows.noise)
    half = 1.96 * noise * math.sqrt(2 / max(1, min(len(whole.repeats[whole.best]), len(rows.repeats[rows.best]))))
    ratio = Ratio(value=one / other, low=one / other * math.exp(-half), high=one / other * math.exp(half))
    return ratio if ratio.value >= WHOLE_GAIN and ratio.low > 1 else None


def _whole(session: Session, ratio: Ratio) -> Judgement:
    whole, rows = session.whole, session.rows
    assert whole is not None
    assert whole.best is not None
    assert rows is not None
    present = session.present()
    own = rows.rates.get(_plain(present)) if present is not None else None
    gain = ratio
    if own:
        factor = whole.rates[whole.best] / own
        gain = Ratio(value=factor, low=factor * ratio.low / ratio.value, high=factor * ratio.high / ratio.value)
    return Judgement(
        word="change",
        reason=f"fetching whole batches gives {ratio.value:.1f}x of the best rate row by row",
        choice=_choice(session, whole.best, whole),
        gain=_gain(gain),
    )


def _plain(setting: Setting) -> Setting:
    return Setting(workers=setting.workers, prefetch=setting.prefetch, in_order=setting.in_order)


def _with_variants(rows: Outcome) -> Setting:
    """The best setting, with the variants that were clearly faster beside it."""
    assert rows.best is not None
    best = rows.best
    for setting, ratio in rows.variants:
        if ratio.low > 1 and ratio.value >= MINIMUM_GAIN and setting.workers == best.workers:
            best = Setting(
                workers=best.workers,
                prefetch=best.prefetch,
                in_order=best.in_order and setting.in_order,
                one_thread=best.one_thread or setting.one_thread,
            )
    return best


def _choice(session: Session, best: Setting, outcome: Outcome) -> LoaderChoice:
    present = session.loader()
    arguments: dict[str, int | bool | None] = {"num_workers": best.workers}
    if best.workers:
        if best.prefetch != (present.prefetch_factor or 2):
            arguments["prefetch_factor"] = best.prefetch
        if restarts_matter(session, best.workers) and not present.persistent_workers:
            arguments["persistent_workers"] = True
        if session.pin is not None and session.pin.faster != present.pin_memory:
            arguments["pin_memory"] = session.pin.faster
        if best.in_order != present.in_order:
            arguments["in_order"] = best.in_order
    interval = outcome.interval
    return LoaderChoice(
        arguments=arguments,
        whole_batch=best.whole_batch,
        one_thread=best.one_thread,
        rate=interval.value if interval else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
    )


def restarts_matter(session: Session, workers: int) -> bool:
    """Whether starting the workers again takes a noticeable part of an epoch: computed, not searched."""
    loader = session.loader()
    trials = [trial for trial in _trials(session) if trial.workers == workers and trial.rate and trial.part == "real"]
    starts = [trial.first_batch_s for trial in trials if trial.first_batch_s]
    rates = [trial.rate for trial in trials if trial.rate]
    if not starts or not rates or not loader.length or not loader.batch_size:
        return False
    epoch_s = loader.length * loader.batch_size / statistics.median(rates)
    return statistics.median(starts) >= 0.05 * (epoch_s + statistics.median(starts))


def _present_choice(session: Session) -> LoaderChoice:
    rows, present = session.rows, session.present()
    rate = rows.rates.get(_plain(present)) if rows is not None and present is not None else None
    return LoaderChoice(arguments={"num_workers": session.loader().num_workers}, rate=rate)


def _reaches(session: Session, present: Setting | None) -> bool:
    """Whether the present setting gives all that the step can use."""
    rows = session.rows
    if session.ceiling is None or rows is None or present is None:
        return False
    rate = rows.rates.get(_plain(present))
    return rate is not None and rate >= REACHED * session.ceiling


def _failure(session: Session, present: Setting) -> LoaderFault | None:
    """How trials with at most the present number of workers failed, when none of them gave a rate."""
    own = [
        trial
        for trial in _trials(session)
        if 0 < trial.workers <= present.workers and trial.part == "real" and not trial.whole_batch
    ]
    faults = [trial.fault for trial in own if trial.fault is not None and trial.fault.kind != "timeout"]
    return faults[0] if own and len(faults) == len(own) else None


def _where(fault: LoaderFault) -> str:
    row = f" at row {fault.index}" if fault.index is not None else ""
    return row + (f" ({fault.site})" if fault.site else "")


def _clear(ratio: Ratio) -> bool:
    return ratio.low > CLEAR


def _others(session: Session) -> float:
    """The share of our CPUs that other processes keep busy; 0 where it is unknown."""
    foreign = foreign_cpu(_trials(session))
    return (foreign or 0.0) / max(1.0, float(session.hello.get("cpus") or 1))


def _row_noise(session: Session) -> float:
    """How far one trial is from the next because they fetch other rows, relative: no fault of the host."""
    counts = [trial.samples for trial in _trials(session) if trial.rate and trial.workers and trial.part == "real"]
    return (session.preflight.row_variation or 0.0) / math.sqrt(max(1.0, statistics.median(counts))) if counts else 0.0


def _is_busy(session: Session, rows: Outcome) -> bool:
    return rows.noise >= max(BUSY_NOISE, 2 * _row_noise(session)) or _others(session) > BUSY_SHARE


def _unclear(session: Session, rows: Outcome) -> str:
    """Why the trials give no verdict."""
    if _is_busy(session, rows):
        foreign = foreign_cpu(_trials(session))
        beside = f"; other processes keep {foreign:.1f} CPUs busy" if foreign is not None and foreign > 0.3 else ""
        return f"host busy: one trial differs from the next by {rows.noise:.0%}{beside}"
    if 2 * _row_noise(session) >= rows.noise:
        why = f"rows cost so differently that one trial differs from the next by {rows.noise:.0%}"
    else:
        why = "too few trials fitted into the budget"
    return f"{why}: give a larger --budget"


def _gain(ratio: Ratio | None) -> Gain | None:
    if ratio is None or ratio.value <= 1:
        return None
    return Gain(
        low=round(max(0.01, ratio.low), 3),
        high=round(min(ratio.high, 1e6), 3),
        unit="x",
        basis="measured",
        source="trials of the loader alone",
    )
