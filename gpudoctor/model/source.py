"""What the source text of a training program shows: lines that run in each step and touch the GPU.

Facts only; rules judge them. A site is ``FILE:LINE`` with FILE relative to the directory where the command ran when it
lies below it, else as it was given. In a notebook LINE counts in the file itself; `cell` and `cell_line` say where
that is for a reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SourceKind = Literal[
    # a value is read from the device (operation: item, float, int, bool, complex, tolist, index, logger, math)
    "host-read",
    "branch",
    "print",
    "dynamic-shape",
    "synchronize",
    "synchronize-one-device",
    "empty-cache",
    "hidden-sync",
    "anomaly-detection",
    "single-tensor-optimizer",
    # copies
    "copy-to-device",
    "copy-to-host",
    "constant-to-device",
    "built-on-host",
    "pinned-inline",
    "checkpoint",
    "read-before-copy-done",
    "side-stream",
    # loaders, launch and interfaces
    "cuda-in-worker",
    "handle-before-fork",
    "iterable-not-split",
    "sampler-missing",
    "set-epoch-missing",
    "device-from-global-rank",
    "removed-interface",
    "find-unused-parameters",
    "data-parallel",
    "layers-by-hand",
    "fsdp-one-unit",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSite:
    """One line. `hot` says why it runs in each step and `device` why the value is on a GPU; both None where the kind
    needs neither. `sure` is False where the device is known by a variable only (``x.to(device)``)."""

    site: str
    kind: SourceKind
    operation: str  # item, Tensor.cpu, torch.nonzero, DataLoader, ...
    text: str  # the source of the expression, on one line and cut
    function: str | None = None
    hot: str | None = None
    hot_site: str | None = None
    chain: tuple[str, ...] = ()  # from the hot loop to the line: "train.py:31 calls step()"
    device: str | None = None
    device_site: str | None = None
    sure: bool = True
    pinned: bool | None = None  # the source of a copy to the device
    non_blocking: bool | None = None
    from_loader: str | None = None  # site of the DataLoader whose batch is copied
    edit: str | None = None  # the edit that `gpudoctor tune` tries here and `gpudoctor patch` makes; None: by hand
    detail: str | None = None
    first_line: int = 0  # the statement, for suppressions and --diff
    last_line: int = 0
    cell: int | None = None  # notebooks: code cell and line in it, from 1
    cell_line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLoader:
    """One DataLoader call that feeds a hot loop. None where the source does not tell."""

    site: str
    text: str
    hot: str
    hot_site: str
    num_workers: int | None = None  # None: not a constant
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    dataset: str | None = None
    costly: str | None = None  # why a sample of the dataset is costly
    epochs: str | None = None  # the loop around it that starts it again: its text
    epochs_site: str | None = None
    moved: str | None = None  # where its batches go to a GPU, copied by the script
    device: str | None = None
    device_site: str | None = None
    trains: bool = False
    sure: bool = True
    first_line: int = 0
    last_line: int = 0
    cell: int | None = None
    cell_line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    files: int
    lines: int
    hot_loops: tuple[str, ...] = ()  # sites of the loops and methods that run in each step on a GPU
    sites: tuple[SourceSite, ...] = ()
    loaders: tuple[SourceLoader, ...] = ()
    torch: str | None = None  # the version that rules assume; None: unknown
    torch_from: str | None = None  # "--torch", or where it was found
    root: str = ""  # directory that the sites are relative to
