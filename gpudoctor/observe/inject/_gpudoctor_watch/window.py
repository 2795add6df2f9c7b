"""A few steps under torch.profiler once the watched ones are over: what the device did, and waits that only it times.

One step is recorded first to count its events (and to let the profiler start up); after a step without the profiler
as many are recorded as fit. Steps end inside the optimizer's own range, and a range that is open while one recording
ends and the next begins is written into freed memory when it closes: hence the step in between. No stacks are
recorded. All ranks run the same number of steps in the window, so that they leave together.
"""

import bisect
import os
import re
import warnings

from _gpudoctor_watch.state import W, clock, local

MOST_EVENTS = 400000
MOST_SECONDS = 60.0  # for the window: no step is recorded where it would take longer
REPLAY_S = 0.002  # a warning comes at most this long after the call that it tells of
_WAITS = re.compile(r"^(?:cuda|hip|cu)\w*Synchronize|^(?:cuda|hip)Free$|^(?:cuda|hip)Memcpy|^cuMemcpy")


class Window:
    """`reason`: why the watched steps ended, kept for the record. `intervals` and `warnings`: what ran in the steps
    recorded, as the wrappers and sync debug mode saw it."""

    def __init__(self, reason, alone):
        self.reason, self.alone = reason, alone
        self.steps_left = 2 + W.plan["profiler_steps"]
        self.counting = True
        self.next = 0  # steps to record from the next step on
        self.begun = clock()
        self.profiler = self.range = None
        self.events = self.recording = 0  # steps that the profiler is to record; 0: it is off
        self.marks = []
        self.intervals, self.warnings = [], []
        self.result = {"steps": 0, "skipped": self._unable()}
        if self.result["skipped"] is None:
            self._guarded(self._start, 1)

    def _unable(self):
        torch = W.torch
        if not torch.profiler.kineto_available():
            return "this torch was built without its profiler"
        enabled = getattr(torch._C._autograd, "_profiler_enabled", None)
        if enabled is not None and enabled():
            return "the script runs torch.profiler itself"
        last = W.steps[-10:]
        mean = sum(values[0] for values in last) / 1e3 / max(1, len(last))
        if 2 * mean > MOST_SECONDS:
            return f"a step takes {mean:.0f} s"
        return None

    def _guarded(self, function, *args):
        """Neither a failure of the profiler nor its warnings reach the script."""
        local.call += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function(*args)
        except Exception as error:
            self.recording = 0
            self.result["skipped"] = f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            local.call -= 1

    def _start(self, steps):
        torch = W.torch
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self.profiler = torch.profiler.profile(activities=activities)
        self.profiler.start()
        self.recording = steps
        self.marks, self.intervals, self.warnings = [], [], []
        self._mark()

    def _mark(self):
        """Ends the range of one step and begins that of the next, by the names that trace readers look for."""
        if self.range is not None:
            self.range.__exit__(None, None, None)
        self.range = W.torch.autograd.profiler.record_function(f"ProfilerStep#{len(self.marks)}")
        self.marks.append(clock())
        self.range.__enter__()

    # --- called by the wrappers ------------------------------------------------------------------------------

    def called(self, begun, ended):
        """A call that its wrapper times itself."""
        if self.recording:
            self.intervals.append((begun, ended))

    def warned(self, entry, now):
        if self.recording and entry is not None:
            self.warnings.append((now, entry))

    # --- steps -----------------------------------------------------------------------------------------------

    def step(self):
        """A step has ended; True when the window is over."""
        self.steps_left -= 1
        if self.next:
            steps, self.next = self.next, 0
            self._guarded(self._start, steps)
        elif self.recording:
            self._guarded(self._mark)
            if self.recording and len(self.marks) > self.recording:
                self._guarded(self._recorded)
        return self.steps_left <= 0 or (self.alone and not self.recording and not self.next)

    def _recorded(self):
        self._stop()
        if self.counting:
            self.counting = False
            by_time = int(MOST_SECONDS / max(1e-9, self.marks[1] - self.marks[0]))
            self.next = min(self.steps_left - 1, MOST_EVENTS // max(1, self.events), by_time)
        if self.next:
            self.profiler = self.found = None
        else:
            self._keep()

    def _stop(self):
        """With an empty step at the end, because readers leave the last one out: its device work may be cut off."""
        torch = W.torch
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.recording = 0
        self.range.__exit__(None, None, None)
        self.range = None
        self.profiler.stop()
        self.found = self.profiler.profiler.kineto_results.events()
        self.events = len(self.found)

    def _keep(self):
        steps = len(self.marks) - 1
        name = f"trace-{W.pid}.json"
        path = os.path.join(W.plan["record_dir"], name)
        self.profiler.export_chrome_trace(path + ".part")
        os.replace(path + ".part", path)
        total, unknown = self._join()
        self.result = {
            "steps": steps,
            "step_ms": (self.marks[-1] - self.marks[0]) * 1e3 / steps,
            "events": self.events,
            "sync_ms": total * 1e3 / steps,
            "unattributed_ms": unknown * 1e3 / steps,
            "seconds": clock() - self.begun,
            "trace": name,
            "skipped": None,
        }

    def _join(self):
        """Gives each waiting call that no wrapper timed to the line that sync debug mode named right after it.

        Returns the seconds in waiting calls, and those of them that belong to no known line.
        """
        steps = len(self.marks) - 1
        offset, waits = None, []
        for event in self.found:
            name = event.name()
            if name == "ProfilerStep#0" and _on_host(event):
                offset = _begin(event) - self.marks[0]
            elif _WAITS.match(name) and _on_host(event):
                waits.append((_begin(event), _length(event)))
        if offset is None:
            return 0.0, 0.0
        ends = [ended for _, ended in self.intervals]
        times = [now for now, _ in self.warnings]
        total = unknown = 0.0
        for begun, length in waits:
            begun -= offset
            if not self.marks[0] <= begun < self.marks[-1]:
                continue
            total += length
            ended = begun + length
            place = bisect.bisect_left(ends, ended)
            if place < len(ends) and self.intervals[place][0] <= begun:
                continue
            place = bisect.bisect_left(times, ended)
            if place < len(times) and times[place] - ended <= REPLAY_S:
                entry = self.warnings[place][1]
                entry.window = (entry.window or 0.0) + length * 1e3 / steps
            else:
                unknown += length
        for _, entry in self.warnings:
            entry.window = entry.window or 0.0
        return total, unknown

    def close(self):
        """The script ended within the window: what was recorded of it is kept where at least one step is whole."""
        if self.recording:
            self._guarded(self._cut)
        if not self.result["steps"] and self.result["skipped"] is None:
            self.result["skipped"] = "the command ended first"

    def _cut(self):
        whole = len(self.marks) - 1
        self._stop()
        if whole > 0:
            self._keep()

    def facts(self):
        return self.result


def _on_host(event):
    return event.device_type() == W.torch.autograd.DeviceType.CPU


def _begin(event):
    """Seconds; torch before 2.4 has microseconds only."""
    return event.start_ns() / 1e9 if hasattr(event, "start_ns") else event.start_us() / 1e6


def _length(event):
    return event.duration_ns() / 1e9 if hasattr(event, "duration_ns") else event.duration_us() / 1e6
