"""What `tune-loader` learnt about one loader: the facts of its dataset, the trials made, and what they add up to.

The injected code of observe answers in these field names (JSON); a test keeps the two together. Times are
milliseconds unless the name ends in _s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gpudoctor.model.finding import Gain
from gpudoctor.model.watch import FetchProbe, WatchedLoader

# exception: raised by the user's code; the others are what the texts and the state of the processes show.
# tokenizers and hint are messages that tell of no fault.
FaultKind = Literal[
    "exception",
    "hang",
    "killed",
    "oom",
    "shm",
    "files",
    "pickle",
    "ragged",
    "cuda",
    "timeout",
    "lost",
    "tokenizers",
    "hint",
]
# What limits the rate, found by leaving parts out: the rows, the collating, the handing over, the step itself.
Limit = Literal["storage", "waiting", "decoding", "collating", "transport", "step", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFault:
    """How a trial or the preflight failed. `index`: the dataset index that was being fetched, where known."""

    kind: FaultKind
    text: str  # one line
    index: int | None = None
    worker: int | None = None
    site: str | None = None  # innermost line of the user's own
    stack: tuple[str, ...] = ()  # of the stuck worker, innermost call first
    waits_in: str | None = None  # kernel function in which it sleeps, such as futex_wait_queue
    fork_only: bool = False  # seen with forked workers, not without workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPool:
    """A native thread pool in a loader worker, such as openblas, with the threads it will use."""

    library: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPreflight:
    """Read in a forked child, which alone touched the dataset. None: not found out."""

    rows: int = 0  # fetched one by one and timed
    row_ms: float | None = None  # median
    row_mean_ms: float | None = None
    row_max_ms: float | None = None
    row_variation: float | None = None  # standard deviation over mean
    cpu_share: float | None = None  # CPU time of the fetching thread over wall time
    helper_share: float | None = None  # CPU time of all other threads over that of the fetching thread
    cold_ms: float | None = None  # mean of the rows that were read from storage
    warm_ms: float | None = None  # mean of the same rows read again
    storage_bytes: int = 0  # read from storage for the cold rows
    collate_ms: float | None = None  # a batch
    batch_bytes: int | None = None
    batch_tensors: int | None = None
    row_bytes: int | None = None
    float_images: bool = False  # rows are float32 of three dimensions or more: uint8 would be a quarter
    pickle_bytes: int | None = None
    pickle_error: str | None = None
    draws_random: bool | None = None
    repeatable: bool | None = None
    handles: tuple[str, ...] = ()  # attribute and type of files that were open before any worker started
    generators: tuple[str, ...] = ()  # random generators stored in the dataset that fetching advances
    pools: tuple[ThreadPool, ...] = ()
    ends_early_at: int | None = None  # index whose row raised StopIteration
    device_lines: tuple[str, ...] = ()  # sites that move data to a GPU, reached from fetching or collating
    state_bytes: int | None = None  # of the dataset's state_dict, where it has one
    snapshot_every: int | None = None  # StatefulDataLoader: batches between two snapshots
    rows_failed: int = 0  # of those looked at; the first one's fault is `fault`
    fault: LoaderFault | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """One worker in one trial."""

    worker: int
    batches: int
    samples: int
    fetch_ms: float = 0.0  # all batches together
    collate_ms: float = 0.0
    cpus: int | None = None  # in its affinity mask
    threads_started: int | None = None  # native threads that appeared while it fetched
    grown_bytes: int = 0  # allocated from the first batch on
    grown_over: int = 0  # samples in between
    grown_steps: int = 0  # how often it grew further in between
    copied_bytes: int = 0  # shared pages that became its own, because they were written to
    copied_over: int = 0
    copied_steps: int = 0
    private_bytes: int | None = None
    random_state: str | None = None  # fingerprint of the generators at its first batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTrial:
    """One setting, run for a moment; `rate` is distinct samples per second of the slowest rank, None when it failed.

    `part`: "real", or with the rows ("rows": a few kept in memory) or the whole batch ("batch") ready-made.
    """

    workers: int
    prefetch: int
    whole_batch: bool = False
    in_order: bool = True
    one_thread: bool = False
    persistent: bool = False
    pin_memory: bool = False
    part: Literal["real", "rows", "batch"] = "real"
    purpose: str = "ladder"
    rate: float | None = None
    over: Literal["window", "epochs"] | None = None  # a window of one epoch, or whole epochs where they are short
    samples: int = 0
    hashed: int = 0  # rows of an iterable dataset whose fingerprint was taken, in the first epoch
    distinct: int | None = None  # of those; None: cannot be told
    batches: int = 0
    seconds: float = 0.0
    first_batch_s: float | None = None
    restart_s: float | None = None  # to the first batch of a later epoch
    wait_ms: float | None = None  # mean a batch
    wait_p95_ms: float | None = None
    epochs: int = 0  # run to their end
    epoch_batches: int | None = None  # in a complete epoch
    epoch_samples: int | None = None
    expected_batches: int | None = None  # len() of the loader
    stopped_at: int | None = None  # index of a map dataset's row that raised StopIteration: the epoch ends there
    per_worker: tuple[WorkerCounts, ...] = ()
    shm_bytes: int | None = None  # peak of shared memory beyond what was in use before
    private_bytes: int | None = None  # of all workers
    foreign_cpu: float | None = None  # CPUs that other processes kept busy
    wall_s: float = 0.0
    fault: LoaderFault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderChoice:
    """What to run. `rate` in samples per second with its interval; `gain` over the present setting."""

    arguments: dict[str, int | bool | None] = field(default_factory=dict)
    whole_batch: bool = False
    one_thread: bool = False
    rate: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStudy:
    """One loader, studied. `site` is the line that makes it, or the target where that line is not known."""

    site: str
    target: str
    loader: WatchedLoader
    preflight: LoaderPreflight
    start_method: str = "fork"
    ranks: int = 1
    cpus: float = 1.0  # that the process may use
    most_workers: int = 0
    most_because: str = ""  # what holds the number of workers: CPUs, shared memory, open files, memory, rows
    step_ms: float | None = None  # without waiting for the loader
    step_from: Literal["given", "observed"] | None = None
    trials: tuple[LoaderTrial, ...] = ()
    faults: tuple[LoaderFault, ...] = ()  # told by a log
    fetch_probe: FetchProbe | None = None
    present_known: bool = False  # the loader's own settings are the user's (not ours for a bare dataset)
    choice: LoaderChoice | None = None
    verdict: Literal["change", "keep", "no verdict"] = "no verdict"
    reason: str = ""
    as_good_workers: int | None = None  # fewer workers than at present, and as good
    saves_bytes: int | None = None  # private memory that they save
    limit: Limit = "unknown"
    limit_reason: str = ""
    noise: float | None = None  # of one trial, relative
    foreign_cpu: float | None = None  # CPUs that other processes kept busy, median over the trials
    pin_gain: float | None = None  # rate with pinned batches over the rate without, the copy to the GPU included
    gain: Gain | None = None
    torch: str | None = None
