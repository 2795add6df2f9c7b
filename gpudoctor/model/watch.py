"""WatchPlan in, WatchRecord out: the whole contract between tune and the code injected by observe.

Both travel as JSON. The injected package is plain standard library code without gpudoctor beside it, so
field names and meanings here are what it reads and writes by hand; a test keeps the two together.
Times are milliseconds unless the name ends in _s. A site is ``FILE:LINE`` with FILE relative to the
directory where the command ran when it lies below it, else absolute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gpudoctor.model.trace import Bound

StepSource = Literal["step-at", "optimizer", "module", "loader", "none"]
Ended = Literal["steps", "time", "exit", "exception", "signal", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOverride:
    """Settings for the loader at `site` (and `ordinal`, when one line makes several; None means all of them).

    `arguments` maps DataLoader argument names to values: num_workers, prefetch_factor, pin_memory,
    persistent_workers, in_order. They are set on the instance when its iterator is made.
    """

    site: str
    ordinal: int | None = None
    arguments: dict[str, int | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedSource:
    """Text that the import hook supplies in place of the file at `path` (absolute), same ``__file__``.

    `lines` are the changed line numbers of the new text; those executed are reported in the record. `end_loops`: first
    lines of the loops that WatchPlan.end_loop_after leaves early.
    """

    path: str
    text: str
    lines: tuple[int, ...] = ()
    end_loops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofPlan:
    """Seeds and deterministic algorithms are forced; parameters and delivered batches are hashed."""

    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSearchPlan:
    """The process stops when the loader at `site` (None: the first that seems to feed training) is first iterated,
    and tries candidates as it is asked over the Unix socket at `socket`."""

    socket: str
    site: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPlan:
    record_dir: str  # every watched process writes record-<pid>.json here, atomically
    steps: int | None = None  # stop after this many steps; None: let the script end by itself
    max_seconds: float | None = None  # stop at the first step after this time since process start
    least_steps: int = 1  # that time does not end a process before so many steps
    step_at: str | None = None  # FILE:LINE that counts steps, decides over every other source
    loaders: tuple[LoaderOverride, ...] = ()
    patched: tuple[PatchedSource, ...] = ()
    watch_calls: bool = True  # False: only steps and loader waits, for timing trials
    probe_fetch: bool = False  # compare rows with whole-batch indexing in a forked child
    loader_search: LoaderSearchPlan | None = None
    end_loop_after: int | None = None  # loaders end, and loops are left, after so many batches or steps
    proof: ProofPlan | None = None
    watch_ranks: bool = False  # time what each step waits for other ranks (on a GPU this waits for each backward)
    guard_writes: Literal["off", "list", "deny"] = "list"
    write_root: str | None = None  # for guard_writes: files below this directory are the user's; default: cwd
    environment: dict[str, str] = field(default_factory=dict)  # set for the command, over what it has
    profiler_steps: int = 0  # after the watched steps, record so many with torch.profiler: what the device did


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, from the end of the step before it to its own end."""

    wall_ms: float
    loader_wait_ms: float = 0.0
    copy_wait_ms: float = 0.0
    sync_wait_ms: float = 0.0
    communication_ms: float = 0.0  # with watch_ranks: waiting for other ranks or their data, not hidden behind work


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProbe:
    """Rows fetched one by one and collated, against one index with a list of the same rows, in a forked child."""

    rows: int
    row_by_row_ms: float
    whole_batch_ms: float
    equal: bool
    draws_random: bool  # the dataset drew from a global random generator while fetching
    repeatable: bool  # the same rows fetched twice were equal
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLoader:
    site: str
    ordinal: int
    role: Literal["train", "other", "unknown"]  # train: steps of an optimizer or backward passes followed
    loader_class: str
    dataset_class: str
    iterable_dataset: bool
    sampler_class: str | None = None
    dataset_len: int | None = None
    length: int | None = None  # batches per epoch
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    in_order: bool = True
    custom_collate: bool = False
    custom_sampler: bool = False
    generator: bool = False
    worker_init_fn: bool = False
    multiprocessing_context: str | None = None
    overridden: bool = False
    iterators: int = 0  # epochs begun
    batches: int = 0
    samples: int = 0
    wait_ms: float = 0.0
    steady_wait_ms: float | None = None  # of wait_ms, in the steady steps
    first_batch_ms: float | None = None
    batch_bytes: int | None = None
    fetch_probe: FetchProbe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySite:
    """Copies between host and device at one line: Tensor.to / cuda / cpu / copy_ / numpy."""

    site: str
    function: str
    kind: Literal["h2d", "d2h", "none"]  # none: source and target on one device (or no CUDA): no copy happened
    calls: int
    bytes: int = 0
    pinned: int = 0  # calls whose host side was pinned
    non_blocking: int = 0
    waited_ms: float = 0.0
    calls_in_steps: int = 0  # calls made between the first and the last step
    steady_calls: int | None = None  # calls and waiting in the steady steps (from WatchRecord.steady_from on)
    steady_waited_ms: float | None = None
    from_loader: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSite:
    """Synchronising calls at one line. `on_device`: calls whose tensor was on a GPU (or the call synchronises one).

    A call that only sync debug mode saw has no `waited_ms`: the mode tells of it when it is over. Its waiting is
    known from the profiler window alone.
    """

    site: str
    function: str  # item, tolist, synchronize, empty_cache, float, bool, ... or "sync" when only sync debug mode saw it
    calls: int
    on_device: int = 0
    waited_ms: float = 0.0
    calls_in_steps: int = 0
    steady_calls: int | None = None
    steady_waited_ms: float | None = None
    window_waited_ms: float | None = None  # a step, in the profiler window, by the profiler's own clock
    via: str | None = None  # the library function, called in this line, in which the call stands
    detected_by: Literal["wrapper", "sync-debug-mode", "both"] = "wrapper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What Step.communication_ms holds: gradients that DDP reduced, and collectives of the script that block."""

    backend: str
    ranks: int
    reductions: int = 0  # DDP reductions that were timed
    calls: int = 0  # collectives called by the script that were timed
    untimed: int = 0  # collectives whose wait the host does not see: NCCL's, and asynchronous ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    parameters: str | None = None  # hash over all parameters of the optimizers seen, after the last step
    batches: tuple[str, ...] = ()  # one hash a delivered batch, in order
    rows: tuple[str, ...] = ()  # one hash of the sorted dataset indices (a multiset) for each epoch begun
    order: tuple[str, ...] = ()  # one hash of the dataset indices in the sampler's order for each epoch begun
    complete: tuple[bool, ...] = ()  # whether each of those epochs came to its end
    shuffled: bool | None = None  # False: the first epoch's indices came in ascending order
    duplicates: int = 0  # dataset indices requested more than once within one epoch
    forced: tuple[str, ...] = ()  # what was seeded or forced


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWindow:
    """A few steps after the watched ones, recorded with torch.profiler without stacks.

    The profiler slows the host, so that only what the device did is taken from it, never the length of a step.
    `trace`: the kineto trace in the record directory, which ends with an empty step. `skipped`: why there is none.
    """

    steps: int = 0
    step_ms: float | None = None
    events: int = 0
    sync_ms: float | None = None  # a step, in calls that synchronise or copy
    unattributed_ms: float | None = None  # of sync_ms, at no line of the script that is known
    seconds: float = 0.0  # what the window took, with starting and stopping the profiler
    trace: str | None = None
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRecord:
    version: int = 1
    pid: int
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    argv: tuple[str, ...] = ()
    cwd: str = ""
    python: str = ""
    torch: str | None = None
    cuda: bool = False
    device: str | None = None
    gpu: str | None = None  # UUID of the GPU on which the process has most of its memory
    gpus_visible: int | None = None
    ended: Ended = "unknown"
    exit_code: int | None = None
    exception: str | None = None  # "ValueError: ..." with its site, when the script raised
    step_source: StepSource = "none"
    step_site: str | None = None
    optimizer_steps: int = 0  # of the first optimizer seen
    optimizer_steps_all: int = 0  # of all optimizers
    optimizers: int = 0
    skipped_steps: int = 0  # GradScaler
    batches: int = 0
    backwards: int = 0
    module_calls: int = 0
    counts_differ: bool = False  # steps, batches and backward calls disagree: rate is given in batches/s
    steps: tuple[Step, ...] = ()
    steady_from: int = 0  # the steps before this one are warm-up: unlike the later half of the steps
    watched_s: float | None = None  # from the first request to a loader (or first step begun) to the last step
    steps_per_s: float | None = None  # steps over watched_s
    batches_per_s: float | None = None
    start_up_s: float | None = None  # process start to the first request
    loaders: tuple[WatchedLoader, ...] = ()
    copies: tuple[CopySite, ...] = ()
    syncs: tuple[SyncSite, ...] = ()
    patched_lines: dict[str, tuple[int, ...]] = field(default_factory=dict)  # path -> executed changed lines
    patched_missed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    writes: tuple[str, ...] = ()  # files opened for writing, renamed or removed below write_root
    compiled: bool = False  # torch.compile was used
    alloc_retries: int | None = None  # GPU allocations that found room only after the cache was given back
    communication: Communication | None = None  # with watch_ranks, where a process group was joined
    proof: Proof | None = None
    overhead_ms: float | None = None  # time spent in the watcher itself, all steps together
    window: DeviceWindow | None = None
    bound: Bound = "unknown"  # what limits the step, and the verdict in words: filled in by tune
    verdict: str = ""
    notes: tuple[str, ...] = ()

    @property
    def steady(self) -> tuple[Step, ...]:
        """The steps after the warm-up; all of them where it never ended."""
        return self.steps[self.steady_from :] or self.steps

    @property
    def feeding(self) -> tuple[WatchedLoader, ...]:
        """The loaders that feed the steps; one whose use is unknown counts when no other is known to."""
        known = tuple(loader for loader in self.loaders if loader.role == "train")
        return known or tuple(loader for loader in self.loaders if loader.role == "unknown" and loader.batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A training command that was run under observe: one record a process that made steps, sorted by rank."""

    command: tuple[str, ...]
    cwd: str
    records: tuple[WatchRecord, ...]
    exit_code: int | None = None  # of the command itself
    stopped: Literal["steps", "deadline", "exit", "interrupted"] = "exit"
    stderr_tail: str = ""
    writes: tuple[str, ...] = ()  # files below write_root that any process of the command wrote, renamed or removed
