"""Measurements of a watched command: what the rules judge and the report shows, one row a rank."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from gpudoctor.model import Measurement, Setting, TraceFacts, Watched, WatchRecord
from gpudoctor.tune.proof import training_records
from gpudoctor.tune.verdict import Breakdown, as_watched, breakdown, factor, judge


def subject_of(record: WatchRecord, number: int) -> str:
    return f"rank:{record.rank if record.rank is not None else number}"


def judged(watched: Watched, traces: Mapping[int, TraceFacts]) -> tuple[Watched, tuple[TraceFacts, ...]]:
    """The same with a verdict in each record that has steps, and the traces with the watched steps' times, by rank.

    traces: of the profiler windows, by process id.
    """
    records, shown = [], []
    for record in watched.records:
        item = breakdown(record, traces.get(record.pid))
        if item is not None:
            slowest = max(record.feeding, key=lambda loader: loader.wait_ms, default=None)
            bound, verdict = judge(item, loader_site=slowest.site if slowest is not None else None)
            record = dataclasses.replace(record, bound=bound, verdict=verdict)
            if record.pid in traces:
                shown.append(dataclasses.replace(as_watched(traces[record.pid], item), bound=bound))
        records.append(record)
    shown.sort(key=lambda facts: facts.rank)
    return dataclasses.replace(watched, records=tuple(records)), tuple(shown)


def measurements(watched: Watched, traces: Mapping[int, TraceFacts] | None = None) -> tuple[Measurement, ...]:
    """step.*, loader.wait_ms and loader.samples_per_s by rank.

    Means over the steady steps, since the bursts of a prefetch queue make medians lie; the median of step.ms
    stands in its settings. Spread is the 10th and the 90th percentile. What only the profiler knows (step.device_busy
    and the like) is there where a trace of the rank is.
    """
    result: list[Measurement] = []
    for number, record in enumerate(training_records(watched)):
        subject = subject_of(record, number)
        item = breakdown(record, (traces or {}).get(record.pid))
        if item is not None:
            result += _steps(record, item, subject)
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


def _steps(record: WatchRecord, item: Breakdown, subject: str) -> list[Measurement]:
    settings: dict[str, Setting] = {
        "steps": len(record.steps),
        "warm_up": item.warm_up,
        "counted_by": record.step_source,
    }
    steps = record.steady
    walls = [step.wall_ms for step in steps]
    waits = [step.copy_wait_ms + step.sync_wait_ms for step in steps]
    found = [
        _mean("step.ms", subject, walls, {**settings, "median_ms": round(statistics.median(walls), 3)}),
        _mean("step.loader_wait_ms", subject, [step.loader_wait_ms for step in steps], settings),
        _mean("step.copy_wait_ms", subject, [step.copy_wait_ms for step in steps], settings),
        _mean("step.sync_wait_ms", subject, [step.sync_wait_ms for step in steps], settings),
        _mean("step.waited_ms", subject, waits, settings),
    ]

    def add(metric: str, value: float | None, unit: str, **more: Setting) -> None:
        if value is not None:
            conditions: dict[str, Setting] = {**settings, **more}
            found.append(
                Measurement(metric=metric, subject=subject, value=round(value, 4), unit=unit, settings=conditions)
            )

    if record.communication is not None:
        add("step.communication_wait_ms", item.communication, "ms")
    add("step.host_ms", item.host, "ms")
    add("step.gain_bound", factor(item.gain_loader, item), "x", cause="loader")
    add("step.gain_bound", factor(item.gain_waits, item), "x", cause="waits")
    device = item.device
    if device is not None:
        window: dict[str, Setting] = {"profiled_steps": record.window.steps if record.window is not None else None}
        add("step.device_busy", device.busy / item.step, "share of the step", **window)
        for name in ("compute", "communication", "copy", "idle_loader", "idle_sync", "idle_host", "idle_other"):
            add(f"step.device_{name}_ms", getattr(device, name), "ms", **window)
        add("step.kernels", device.kernels, "kernels a step", **window)
        add("step.kernel_us", device.kernel_us, "us", **window)
        add("step.gain_bound", factor(device.idle_sync + device.idle_host, item), "x", cause="host", **window)
    return found


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
