"""Steps of a trace, the waits for the loader, and the picture of one step."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpudoctor.model import TraceLane, TraceLoader, TraceStep, TraceTimeline
from gpudoctor.read.breakdown import Device, ms
from gpudoctor.read.intervals import Union, union
from gpudoctor.read.recording import COMMUNICATION, COMPUTE, COPY, MEMSET, Mark, Recording

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_MOST_STEPS = 1000
_SLICES = 96
_LOADER_CLASS = re.compile(r"#?(\w*DataLoaderIter\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Whole steps in order. `window_before`: work launched from here on is left out; None: none is."""

    source: Literal["ProfilerStep", "optimizer", "nvtx", "none"] = "none"
    whole: tuple[Mark, ...] = ()
    window_before: int | None = None

    @property
    def span(self) -> tuple[int, int] | None:
        return (self.whole[0].start, self.whole[-1].end) if self.whole else None

    def edges(self) -> tuple[Ints, Ints]:
        import numpy as np

        return (
            np.array([mark.start for mark in self.whole], dtype=np.int64),
            np.array([mark.end for mark in self.whole], dtype=np.int64),
        )


def find_steps(recording: Recording, source: Literal["ProfilerStep", "nvtx"] = "ProfilerStep") -> Steps:
    """ProfilerStep ranges without the last one where there are several, else the time between optimizer steps."""
    marks: list[Mark] = []
    for mark in sorted(recording.steps, key=lambda mark: mark.start):
        # Else another thread repeats the step. Rounded times let steps overlap a little.
        if not marks or mark.start >= (marks[-1].start + marks[-1].end) // 2:
            marks.append(mark)
    if len(marks) > 1:
        return Steps(source=source, whole=tuple(marks[:-1]), window_before=marks[-1].start)
    if marks:
        return Steps(source=source, whole=tuple(marks))
    ends = sorted(mark.end for mark in recording.optimizer_steps)
    if len({mark.name for mark in recording.optimizer_steps}) == 1 and len(ends) > 2:
        pairs = enumerate(itertools.pairwise(ends), start=2)
        whole = tuple(Mark(name=f"step {number}", start=a, end=b) for number, (a, b) in pairs)
        return Steps(source="optimizer", whole=whole)
    return Steps()


def loader_union(recording: Recording) -> Union:
    import numpy as np

    marks = recording.loader_waits
    start = np.array([mark.start for mark in marks], dtype=np.int64)
    return union(start, np.array([mark.end for mark in marks], dtype=np.int64))


def loader_facts(recording: Recording, span: tuple[int, int] | None) -> TraceLoader | None:
    """The ranges in which the host asked a loader for a batch, in whole steps where there are some."""
    marks = [mark for mark in recording.loader_waits if span is None or span[0] <= mark.start < span[1]]
    if not marks:
        return None
    name = max({mark.name for mark in marks}, key=[mark.name for mark in marks].count)
    found = _LOADER_CLASS.search(name)
    kind = found[1] if found else name
    workers = {"_SingleProcessDataLoaderIter": False, "_MultiProcessingDataLoaderIter": True}.get(kind)
    return TraceLoader(
        name=kind[:200], workers=workers, calls=len(marks), waited_ms=ms(sum(mark.end - mark.start for mark in marks))
    )


def step_facts(steps: Steps, work: Device | None, loader: Union, waits: Union) -> tuple[TraceStep, ...]:
    """Each whole step; at most 1000 of them."""
    import numpy as np

    if not steps.whole:
        return ()
    start, end = steps.edges()
    wall = end - start

    def covered(item: Union) -> Ints:
        return item.before(end) - item.before(start)

    empty = np.zeros(len(wall), dtype=np.int64)
    compute = with_communication = busy = empty
    if work is not None:
        compute = covered(work.of(COMPUTE))
        with_communication = covered(work.of(COMPUTE, COMMUNICATION))
        busy = covered(work.of(COMPUTE, COMMUNICATION, COPY, MEMSET))
    loaded, waited = covered(loader), covered(waits)
    return tuple(
        TraceStep(
            name=mark.name[:200],
            wall_ms=ms(wall[place]),
            loader_wait_ms=ms(loaded[place]) if len(loader.start) else None,
            sync_wait_ms=ms(waited[place]),
            compute_ms=ms(compute[place]),
            communication_ms=ms(with_communication[place] - compute[place]),
            copy_ms=ms(busy[place] - with_communication[place]),
            idle_ms=ms(wall[place] - busy[place]) if work is not None else 0.0,
        )
        for place, mark in enumerate(steps.whole[:_MOST_STEPS])
    )


def typical_step(steps: Steps) -> Mark | None:
    """The whole step whose wall time is nearest to the median."""
    import numpy as np

    if not steps.whole:
        return None
    walls = np.array([mark.end - mark.start for mark in steps.whole])
    return steps.whole[int(np.abs(walls - np.median(walls)).argmin())]


def operators_in(recording: Recording, mark: Mark | None) -> Union:
    """When any thread ran an operator during a step."""
    import numpy as np

    starts, lengths = recording.operators.ints("start"), recording.operators.ints("length")
    rows = np.flatnonzero(starts < mark.end) if mark is not None else np.empty(0, dtype=np.int64)
    if mark is not None:
        rows = rows[starts[rows] + lengths[rows] > mark.start]
    return union(starts[rows], starts[rows] + lengths[rows].astype(np.int64))


def timeline(mark: Mark | None, lanes: dict[str, Union], work: Device | None) -> TraceTimeline | None:
    """A step in slices; `lanes` are those of the host, in order, the device's follow."""
    import numpy as np

    if mark is None:
        return None
    edges = np.linspace(mark.start, mark.end, _SLICES + 1).astype(np.int64)
    if work is not None:
        lanes = {
            **lanes,
            "compute": work.of(COMPUTE),
            "communication": work.of(COMMUNICATION),
            "copy": work.of(COPY, MEMSET),
        }
    shown = []
    for name, item in lanes.items():
        share = np.diff(item.before(edges)) / np.maximum(1, np.diff(edges))
        if share.any():
            occupied = tuple(round(float(part), 2) for part in share)
            shown.append(TraceLane(name=name, occupied=occupied))  # type: ignore[arg-type]
    return TraceTimeline(step=mark.name[:200], wall_ms=ms(mark.end - mark.start), lanes=tuple(shown))
