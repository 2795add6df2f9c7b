"""Unions of time intervals, as sorted arrays of begins and ends that neither touch nor overlap (64-bit nanoseconds)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Union:
    start: Ints
    end: Ints

    def total(self) -> int:
        return int((self.end - self.start).sum())

    def before(self, times: Ints) -> Ints:
        """For each time, how much of the union lies before it; differences of it are coverage between times."""
        import numpy as np

        if not len(self.start):
            return np.zeros(len(times), dtype=np.int64)
        done = np.concatenate(([0], np.cumsum(self.end - self.start)))
        place = np.searchsorted(self.start, times, side="right") - 1
        inside = np.clip(times - self.start[place], 0, self.end[place] - self.start[place])
        covered: Ints = np.where(place < 0, 0, done[place] + inside)
        return covered

    def within(self, start: int, end: int) -> int:
        """How much of the union lies between two times."""
        import numpy as np

        low, high = self.before(np.array([start, max(start, end)], dtype=np.int64))
        return int(high - low)

    def gaps(self, start: int, end: int) -> Union:
        """What is left of the time from start to end."""
        import numpy as np

        starts = np.concatenate(([start], self.end))
        ends = np.concatenate((self.start, [end]))
        starts, ends = np.maximum(starts, start), np.minimum(ends, end)
        kept = ends > starts
        return Union(starts[kept], ends[kept])

    def overlap(self, other: Union) -> int:
        """How long both hold at once."""
        return self.total() + other.total() - join(self, other).total()

    def without(self, other: Union) -> int:
        """How long this holds and the other does not."""
        return join(self, other).total() - other.total()


def union(start: Ints, end: Ints, *, ordered: bool = False) -> Union:
    """The union of intervals in any order (`ordered`: by their begin); empty and inverted ones count as nothing."""
    import numpy as np

    if not ordered:
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    kept = end > start
    if not kept.all():
        start, end = start[kept], end[kept]
    if not len(start):
        return Union(start, end)
    reach = np.maximum.accumulate(end)
    fresh = np.flatnonzero(start[1:] > reach[:-1]) + 1
    return Union(start[np.concatenate(([0], fresh))], reach[np.concatenate((fresh - 1, [len(start) - 1]))])


def join(*unions: Union) -> Union:
    """The union of unions."""
    import numpy as np

    return union(np.concatenate([item.start for item in unions]), np.concatenate([item.end for item in unions]))
