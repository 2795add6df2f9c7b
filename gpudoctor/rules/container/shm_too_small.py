"""Shared memory (/dev/shm) is too small for the batches that loader workers hand over.

What it means
    DataLoader workers pass their batches through shared memory, and so does NCCL between processes of one host. In
    a container /dev/shm is 64 MiB unless somebody asked for more.
Why it costs
    The job dies: "No space left on device", "unable to allocate shared memory", or a bus error in a worker
    (https://github.com/fastai/docker-containers/issues/21).
How we know
    Either the loaders that were watched or studied need more than is free, counted as (workers x prefetch_factor + 2)
    x bytes of a batch over all ranks; or a trial of tune-loader failed with such a message; or /dev/shm has no more
    than Docker's default of 64 MiB. Info: they fit here, and would not fit into that default.
Fix
    `docker run --shm-size=8g` or `--ipc=host`; in Kubernetes an emptyDir volume with `medium: Memory` mounted on
    /dev/shm. NCCL_SHM_DISABLE is no fix: it makes everything slower.
When to ignore
    No loader with workers and no NCCL will run in this container.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpudoctor.model import (
    Case,
    Example,
    Finding,
    Gpu,
    Host,
    Limits,
    LoaderFault,
    Remedy,
    Rule,
    Severity,
    Step,
    Unchecked,
    Watched,
    WatchedLoader,
    WatchRecord,
)
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.needs import missing
from gpudoctor.rules.studies import case_of, faults, trial

RULE = Rule(code="CTR001", name="shm-too-small", severity="error", needs=(), since="0.1")

REMEDIES = (
    Remedy(
        kind="config", text="docker run --shm-size=8g (or --ipc=host)", risk="--ipc=host shares memory with the host"
    ),
    Remedy(kind="config", text="Kubernetes: an emptyDir volume with medium: Memory, mounted on /dev/shm"),
)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    failed = [fault.text for fault in faults(case.loader) if fault.kind == "shm"] if case.loader is not None else []
    size = case.limits.shm_bytes
    if failed:
        yield _failed(case, failed[0])
        return
    if size is None:
        yield from (Unchecked(reason=reason) for reason in missing(case, ("limits.shm_bytes",)))
        return
    free = case.limits.shm_free_bytes
    need = _need(case)
    facts = [evidence(case, "limits.shm_bytes", _mib(size))]
    if free is not None:
        facts.append(evidence(case, "limits.shm_free_bytes", _mib(free), _mib(need) if need else None))
    severity: Severity = RULE.severity
    if need and need > (size if free is None else free):
        message = f"the loaders need {_mib(need)} of shared memory, /dev/shm has {_mib(free or size)} free"
    elif size <= case.threshold(RULE.code, "default_shm_bytes"):
        message = (
            f"shared memory (/dev/shm) has {_mib(size)}, a container's default: loader workers and NCCL can run out"
        )
        if case.loader is not None and need <= size / 2:
            return  # it was studied, and there is room for twice what it needs
        if need:
            severity, reason = "warning", f"the loaders fit with {_mib(need)}"
            message = f"{message}; {reason}, more workers or larger batches may not"
        elif not case.gpus:
            severity, message = "info", f"{message}; there is no GPU here that would need it"
        elif case.host.container == "none":
            severity, message = "warning", f"{message}; this is no container, so somebody set it"
    elif case.loader is not None and need > case.threshold(RULE.code, "default_shm_bytes"):
        severity = "info"
        message = (
            f"the loader needs {_mib(need)} of shared memory: it fits here, not into a container's default of 64 MiB"
        )
    else:
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=severity,
        subject="host",
        message=message,
        evidence=tuple(facts),
        remedies=REMEDIES,
        confidence="certain" if need else "likely",
    )


def _failed(case: Case, text: str) -> Finding:
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"a loader worker ran out of shared memory: {text}",
        evidence=(
            evidence(case, "loader", text, "room for every batch in flight"),
            *([evidence(case, "limits.shm_bytes", _mib(case.limits.shm_bytes))] if case.limits.shm_bytes else ()),
        ),
        remedies=REMEDIES,
        confidence="certain",
    )


def _need(case: Case) -> int:
    """Bytes of shared memory that all watched or studied loaders with workers can fill; 0 when there is none."""
    spare = int(case.threshold(RULE.code, "spare_batches"))
    if case.loader is not None:
        loader, ranks = case.loader.loader, case.loader.ranks
        flying = loader.num_workers * (loader.prefetch_factor or 2) + spare if loader.num_workers else 0
        return ranks * flying * (case.loader.preflight.batch_bytes or 0)
    return sum(
        (loader.num_workers * (loader.prefetch_factor or 2) + spare) * loader.batch_bytes
        for record in (case.watched.records if case.watched else ())
        for loader in record.loaders
        if loader.num_workers > 0 and loader.batch_bytes
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _case(shm_mib: int, *, batch_mib: int = 0, workers: int = 4, container: str = "docker", gpus: int = 1) -> Case:
    loader = WatchedLoader(
        site="train.py:20",
        ordinal=0,
        role="train",
        loader_class="DataLoader",
        dataset_class="Images",
        iterable_dataset=False,
        num_workers=workers,
        batch_bytes=batch_mib * 2**20,
    )
    record = WatchRecord(pid=1, steps=(Step(wall_ms=10),), loaders=(loader,))
    return Case(
        host=Host(container=container),
        gpus=tuple(Gpu(index=index) for index in range(gpus)),
        limits=Limits(shm_bytes=shm_mib * 2**20, shm_free_bytes=shm_mib * 2**20),
        watched=Watched(command=("python", "train.py"), cwd="", records=(record,)) if batch_mib else None,
    )


EXAMPLES = (
    Example(name="Docker's default", kind="fires", case=_case(64), subjects=("host",)),
    Example(name="10 batches of 200 MiB in 1 GiB", kind="fires", case=_case(1024, batch_mib=200), subjects=("host",)),
    Example(
        name="default size, but the watched loader fits",
        kind="fires",
        case=_case(64, batch_mib=1),
        subjects=("host",),
        severity="warning",
    ),
    Example(name="no GPU here", kind="fires", case=_case(64, gpus=0), subjects=("host",), severity="info"),
    Example(name="large enough", kind="quiet", case=_case(8192, batch_mib=100)),
    Example(name="no workers, nothing shared", kind="quiet", case=_case(256, batch_mib=500, workers=0)),
    Example(
        name="a studied loader of 32 MiB batches",
        kind="fires",
        case=replace(_case(128), loader=case_of(preflight={"batch_bytes": 32 * 2**20}).loader),
        subjects=("host",),
    ),
    Example(
        name="the same in 8 GiB",
        kind="fires",
        case=replace(_case(8192), loader=case_of(preflight={"batch_bytes": 32 * 2**20}).loader),
        subjects=("host",),
        severity="info",
    ),
    Example(
        name="torch's message",
        kind="fires",
        case=replace(
            _case(8192),
            loader=case_of(trials=(trial(2, None, fault=LoaderFault(kind="shm", text="No space left")),)).loader,
        ),
        subjects=("host",),
    ),
    Example(name="size unknown", kind="lacks", case=Case(host=Host(container="docker"))),
)
