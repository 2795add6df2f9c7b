"""Several ranks read the data without a distributed sampler.

What it means
    Each rank draws from the whole dataset: with a sequential sampler all ranks read the same rows, with a random one
    rows come several times in an epoch and others not at all.
Why it costs
    Wrong training: the effective batch is not what it seems (https://github.com/pytorch/pytorch/issues/38174).
How we know
    The command was watched on more than one rank: its training loader has torch's plain sampler, and a dataset of the
    same length on each rank. Or the source was read: the program is distributed, and the loader of its training loop
    has no sampler, or a DistributedSampler whose set_epoch is called nowhere.
Fix
    sampler=DistributedSampler(dataset) in place of shuffle=True, and sampler.set_epoch(epoch) in each epoch.
When to ignore
    The ranks share one batch (tensor or pipeline parallelism), or each rank was given its own part of the data before.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Step, Unchecked, Watched, WatchedLoader, WatchRecord
from gpudoctor.rules import loader_sources, sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import records

RULE = Rule(code="LDR022", name="distributed-sampler-missing", severity="error", needs=sources.NEEDS, since="0.2")
_PLAIN = {"RandomSampler", "SequentialSampler"}


def check(case: Case) -> Iterator[Finding | Unchecked]:
    ranks = [record for record in records(case) if (record.world_size or 1) > 1]
    yield from loader_sources.sampler(RULE, case)
    if case.watched is not None and not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
    if not ranks:
        return
    told = set()
    for record in ranks:
        for loader in record.feeding:
            plain = loader.sampler_class in _PLAIN and not loader.iterable_dataset and not loader.custom_sampler
            if plain and loader.role == "train" and loader.site not in told and _same_length(ranks, loader):
                told.add(loader.site)
                yield _finding(case, loader, record.world_size or 1)


def _same_length(ranks: list[WatchRecord], loader: WatchedLoader) -> bool:
    """Whether every rank that was seen has a dataset of this length at this line: else each has its own part."""
    lengths = {other.dataset_len for record in ranks for other in record.loaders if other.site == loader.site}
    return len(lengths) == 1


def _finding(case: Case, loader: WatchedLoader, ranks: int) -> Finding:
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=loader.site,
        message=f"{ranks} ranks each draw from all {loader.dataset_len} rows with {loader.sampler_class}",
        evidence=(evidence(case, "watched", str(loader.sampler_class), "DistributedSampler"),),
        remedies=(
            Remedy(
                kind="code",
                text="sampler=DistributedSampler(dataset), no shuffle=True; sampler.set_epoch(epoch) in each epoch",
            ),
        ),
        confidence="likely",
    )


def _case(sampler: str, *, world: int = 2, lengths: tuple[int, int] = (100, 100)) -> Case:
    def record(rank: int) -> WatchRecord:
        loader = WatchedLoader(
            site="train.py:20",
            ordinal=0,
            role="train",
            loader_class="DataLoader",
            dataset_class="Images",
            iterable_dataset=False,
            sampler_class=sampler,
            dataset_len=lengths[rank],
        )
        return WatchRecord(pid=rank + 1, rank=rank, world_size=world, steps=(Step(wall_ms=10),), loaders=(loader,))

    return Case(watched=Watched(command=("torchrun", "train.py"), cwd="", records=(record(0), record(1))))


EXAMPLES = (
    Example(name="a random sampler", kind="fires", case=_case("RandomSampler"), subjects=("train.py:20",)),
    Example(name="distributed", kind="quiet", case=_case("DistributedSampler")),
    Example(name="each rank has its own part", kind="quiet", case=_case("RandomSampler", lengths=(100, 90))),
    Example(name="one rank", kind="quiet", case=_case("RandomSampler", world=1)),
    Example(
        name="in the source",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "sampler-missing", "DataLoader without sampler", "DataLoader(data, shuffle=True)", hot=None
            ),
            sources.example_site(
                "set-epoch-missing", "DistributedSampler", "DistributedSampler(data)", line=30, hot=None
            ),
        ),
        subjects=("train.py:21", "train.py:30"),
    ),
    Example(name="not in the source", kind="quiet", case=sources.example_case()),
    Example(name="nothing watched", kind="lacks", case=Case()),
)
