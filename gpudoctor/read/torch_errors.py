"""What torch and its loader workers say when something goes wrong, in the words of all their versions."""

from __future__ import annotations

import re

from gpudoctor.model import Case, FaultKind, LoaderFault, LoaderPreflight, LoaderStudy, Source, WatchedLoader
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "torch-error"
_MOST = 50  # messages of one log
# The first that matches decides: a full /dev/shm also kills workers, so it stands before "killed".
_KINDS: tuple[tuple[FaultKind, str], ...] = (
    ("cuda", r"Cannot re-initialize CUDA in forked subprocess"),
    ("shm", r"unable to (allocate|write|mmap|open) (to )?(shared memory|file </torch_).*No space left"),
    ("shm", r"insufficient shared memory|out of shared memory|Unexpected bus error|killed by signal: Bus error"),
    ("shm", r"ended by SIGBUS"),
    ("files", r"Too many open files|received 0 items of ancdata"),
    ("pickle", r"[Cc]an'?not pickle|[Cc]an't pickle|Can't get local object|PicklingError|not picklable"),
    ("ragged", r"stack expects each tensor to be equal size|each element in list of batch should be of equal size"),
    ("hang", r"DataLoader timed out after|could not unlink the shared memory file"),
    ("oom", r"DataLoader worker .*killed by signal: Killed"),
    ("killed", r"DataLoader worker .*(exited unexpectedly|killed by signal)|ended by SIGKILL"),
    ("tokenizers", r"huggingface/tokenizers: The current process just got forked"),
    ("hint", r"does not have many workers which may be a bottleneck"),
)


def fault_kind(text: str) -> FaultKind | None:
    """The kind of loader fault that a text tells of, or None."""
    for kind, pattern in _KINDS:
        if re.search(pattern, text):
            return kind
    return None


def is_kind(text: str) -> bool:
    """Whether the text holds a message of a loader or its workers."""
    return fault_kind(text) is not None


def read_text(text: str, file: str) -> Parts:
    """The messages as the faults of a loader that is not known any further, each with its line."""
    found: list[LoaderFault] = []
    for number, line in enumerate(text.splitlines(), 1):
        kind = fault_kind(line)
        if kind is not None and len(found) < _MOST:
            shown = " ".join(line.split())[:300]
            found.append(LoaderFault(kind=kind, text=shown, site=f"{file}:{number}"))
    loader = WatchedLoader(
        site=file, ordinal=0, role="unknown", loader_class="DataLoader", dataset_class="", iterable_dataset=False
    )
    study = LoaderStudy(site=file, target=file, loader=loader, preflight=LoaderPreflight(), faults=tuple(found))
    case = Case(loader=study, sources=(Source(path="loader", origin=file),))
    return Parts(parts=(Part(case=case),), lines=line_count(text))
