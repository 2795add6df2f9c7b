"""This process may not run on any CPU that is near a GPU it can use.

What it means
    A container, a batch system or taskset gave this process CPUs of one NUMA node, and a GPU of another. Every copy
    to that GPU and every kernel launch crosses the link between the nodes.
Why it costs
    Copies from far memory ran at 3.8 instead of 12.2 GB/s on an old server, and at full speed on a new one: measure
    (`gpudoctor bench-pcie`). Binding to an empty set of CPUs fails: sched_setaffinity raises EINVAL
    (https://github.com/rapidsai/dask-cuda/issues/1358).
How we know
    The CPUs that this process may use have none in common with the CPUs local to the GPU, or the driver, which
    prints only CPUs of the caller's set, prints an empty list for this GPU on Linux.
Fix
    Ask the batch system or the container for CPUs of the GPU's node, or take the GPUs of the node that you have
    CPUs on. Do not bind ranks until then.
When to ignore
    Windows prints an empty list for every GPU. A short job that does not copy much.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Host, Limits, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, cpu_list, evidence, subject

RULE = Rule(code="NUM005", name="cpuset-excludes-gpu-node", severity="error", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = answering(case)
    allowed = case.limits.allowed_cpus
    # Without the operating system's name, one GPU with a list of CPUs shows that it prints lists at all.
    prints_lists = case.host.os == "linux" or (case.host.os is None and any(gpu.local_cpus for gpu in gpus))
    for gpu in gpus:
        if gpu.local_cpus is None:
            yield Unchecked(reason="its local CPUs are unknown", subject=subject(gpu))
        elif not gpu.local_cpus:
            if prints_lists:
                yield _finding(case, gpu, "the driver lists no CPU of this process's set as local to it", "none")
            else:
                yield Unchecked(reason="an empty CPU list says nothing on this operating system", subject=subject(gpu))
        elif allowed is None:
            yield Unchecked(reason="the CPUs that this process may use are unknown", subject=subject(gpu))
        elif not set(allowed) & set(gpu.local_cpus):
            local = cpu_list(gpu.local_cpus)
            yield _finding(
                case, gpu, f"this process may use CPUs {cpu_list(allowed)}, its local ones are {local}", local
            )


def _finding(case: Case, gpu: Gpu, why: str, local: str) -> Finding:
    facts = [evidence(case, path(gpu, "local_cpus"), local)]
    if case.limits.allowed_cpus is not None:
        facts.append(
            evidence(case, "limits.allowed_cpus", cpu_list(case.limits.allowed_cpus), "a CPU local to the GPU")
        )
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject(gpu),
        message=f"no allowed CPU is near this GPU: {why}",
        evidence=tuple(facts),
        remedies=(
            Remedy(
                kind="config",
                text="give the job CPUs of the GPU's NUMA node (docker --cpuset-cpus, Slurm --gpu-bind=closest, "
                "Kubernetes topology manager)",
                undo="the former CPU set",
            ),
            Remedy(
                kind="env", text="or use the GPUs of the node that the allowed CPUs belong to (CUDA_VISIBLE_DEVICES)"
            ),
            Remedy(kind="measure", text="gpudoctor bench-pcie shows whether copies suffer on this machine"),
        ),
        confidence="certain" if gpu.local_cpus else "likely",
    )


def _gpu(index: int, cpus: range | None) -> Gpu:
    return Gpu(index=index, bdf=f"0000:{index + 1:02x}:00.0", local_cpus=None if cpus is None else tuple(cpus))


EXAMPLES = (
    Example(
        name="container on node 0, one GPU on node 1",
        kind="fires",
        case=Case(
            host=Host(os="linux"),
            gpus=(_gpu(0, range(8)), _gpu(1, range(8, 16))),
            limits=Limits(allowed_cpus=(0, 1, 2, 3)),
        ),
        subjects=("gpu:1",),
    ),
    Example(
        name="pasted matrix with an empty affinity beside a full one",
        kind="fires",
        case=Case(gpus=(_gpu(0, range(8)), _gpu(1, range(0))), limits=Limits(allowed_cpus=tuple(range(8)))),
        subjects=("gpu:1",),
    ),
    Example(
        name="some local CPUs are allowed",
        kind="quiet",
        case=Case(gpus=(_gpu(0, range(8)),), limits=Limits(allowed_cpus=(7, 8))),
    ),
    Example(
        name="Windows prints empty lists", kind="lacks", case=Case(host=Host(os="windows"), gpus=(_gpu(0, range(0)),))
    ),
    Example(name="no list", kind="lacks", case=Case(gpus=(_gpu(0, None),), limits=Limits(allowed_cpus=(0,)))),
)
