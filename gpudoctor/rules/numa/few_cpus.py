"""There are fewer than four usable CPUs for each GPU.

What it means
    The process, or the node that the GPU is attached to, has very few CPUs for each GPU: a small container, a shell
    pinned to one CPU, or a processor divided into many domains.
Why it costs
    Launching kernels, NCCL's proxy threads and loader workers compete for the same CPUs; a starved rank holds up all
    others (https://github.com/NVIDIA/nccl/issues/1617).
How we know
    The CPUs that this process may use, divided by the GPUs; where they are not known, the CPUs local to each GPU,
    divided by the GPUs that list the same ones.
Fix
    Ask the container or batch system for more CPUs. Cap loader workers at the CPUs of a rank minus one.
When to ignore
    Inference with one process that hardly works on the host. Lists such as 0,8,16 show that SMT is off, not a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpudoctor.model import Case, Evidence, Example, Finding, Gpu, Limits, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, cpu_list, evidence

RULE = Rule(code="NUM006", name="few-cpus-per-gpu", severity="warning", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = answering(case)
    enough = case.threshold(RULE.code, "cpus_per_gpu")
    allowed = case.limits.allowed_cpus
    if allowed is not None:
        usable = min(len(allowed), case.limits.cpu_quota or len(allowed))
        if usable / len(gpus) < enough:
            facts = (
                evidence(case, "limits.allowed_cpus", cpu_list(allowed), f"{enough * len(gpus):.0f} CPUs or more"),
            )
            yield _finding(f"this process may use {usable:g} CPUs for {len(gpus)} GPUs", facts, usable / len(gpus))
        return
    if all(gpu.local_cpus is None for gpu in gpus):
        yield Unchecked(reason="neither the allowed CPUs nor the CPUs local to the GPUs are known")
        return
    sharing = Counter(gpu.local_cpus for gpu in gpus)
    poor = [gpu for gpu in gpus if gpu.local_cpus and len(gpu.local_cpus) / sharing[gpu.local_cpus] < enough]
    if poor:
        worst = min(len(gpu.local_cpus or ()) / sharing[gpu.local_cpus] for gpu in poor)
        yield _finding(
            f"GPUs {', '.join(str(gpu.index) for gpu in poor)} have {worst:g} local CPUs each",
            tuple(evidence(case, path(gpu, "local_cpus"), cpu_list(gpu.local_cpus or ())) for gpu in poor),
            worst,
        )


def _finding(what: str, facts: tuple[Evidence, ...], cpus: float) -> Finding:
    workers = max(0, int(cpus) - 1)
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"{what}: ranks, NCCL and loader workers will compete for them",
        evidence=facts,
        remedies=(
            Remedy(
                kind="config", text="ask the container or batch system for more CPUs (--cpus-per-task, --cpuset-cpus)"
            ),
            Remedy(kind="code", text=f"no more than {workers} loader workers a rank"),
        ),
        confidence="likely",
    )


def _gpu(index: int, cpus: tuple[int, ...] | None) -> Gpu:
    return Gpu(index=index, local_cpus=cpus)


EXAMPLES = (
    Example(
        name="8 GPUs in a container of 16 CPUs",
        kind="fires",
        case=Case(gpus=tuple(_gpu(i, None) for i in range(8)), limits=Limits(allowed_cpus=tuple(range(16)))),
        subjects=("host",),
    ),
    Example(
        name="shell pinned to one CPU",
        kind="fires",
        case=Case(gpus=(_gpu(0, (0, 1, 2, 3)),), limits=Limits(allowed_cpus=(2,))),
        subjects=("host",),
    ),
    Example(
        name="quota of two CPUs",
        kind="fires",
        case=Case(gpus=(_gpu(0, None),), limits=Limits(allowed_cpus=tuple(range(16)), cpu_quota=2.0)),
        subjects=("host",),
    ),
    Example(name="three local CPUs each", kind="fires", case=Case(gpus=(_gpu(0, (0, 1, 2)),)), subjects=("host",)),
    Example(
        name="SMT off", kind="quiet", case=Case(gpus=(_gpu(0, tuple(range(0, 80, 8))), _gpu(1, tuple(range(0, 80, 8)))))
    ),
    Example(
        name="plenty", kind="quiet", case=Case(gpus=(_gpu(0, None),), limits=Limits(allowed_cpus=tuple(range(64))))
    ),
    Example(name="unknown", kind="lacks", case=Case(gpus=(_gpu(0, None),))),
)
