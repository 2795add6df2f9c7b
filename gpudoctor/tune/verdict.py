"""What limits a step: watched steps and a few profiled ones, joined.

The watched steps say how long a step takes and where the host waits; the profiled ones say how long the device is
busy in a step and why it idles in between. The profiler slows the host, so no length of a step and no amount of idle
time is taken from it: idle is what the watched step leaves beside the busy time, split as the profiler saw it split.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import fmean

from gpudoctor.model import Bound, TraceFacts, TraceIdle, WatchRecord

_WORTH_TELLING = 0.05  # of the step: less idle time than this is not told beside a busy device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Milliseconds of a step on the device. `communication` and `copy` are exposed: nothing is computed meanwhile.
    The idle parts sum to `idle`; `sync` is idle time that begins while the host stands in a synchronising call."""

    compute: float
    communication: float
    copy: float
    idle_loader: float
    idle_sync: float
    idle_host: float
    idle_other: float
    kernels: float | None = None
    kernel_us: float | None = None

    @property
    def busy(self) -> float:
        return self.compute + self.communication + self.copy

    @property
    def idle(self) -> float:
        return self.idle_loader + self.idle_sync + self.idle_host + self.idle_other


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Means over the steady steps of one rank, in milliseconds; `hidden` waits are known from the profiler alone."""

    steps: int
    warm_up: int
    step: float
    loader: float
    copy: float
    sync: float
    hidden: float
    communication: float
    cuda: bool
    device: DeviceTime | None = None

    @property
    def waits(self) -> float:
        """What the host waits for the device: copies and synchronising calls."""
        return min(self.copy + self.sync + self.hidden, self.step)

    @property
    def host(self) -> float:
        """What is left to the host's own work: Python, launching, computing on the CPU."""
        return max(0.0, self.step - self.loader - self.waits - self.communication)

    @property
    def gain_loader(self) -> float:
        """Milliseconds that loading ahead can win at most."""
        if self.device is None:
            return min(self.loader, self.step)
        return self.device.idle_loader

    @property
    def gain_waits(self) -> float:
        """Milliseconds that removing all waits for the device can win at most: never more than the waits, the idle
        time that is not the loader's, and the smaller of host and device time, since they then run side by side."""
        if self.device is None:
            return min(self.waits, self.host)
        return min(self.waits, self.device.idle - self.device.idle_loader, self.host, self.device.busy)


def breakdown(record: WatchRecord, facts: TraceFacts | None) -> Breakdown | None:
    """None where no step was seen. `facts`: the trace of the record's profiler window."""
    steps = record.steady
    if not steps:
        return None
    step = fmean(item.wall_ms for item in steps)
    loader = fmean(item.loader_wait_ms for item in steps)
    known = [sync for sync in record.syncs if sync.detected_by == "sync-debug-mode"]
    return Breakdown(
        steps=len(steps),
        warm_up=len(record.steps) - len(steps),
        step=step,
        loader=loader,
        copy=fmean(item.copy_wait_ms for item in steps),
        sync=fmean(item.sync_wait_ms for item in steps),
        hidden=sum(sync.window_waited_ms or 0.0 for sync in known),
        communication=fmean(item.communication_ms for item in steps),
        cuda=record.cuda,
        device=_device_time(facts, step, loader) if facts is not None else None,
    )


def _device_time(facts: TraceFacts, step: float, loader: float) -> DeviceTime | None:
    if facts.window_ms is None or facts.idle is None or not facts.whole_steps or step <= 0:
        return None
    count = facts.whole_steps
    parts = [
        (value or 0.0) / count for value in (facts.compute_ms, facts.exposed_communication_ms, facts.exposed_copy_ms)
    ]
    busy = sum(parts)
    if busy > step:  # kernels may take a little longer under the profiler
        parts = [part * step / busy for part in parts]
        busy = step
    left = step - busy
    idle = facts.idle
    waited = facts.loader.waited_ms if facts.loader is not None else 0.0
    # The steps that were profiled may have found their batches ready: then all of the wait is taken to be idle time.
    share = min(1.0, idle.loader_ms / waited) if waited > 0.01 * facts.window_ms else 1.0
    by_loader = min(left, loader * share)
    left -= by_loader
    causes = (idle.sync_ms, idle.host_ms + idle.launch_ms, idle.kernel_ms + idle.dependency_ms + idle.unknown_ms)
    total = sum(causes)
    by_sync, by_host, by_other = (left * cause / total for cause in causes) if total > 0 else (0.0, left, 0.0)
    return DeviceTime(
        compute=parts[0],
        communication=parts[1],
        copy=parts[2],
        idle_loader=by_loader,
        idle_sync=by_sync,
        idle_host=by_host,
        idle_other=by_other,
        kernels=facts.kernels_per_step,
        kernel_us=facts.median_kernel_us,
    )


