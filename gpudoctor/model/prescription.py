"""What is prescribed, and what was tried to prove it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gpudoctor.model.finding import Gain
from gpudoctor.model.scaling import Scaling

ChangeClass = Literal["exact", "stochastic", "logging", "numerics"]
CHANGE_CLASSES: tuple[ChangeClass, ...] = ("exact", "stochastic", "logging", "numerics")
EditKind = Literal[
    "loader-arguments",
    "whole-batch",
    "non-blocking",
    "make-on-device",
    "pin-copy",
    "device-accumulator",
    "collect-device",
    "defer-read",
    "drop-call",
    "log-every",
    "call-argument",
    "gradient-sync",
    "channels-last",
    "autocast",
    "setting",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One source edit at `site` (FILE:LINE). `arguments` holds arguments of the call for "loader-arguments" and
    "call-argument" (a value of None removes the argument), `every` for "log-every" (steps), `convert` for
    "device-accumulator" (see prescribe.accumulator) and `random` for "make-on-device"; `name` is the call, variable or
    setting that is edited."""

    kind: EditKind
    site: str
    name: str | None = None
    arguments: dict[str, int | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One edit or setting that can be tried. Changes of one `mechanism` (loader, fetch, sync, copy, optimizer, ...) are
    tried together. `needs` are the ids of changes without which this one is right, but cannot pay. `environment` is
    set for the command, and stands in launch.sh when the change is kept."""

    id: str  # C1, C2, ...
    rule: str
    site: str
    mechanism: str
    title: str  # one line, such as "num_workers=4, pin_memory=True"
    change_class: ChangeClass
    edits: tuple[Edit, ...] = ()
    kept: bool = False
    gain: Gain | None = None
    reason: str | None = None  # why it was kept, dropped, or is only advice
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def can_be_tried(self) -> bool:
        """Whether there is something to change; without it this is advice."""
        return bool(self.edits or self.environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the user's command with some changes; `changes` is empty for the baseline."""

    changes: tuple[str, ...]
    purpose: Literal["baseline", "search", "leave-one-out", "confirm", "proof"]
    rate: float | None  # steps/s, or batches/s where the counts differ; None when the run failed
    unit: str = "steps/s"
    steps: int = 0
    median_step_ms: float | None = None
    loader_wait_ms: float | None = None
    steady_wait: float | None = None  # share of the steps behind the warm-up that waits for the loader
    seconds: float | None = None  # wall time of the whole trial
    load_average: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBasis:
    """What the trials belong to: `tune --resume` uses them again only where all of this is still the same."""

    command: tuple[str, ...]
    cwd: str
    asked_steps: int | None  # --steps
    step_at: str | None
    steps: int  # the window of every trial
    natural_end: bool  # the command ends by itself within a trial
    seconds: float  # wall time of the watched run
    texts: dict[str, str] = field(default_factory=dict)  # SHA-256 by file
    changes: dict[str, str] = field(default_factory=dict)  # checksum of the edits, by the label that trials use


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBinding:
    """One rank: its GPU by BDF, and the CPUs and NUMA node it is bound to; None where locality is unknown."""

    rank: int
    gpu: str | None  # BDF
    cpus: tuple[int, ...] | None = None
    numa_node: int | None = None
    nic: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Because:
    """Why a line of the launch configuration stands there: the finding or fact that asked for it."""

    line: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    ranks: tuple[RankBinding, ...] = ()
    because: tuple[Because, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    site: str
    arguments: dict[str, int | bool | None]  # num_workers always present
    change_class: ChangeClass
    gain: Gain | None = None
    confidence: Literal["certain", "likely", "possible"] = "likely"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult:
    """`verdict`: identical, consistent (within baseline-to-baseline differences), different, or not provable."""

    verdict: Literal["identical", "consistent", "different", "not provable"]
    compared: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prescription:
    launch: LaunchConfig | None = None
    loader: tuple[LoaderSettings, ...] = ()
    changes: tuple[Change, ...] = ()
    trials: tuple[Trial, ...] = ()
    basis: TrialBasis | None = None
    proof: ProofResult | None = None
    scaling: Scaling | None = None  # tune --nproc: the changes are chosen at the largest count that worked
    plan: dict[str, str] | None = None  # the planner comes later
    patch: str | None = None  # unified diff of the user's source, where it is not written to a file
    files: dict[str, str] = field(default_factory=dict)  # launch, patch, report, case -> path
    verdict: str | None = None  # one sentence: what was gained, "nothing to change", or "no verdict: ..."
