"""The CPU quota of this container is smaller than what the loader workers of all ranks want.

What it means
    A quota (cpu.max) does not take CPUs away, it stops all threads of the container when its time is used up, until
    the next period. os.cpu_count() and the CPU affinity do not show it, so that tools start too many workers.
Why it costs
    Workers and the training process are stopped together in the middle of a step: 9-23 % of wall time in one
    report (https://github.com/springfall2008/batpred/pull/4771).
How we know
    The quota from the cgroup is smaller than workers times ranks of the watched command; or it is smaller than the
    CPUs that libraries see, and the kernel counts throttled periods (cpu.stat).
Fix
    Workers per rank = min(allowed CPUs, quota) / ranks, or a larger quota. Set OMP_NUM_THREADS to match.
When to ignore
    There is no quota, or the workers only wait for a disk.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import (
    Case,
    Example,
    Finding,
    Limits,
    Remedy,
    Rule,
    Step,
    Unchecked,
    Watched,
    WatchedLoader,
    WatchRecord,
)
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import records
from gpudoctor.rules.studies import case_of

RULE = Rule(code="CTR007", name="cpu-quota-below-workers", severity="warning", needs=(), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    limits = case.limits
    if limits.cpu_quota_unlimited:
        return
    if limits.cpu_quota is None:
        yield Unchecked(reason="the CPU quota is unknown")
        return
    if not records(case) and case.loader is None:
        yield Unchecked(reason=f"the quota is {limits.cpu_quota:g} CPUs; how many workers run was not watched")
        return
    wanted = sum(loader.num_workers for record in records(case) for loader in record.feeding)
    ranks = max(1, len(records(case)))
    if case.loader is not None:
        ranks = case.loader.ranks
        wanted = case.loader.loader.num_workers * ranks
    throttled = _throttled_share(limits)
    facts = [evidence(case, "limits.cpu_quota", f"{limits.cpu_quota:g} CPUs")]
    if throttled is not None:
        facts.append(evidence(case, "limits.throttled_periods", f"{throttled:.0%} of periods"))
    seen = len(limits.allowed_cpus) if limits.allowed_cpus is not None else 0
    if wanted > limits.cpu_quota:
        message = f"{wanted} loader workers of {_ranks(ranks)} share a quota of {limits.cpu_quota:g} CPUs"
        facts.append(evidence(case, "watched", f"{wanted} workers", f"at most {limits.cpu_quota:g}"))
    elif wanted and seen > limits.cpu_quota and (throttled or 0) >= case.threshold(RULE.code, "throttled_share"):
        message = (
            f"libraries see {seen} CPUs and the quota is {limits.cpu_quota:g}: the kernel stopped this container in "
            f"{throttled:.0%} of the periods"
        )
        facts.append(evidence(case, "limits.allowed_cpus", f"{seen} CPUs", f"at most {limits.cpu_quota:g}"))
    else:
        return
    usable = max(1, int(min(limits.cpu_quota, seen or limits.cpu_quota) / ranks))
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=message,
        evidence=tuple(facts),
        remedies=(
            Remedy(kind="code", text=f"at most {usable} workers a rank (quota / ranks)"),
            Remedy(kind="env", text=f"OMP_NUM_THREADS={usable}"),
            Remedy(kind="config", text="a larger quota: docker --cpus, resources.limits.cpu in Kubernetes"),
        ),
        confidence="certain" if throttled else "likely",
    )


def _throttled_share(limits: Limits) -> float | None:
    if limits.throttled_periods is None or not limits.periods:
        return None
    return limits.throttled_periods / limits.periods


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"


def _watched(workers: int, ranks: int = 1) -> Watched:
    loader = WatchedLoader(
        site="train.py:20",
        ordinal=0,
        role="train",
        loader_class="DataLoader",
        dataset_class="Images",
        iterable_dataset=False,
        num_workers=workers,
    )
    return Watched(
        command=("torchrun", "train.py"),
        cwd="",
        records=tuple(
            WatchRecord(pid=rank + 1, rank=rank, steps=(Step(wall_ms=10),), loaders=(loader,)) for rank in range(ranks)
        ),
    )


_CPUS = tuple(range(64))

EXAMPLES = (
    Example(
        name="12 workers in 4 CPUs",
        kind="fires",
        case=Case(limits=Limits(cpu_quota=4.0, allowed_cpus=_CPUS), watched=_watched(12)),
        subjects=("host",),
    ),
    Example(
        name="two ranks with 4 workers each in 6 CPUs",
        kind="fires",
        case=Case(limits=Limits(cpu_quota=6.0, allowed_cpus=_CPUS), watched=_watched(4, ranks=2)),
        subjects=("host",),
    ),
    Example(
        name="few workers, but throttled",
        kind="fires",
        case=Case(
            limits=Limits(cpu_quota=4.0, allowed_cpus=_CPUS, throttled_periods=30, periods=100), watched=_watched(2)
        ),
        subjects=("host",),
    ),
    Example(
        name="a studied loader with 4 workers on 3 CPUs",
        kind="fires",
        case=Case(limits=Limits(cpu_quota=3.0, allowed_cpus=_CPUS), loader=case_of().loader),
        subjects=("host",),
    ),
    Example(
        name="the quota is enough",
        kind="quiet",
        case=Case(limits=Limits(cpu_quota=16.0, allowed_cpus=_CPUS), watched=_watched(8)),
    ),
    Example(name="no quota", kind="quiet", case=Case(limits=Limits(cpu_quota_unlimited=True), watched=_watched(12))),
    Example(name="quota unknown", kind="lacks", case=Case(watched=_watched(12))),
    Example(name="nothing watched", kind="lacks", case=Case(limits=Limits(cpu_quota=4.0, allowed_cpus=_CPUS))),
)
