"""What a trace holds, as columns: the form in which every trace reader hands it to the analysis.

A trace has millions of events, so none is kept as an object: 18 bytes an operator, 42 an activity, 16 a launch.
Times are nanoseconds from a base that the reader chooses, as 64-bit integers.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

COMPUTE, COMMUNICATION, COPY, MEMSET, SYNC = range(5)  # kinds of activity; SYNC records are no work
_MOST_NAMES = 200_000


class Ids(dict[str, int]):
    """Strings numbered in the order of their first use; beyond a bound, all new ones share number 0."""

    def __init__(self) -> None:
        super().__init__({"": 0})

    def __missing__(self, key: str) -> int:
        if len(self) >= _MOST_NAMES:
            return 0
        number = self[key] = len(self)
        return number


class Table:
    """Columns that grow; `ints` gives one as numbers for calculation, without a copy."""

    def __init__(self, **types: str) -> None:
        self._columns = {name: array(kind) for name, kind in types.items()}

    def add(self, **values: Any) -> None:
        """Append a list or numpy array to each column."""
        for name, items in values.items():
            column = self._columns[name]
            if hasattr(items, "astype"):
                column.frombytes(items.astype(column.typecode, copy=False).tobytes())
            else:  # much faster than to extend by the list
                column.extend(items if isinstance(items, array) else array(column.typecode, items))

    def __len__(self) -> int:
        return max(map(len, self._columns.values()))

    def ints(self, name: str) -> Ints:
        import numpy as np

        column = self._columns[name]
        return np.frombuffer(column, dtype=column.typecode) if column else np.empty(0, dtype=column.typecode)

    def take(self, name: str, rows: Ints) -> Ints:
        """Some rows of a column, whose memory is given back."""
        chosen = self.ints(name)[rows]
        self._columns[name] = array(self._columns[name].typecode)
        return chosen

    def clear(self) -> None:
        """Give all memory back."""
        for name, column in self._columns.items():
            self._columns[name] = array(column.typecode)


def rounded_up(lengths: Ints) -> Any:
    """Lengths of time in half the memory, at most a ten-millionth too long and never too short."""
    import numpy as np

    half = lengths.astype(np.float32)
    return np.where(half.astype(np.float64) < lengths, np.nextafter(half, np.float32(np.inf)), half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A named range of the host that means something here: a step, a wait for the loader."""

    name: str
    start: int
    end: int


@dataclass(slots=True)
class Recording:
    """One trace. `activities` of the device; `launches`: host calls that may start one; `calls`: host calls that may
    wait; `operators` on the host (with the number of a call stack in `stacks`); `frames` of the user's Python code."""

    names: Ids = field(default_factory=Ids)
    stacks: Ids = field(default_factory=Ids)
    activities: Table = field(
        default_factory=lambda: Table(
            start="q", end="q", correlation="q", bytes="q", stream="i", device="i", name="i", kind="b"
        )
    )
    launches: Table = field(default_factory=lambda: Table(start="q", correlation="q"))
    calls: Table = field(default_factory=lambda: Table(start="q", end="q", correlation="q", thread="i", name="i"))
    # `length` as `rounded_up` gives it; `stack` is empty in a trace without stacks
    operators: Table = field(default_factory=lambda: Table(start="q", length="f", thread="h", name="i", stack="i"))
    frames: Table = field(default_factory=lambda: Table(start="q", length="f", thread="h", name="i"))
    steps: list[Mark] = field(default_factory=list)  # ProfilerStep ranges
    optimizer_steps: list[Mark] = field(default_factory=list)
    loader_waits: list[Mark] = field(default_factory=list)
    events: int = 0
    not_understood: int = 0
    truncated: bool = False
    base_ns: int = 0  # of the times above on the trace's clock (since the epoch where the trace says so)
    rank: int | None = None
    world_size: int | None = None
    device_names: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
