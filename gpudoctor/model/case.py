"""Everything known about one patient."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpudoctor.model.facts import Acs, Conflict, Drive, Gap, Gpu, Host, Limits, Nic, NumaNode, Pair, Software, Source
from gpudoctor.model.loader import LoaderStudy
from gpudoctor.model.measurement import Measurement
from gpudoctor.model.source import SourceFacts
from gpudoctor.model.trace import TraceFacts
from gpudoctor.model.watch import Watched


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file or paste that was read. `truncated` means that the text shows only a part."""

    file: str
    kind: str  # "case", "nvidia-smi-topo", "unknown", ...
    lines: int
    lines_not_understood: int = 0
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Expected figures and rule limits that checkup put into the Case; rules read no files."""

    name: str | None = None  # the GPU model whose figures are in force
    figures: dict[str, float] = field(default_factory=dict)
    thresholds: dict[str, dict[str, float]] = field(default_factory=dict)  # by rule code


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Facts, gaps, sources, conflicts and measurements of one host. Live probes and readers fill the same fields."""

    host: Host = field(default_factory=Host)
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    nics: tuple[Nic, ...] = ()
    drives: tuple[Drive, ...] = ()
    acs: tuple[Acs, ...] = ()  # of the bridges whose configuration could be read
    software: Software = field(default_factory=Software)
    limits: Limits = field(default_factory=Limits)
    watched: Watched | None = None
    loader: LoaderStudy | None = None
    source: SourceFacts | None = None
    traces: tuple[TraceFacts, ...] = ()  # of one job, sorted by rank
    measurements: tuple[Measurement, ...] = ()
    gaps: tuple[Gap, ...] = ()
    sources: tuple[Source, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    profile: Profile = field(default_factory=Profile)

    def gap(self, path: str) -> Gap | None:
        """The Gap recorded for a fact path or for a parent of it, or None."""
        for gap in self.gaps:
            if path == gap.path or path.startswith((gap.path + ".", gap.path + "[")):
                return gap
        return None

    def threshold(self, rule: str, key: str) -> float:
        """A limit from profiles/thresholds.toml; KeyError when the profile was not put into the Case."""
        return self.profile.thresholds[rule][key]


def gpu_key(gpu: Gpu) -> str:
    """The key of a GPU in fact paths: BDF, else UUID, else index."""
    return gpu.bdf or gpu.uuid or str(gpu.index)


def gpu_path(gpu: Gpu, fact: str) -> str:
    """The path of one fact of a GPU, such as ``gpus[0000:3b:00.0].pcie.width``."""
    return f"gpus[{gpu_key(gpu)}].{fact}"
