"""What the source text tells about loaders, for the rules that `tune-loader` measures too."""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Finding, Remedy, Rule
from gpudoctor.rules import sources

NEEDS = ("loader|source",)  # a rule that judges both what was measured and what stands in the source


def restarted_workers(rule: Rule, case: Case) -> Iterator[Finding]:
    """Workers without persistent_workers in a loop over a loader that stands in a loop over epochs."""
    for loader in sources.loaders(case):
        if not loader.num_workers or loader.persistent_workers is not False or loader.epochs is None:
            continue
        yield sources.loader_finding(
            rule,
            loader,
            f"{loader.num_workers} workers are started again in each round of `{loader.epochs}` ({loader.epochs_site})",
            (
                Remedy(
                    kind="code",
                    text="persistent_workers=True",
                    risk="random numbers differ from the second epoch on; workers keep their memory",
                    undo="persistent_workers=False",
                ),
            ),
        )


def cuda_in_worker(rule: Rule, case: Case) -> Iterator[Finding]:
    """.cuda(), .to("cuda") or device="cuda" below __getitem__, __iter__ or collate_fn of a loader with workers."""
    for group in sources.by_line(sources.sites(case, "cuda-in-worker")):
        yield sources.source_finding(
            rule,
            group[0],
            f"this uses the GPU in a loader worker ({group[0].detail})",
            (Remedy(kind="code", text="return CPU tensors, and move the batch to the GPU in the training loop"),),
            waits=False,
        )


def handle_before_fork(rule: Rule, case: Case) -> Iterator[Finding]:
    """__init__ of a dataset keeps an open file that __getitem__ reads, and the loader has workers."""
    for site in sources.sites(case, "handle-before-fork"):
        yield sources.source_finding(
            rule,
            site,
            f"{site.operation}() opens a file before the workers start, and all read through it ({site.detail})",
            (Remedy(kind="code", text="keep the path here, and open the file in __getitem__ when it is first needed"),),
            waits=False,
        )


def not_split(rule: Rule, case: Case) -> Iterator[Finding]:
    """An IterableDataset whose text asks for no worker and no shard, with several workers."""
    for site in sources.sites(case, "iterable-not-split"):
        yield sources.source_finding(
            rule,
            site,
            f"{site.operation} does not ask for its worker: each sample comes once from every worker ({site.detail})",
            (Remedy(kind="code", text="split by torch.utils.data.get_worker_info() in __iter__"),),
            waits=False,
        )


def sampler(rule: Rule, case: Case) -> Iterator[Finding]:
    """A distributed program whose loader has no sampler, or whose sampler never hears of the epoch."""
    for site in sources.sites(case, "sampler-missing", "set-epoch-missing"):
        if site.kind == "sampler-missing":
            message = "every rank reads the whole dataset: the program is distributed and this loader has no sampler"
            fix = "sampler=DistributedSampler(dataset), shuffle left out"
        else:
            message = "set_epoch() is never called: each epoch has the order of the first"
            fix = "sampler.set_epoch(epoch) at the start of each epoch"
        yield sources.source_finding(rule, site, message, (Remedy(kind="code", text=fix),), waits=False)