def as_watched(facts: TraceFacts, item: Breakdown) -> TraceFacts:
    """The trace with the watched step in place of the profiled one, whose length and idle time are the profiler's too.

    What the device did is kept; step time, loader wait and idle time, in sum and by cause, are those of the watched
    steps. The picture of one step and the waits stay as they were recorded.
    """
    device = item.device
    if device is None or facts.idle is None:
        return facts
    count, wall = facts.whole_steps, max(item.step, 1e-9)
    late = facts.idle.host_ms + facts.idle.launch_ms
    launch = device.idle_host * facts.idle.launch_ms / late if late > 0 else 0.0
    between = facts.idle.kernel_ms + facts.idle.dependency_ms + facts.idle.unknown_ms
    scale = device.idle_other / between if between > 0 else 0.0
    idle = TraceIdle(
        loader_ms=round(device.idle_loader * count, 4),
        sync_ms=round(device.idle_sync * count, 4),
        host_ms=round((device.idle_host - launch) * count, 4),
        launch_ms=round(launch * count, 4),
        kernel_ms=round(facts.idle.kernel_ms * scale * count, 4),
        dependency_ms=round(facts.idle.dependency_ms * scale * count, 4),
        unknown_ms=round(facts.idle.unknown_ms * scale * count, 4),
    )
    steps = tuple(
        dataclasses.replace(
            step,
            wall_ms=round(wall, 4),
            loader_wait_ms=round(item.loader, 4) if facts.loader is not None else None,
            sync_wait_ms=round(item.waits, 4),
            compute_ms=round(device.compute, 4),
            communication_ms=round(device.communication, 4),
            copy_ms=round(device.copy, 4),
            idle_ms=round(device.idle, 4),
        )
        for step in facts.steps
    )
    return dataclasses.replace(
        facts,
        steps=steps,
        median_step_ms=round(wall, 4),
        window_ms=round(wall * count, 4),
        idle_pct=round(100 * device.idle / wall, 3),
        compute_pct=round(100 * device.compute / wall, 3),
        other_pct=round(100 * (device.communication + device.copy) / wall, 3),
        idle=idle,
        notes=(*facts.notes, "step and idle times are those of the watched steps: the profiler makes steps longer"),
    )


def judge(item: Breakdown, *, loader_site: str | None = None) -> tuple[Bound, str]:
    """What limits the step, and one sentence that says by how much, and what fixing it can win at most."""
    if item.device is None:
        return _judge_host(item, loader_site)
    device = item.device
    parts: dict[Bound, float] = {
        "device": device.compute,
        "loader": device.idle_loader,
        "host": device.idle_sync + device.idle_host,
        "communication": device.communication,
        "copy": device.copy,
        "unknown": device.idle_other,
    }
    bound = max(parts, key=lambda name: parts[name])
    if bound == "device":
        text = f"device bound: the GPU computes {_of(device.compute, item)}"
        if device.idle >= _WORTH_TELLING * item.step:
            text += f"; it idles {_share(device.idle, item)}, {_reason(device)}: {_at_most(device.idle, item)}"
        return bound, text
    if bound == "loader":
        at = f" at {loader_site}" if loader_site else ""
        text = f"loader bound: the GPU idles {_of(device.idle_loader, item)} while the step waits for a batch"
        return bound, f"{text}{at}: {_at_most(device.idle_loader, item)} from loading ahead"
    if bound == "host":
        return bound, _host_text(item, device)
    if bound == "unknown":
        text = f"the GPU idles {_of(device.idle_other, item)} although work is queued"
        return bound, f"{text} (short kernels, or work that waits for another stream or process)"
    does = "communicates" if bound == "communication" else "copies"
    part = parts[bound]
    return bound, f"{bound} bound: the GPU only {does} in {_of(part, item)}: {_at_most(part, item)} if it were hidden"


def _host_text(item: Breakdown, device: DeviceTime) -> str:
    late = device.idle_sync + device.idle_host
    text = f"host bound: the GPU idles {_of(late, item)} because work is launched late: {_at_most(late, item)}"
    if device.kernels and device.kernel_us:
        text += (
            f" with fewer or larger launches ({device.kernels:.0f} kernels a step, median {device.kernel_us:.3g} us)"
        )
    if item.gain_waits >= _WORTH_TELLING * item.step:
        text += f", of which all waits for the GPU together {_at_most(item.gain_waits, item)}"
    return text


def _judge_host(item: Breakdown, loader_site: str | None) -> tuple[Bound, str]:
    """Without the profiler only the host's side is known."""
    parts: dict[Bound, float] = {
        "loader": item.loader,
        "host": item.host,
        "device": item.waits,
        "communication": item.communication,
    }
    bound = max(parts, key=lambda name: parts[name])
    missing = "; what the GPU does meanwhile was not measured" if item.cuda else ""
    if bound == "loader":
        at = f" at {loader_site}" if loader_site else ""
        text = f"loader bound: the step waits {_of(item.loader, item)} for a batch{at}"
        return bound, f"{text}: {_at_most(item.gain_loader, item)} from loading ahead{missing}"
    if bound == "communication":
        return bound, f"communication bound: the step waits {_of(item.communication, item)} for other ranks"
    if bound == "device":
        text = f"the host waits {_of(item.waits, item)} for the GPU"
        return bound, f"device bound, it seems: {text}: {_at_most(item.gain_waits, item)} from removing all waits"
    if item.cuda:
        return "unknown", f"the host works {_of(item.host, item)}{missing}"
    return bound, f"host bound: no GPU is used; the CPU computes {_of(item.host, item)}"


def _of(part: float, item: Breakdown) -> str:
    return f"{part:.3g} of {item.step:.3g} ms a step ({_share(part, item)})"


def _share(part: float, item: Breakdown) -> str:
    return f"{100 * part / item.step if item.step else 0:.0f} %"


def _at_most(part: float, item: Breakdown) -> str:
    """The factor that is left when a part of the step is gone."""
    factor = item.step / max(1e-9, item.step - part)
    return f"at most {factor:.2f}x" if factor < 10 else "at most 10x and more"


def factor(part: float, item: Breakdown) -> float:
    """By which the rate rises at most when a part of the step, in milliseconds, is gone; at most 100."""
    return item.step / max(0.01 * item.step, item.step - part) if item.step else 1.0


def _reason(device: DeviceTime) -> str:
    """The largest cause, in words."""
    words = {
        "idle_loader": "mostly while the step waits for a batch",
        "idle_sync": "mostly after a wait for the GPU",
        "idle_host": "mostly for launches that come late",
        "idle_other": "mostly between kernels that are queued",
    }
    return words[max(words, key=lambda name: float(getattr(device, name)))]
