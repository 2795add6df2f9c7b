"""What torch and its loader workers say when something goes wrong, in the words of all their versions."""

from __future__ import annotations

import re

from gpudoctor.model import FaultKind

# The first that matches decides: a full /dev/shm also kills workers, so it stands before "killed".
_KINDS: tuple[tuple[FaultKind, str], ...] = (
    ("cuda", r"Cannot re-initialize CUDA in forked subprocess"),
    ("shm", r"unable to (allocate|write|mmap|open) (to )?(shared memory|file </torch_).*No space left"),
    ("shm", r"insufficient shared memory|out of shared memory|bus error|killed by signal: Bus error|ended by SIGBUS"),
    ("files", r"Too many open files|received 0 items of ancdata"),
    ("pickle", r"[Cc]an'?not pickle|[Cc]an't pickle|Can't get local object|PicklingError|not picklable"),
    ("ragged", r"stack expects each tensor to be equal size|each element in list of batch should be of equal size"),
    ("hang", r"DataLoader timed out after|could not unlink the shared memory file"),
    ("killed", r"DataLoader worker .*(exited unexpectedly|killed by signal)|ended by SIGKILL"),
)


def fault_kind(text: str) -> FaultKind | None:
    """The kind of loader fault that a text tells of, or None."""
    for kind, pattern in _KINDS:
        if re.search(pattern, text):
            return kind
    return None
