"""Some NUMA nodes are the memory of GPUs and have no CPUs: nothing can be bound to them.

What it means
    On Grace machines the memory of each GPU (and of each MIG slot) is a NUMA node of its own. "GPU NUMA ID" names that
    node, not the processor that is near the GPU.
Why it costs
    Tools that bind a rank to the GPU's NUMA ID ask for CPUs of a node without any and crash
    (https://github.com/vllm-project/vllm/pull/39361). Tools that divide work over all nodes use a fraction of the CPUs.
How we know
    The GPU NUMA ID is a number, or the machine lists nodes without CPUs beside GPUs that name them.
Fix
    Bind each rank to the CPU node that stands in its NUMA affinity; count nodes with CPUs only.
When to ignore
    Nothing is bound, and no tool counts nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, NumaNode, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, cpu_list, evidence
from gpudoctor.rules.locality import cpu_nodes

RULE = Rule(code="NUM008", name="grace-memory-only-nodes", severity="warning", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = answering(case)
    bare = {node.node for node in case.numa_nodes if not node.cpus}
    marked = [gpu for gpu in gpus if gpu.memory_node is not None]
    named = [gpu for gpu in gpus if bare & set(gpu.numa_nodes) and cpu_nodes(case)]
    if not marked and not named:
        if all(gpu.memory_node is None and not gpu.numa_nodes and gpu.numa_node is None for gpu in gpus):
            yield Unchecked(reason="the NUMA nodes of the GPUs are unknown")
        return
    near = {gpu.index: _cpu_node(case, gpu) for gpu in marked or named}
    words = ", ".join(f"gpu:{index} to node {node}" for index, node in near.items() if node is not None)
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message="the memory of the GPUs shows as NUMA nodes without CPUs: bind ranks to the CPU node of the affinity, "
        f"never to the GPU's NUMA ID{f' ({words})' if words else ''}",
        evidence=tuple(
            evidence(case, path(gpu, "memory_node"), gpu.memory_node, "a node without CPUs")
            if gpu.memory_node is not None
            else evidence(case, path(gpu, "numa_nodes"), cpu_list(gpu.numa_nodes))
            for gpu in marked or named
        ),
        remedies=(Remedy(kind="config", text="bind by the CPU node in NUMA affinity; count only nodes with CPUs"),),
        confidence="certain",
    )


def _cpu_node(case: Case, gpu: Gpu) -> int | None:
    """The node of the affinity that has CPUs; where nodes are not listed, the lowest: CPU nodes come first."""
    nodes = cpu_nodes(case)
    listed = [node for node in gpu.numa_nodes if (node in nodes if nodes else node != gpu.memory_node)]
    return listed[0] if listed else None


EXAMPLES = (
    Example(
        name="pasted matrix of a Grace board",
        kind="fires",
        case=Case(gpus=(Gpu(index=0, memory_node=2, numa_nodes=(0, 2, 3)), Gpu(index=1, memory_node=10))),
        subjects=("host",),
    ),
    Example(
        name="nodes without CPUs in the affinity",
        kind="fires",
        case=Case(
            gpus=(Gpu(index=0, numa_nodes=(0, 1)),),
            numa_nodes=(NumaNode(node=0, cpus=(0, 1)), NumaNode(node=1)),
        ),
        subjects=("host",),
    ),
    Example(name="two sockets", kind="quiet", case=Case(gpus=(Gpu(index=0, numa_node=0), Gpu(index=1, numa_node=1)))),
    Example(
        name="memory expansion that no GPU names",
        kind="quiet",
        case=Case(gpus=(Gpu(index=0, numa_node=0),), numa_nodes=(NumaNode(node=0, cpus=(0,)), NumaNode(node=1))),
    ),
    Example(name="nothing known", kind="lacks", case=Case(gpus=(Gpu(index=0),))),
)
