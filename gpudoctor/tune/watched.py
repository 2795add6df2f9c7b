"""Measurements of a watched command: what the rules judge and the report shows, one row a rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gpudoctor.model import Measurement, Setting, Watched, WatchRecord
from gpudoctor.tune.proof import training_records


def measurements(watched: Watched) -> tuple[Measurement, ...]:
    """step.ms, step.loader_wait_ms, step.waited_ms, loader.wait_ms and loader.samples_per_s by rank.

    Means over the watched steps, since the bursts of a prefetch queue make medians lie; the median of step.ms
    stands in its settings. Spread is the 10th and the 90th percentile.
    """
    result: list[Measurement] = []
    for number, record in enumerate(training_records(watched)):
        subject = f"rank:{record.rank if record.rank is not None else number}"
        if record.steps:
            result += _steps(record, subject)
        for loader in record.loaders:
            if not loader.batches:
                continue
            settings: dict[str, Setting] = {
                "site": loader.site,
                "num_workers": loader.num_workers,
                "batches": loader.batches,
            }
            result.append(
                Measurement(
                    metric="loader.wait_ms",
                    subject=subject,
                    value=round(loader.wait_ms / loader.batches, 4),
                    unit="ms",
                    samples=loader.batches,
                    settings=dict(settings),
                )
            )
            if record.watched_s and loader.samples:
                result.append(
                    Measurement(
                        metric="loader.samples_per_s",
                        subject=subject,
                        value=round(loader.samples / record.watched_s, 3),
                        unit="samples/s",
                        samples=loader.batches,
                        settings=dict(settings),
                    )
                )
    return tuple(result)


def _steps(record: WatchRecord, subject: str) -> list[Measurement]:
    settings: dict[str, Setting] = {"steps": len(record.steps), "counted_by": record.step_source}
    walls = [step.wall_ms for step in record.steps]
    waits = [step.copy_wait_ms + step.sync_wait_ms for step in record.steps]
    return [
        _mean("step.ms", subject, walls, {**settings, "median_ms": round(statistics.median(walls), 3)}),
        _mean("step.loader_wait_ms", subject, [step.loader_wait_ms for step in record.steps], settings),
        _mean("step.waited_ms", subject, waits, settings),
    ]


def _mean(metric: str, subject: str, values: Sequence[float], settings: dict[str, Setting]) -> Measurement:
    spread = None
    if len(values) > 1:
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        spread = (round(tenths[0], 4), round(tenths[-1], 4))
    return Measurement(
        metric=metric,
        subject=subject,
        value=round(statistics.fmean(values), 4),
        unit="ms",
        spread=spread,
        samples=len(values),
        settings=dict(settings),
    )
