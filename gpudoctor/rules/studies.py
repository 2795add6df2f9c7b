"""What `tune-loader` learnt about a loader, asked by several rules; and small studies for their examples."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from gpudoctor.model import (
    Case,
    Gain,
    LoaderChoice,
    LoaderFault,
    LoaderPreflight,
    LoaderStudy,
    LoaderTrial,
    WatchedLoader,
    WorkerCounts,
)


def real(study: LoaderStudy) -> Iterator[LoaderTrial]:
    """The trials of the loader as it is, those that gave a rate; neither with pinning nor before the step was known."""
    others = ("pin", "check")
    return (
        trial
        for trial in study.trials
        if trial.part == "real" and trial.rate is not None and trial.purpose not in others
    )


def median_rate(trials: Iterable[LoaderTrial]) -> float:
    """Samples per second, the median of the trials; 0 when there is none."""
    rates = [trial.rate for trial in trials if trial.rate is not None]
    return statistics.median(rates) if rates else 0.0


def median_start_s(trials: Iterable[LoaderTrial]) -> float:
    """Seconds to the first batch, the median of the trials; 0 when there is none."""
    starts = [trial.first_batch_s for trial in trials if trial.first_batch_s is not None]
    return statistics.median(starts) if starts else 0.0


def at_most(gain: Gain | None) -> Gain | None:
    """The gain of the loader alone, as a bound of what a step can gain: where the step hides the wait, it is none."""
    if gain is None:
        return None
    source = "upper bound: what the loader alone gained in trials"
    return Gain(low=1.0, high=max(1.0, gain.high), unit=gain.unit, basis=gain.basis, source=source)


def faults(study: LoaderStudy) -> list[LoaderFault]:
    """What went wrong, each text once: in the preflight, then in the trials; or what a log tells."""
    found = [study.preflight.fault, *(trial.fault for trial in study.trials), *study.faults]
    texts: dict[str, LoaderFault] = {}
    for fault in found:
        if fault is not None:
            texts.setdefault(fault.text, fault)
    return list(texts.values())


def where(fault: LoaderFault) -> str:
    """Such as " at row 20 (data.py:7)"; empty when neither is known."""
    row = f" at row {fault.index}" if fault.index is not None else ""
    return row + (f" ({fault.site})" if fault.site else "")


def mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 100 * 2**20 else f"{size / 2**20:.0f} MiB"


def case_of(**changes: Any) -> Case:
    """A Case with a study of a loader at data.py:12: 4 workers, 1000 rows in batches of 10. `loader` and `preflight`
    take the fields that differ, the rest are fields of LoaderStudy."""
    loader = WatchedLoader(
        site="data.py:12",
        ordinal=0,
        role="unknown",
        loader_class="DataLoader",
        dataset_class="Images",
        iterable_dataset=False,
        dataset_len=1000,
        length=100,
        batch_size=10,
        num_workers=4,
        prefetch_factor=2,
    )
    loader = dataclasses.replace(loader, **changes.pop("loader", {}))
    preflight = LoaderPreflight(rows=64, row_ms=5.0, row_mean_ms=5.0, row_max_ms=6.0, batch_bytes=2**20)
    preflight = dataclasses.replace(preflight, **changes.pop("preflight", {}))
    study = LoaderStudy(
        site=loader.site,
        target="data.py:make",
        loader=loader,
        preflight=preflight,
        cpus=8.0,
        present_known=True,
        choice=LoaderChoice(arguments={"num_workers": loader.num_workers}),
        verdict="keep",
    )
    return Case(loader=dataclasses.replace(study, **changes))


def trial(workers: int = 4, rate: float | None = 1000.0, **changes: Any) -> LoaderTrial:
    """A trial whose workers each made 10 batches of 10 rows."""
    counts = tuple(WorkerCounts(worker=number, batches=10, samples=100, cpus=8) for number in range(max(1, workers)))
    made = LoaderTrial(workers=workers, prefetch=2, rate=rate, samples=400, batches=40, seconds=0.4, per_worker=counts)
    return dataclasses.replace(made, **changes)
