"""On which NUMA node is a GPU, and is that known at all? Shared by the NUMA rules."""

from __future__ import annotations

from collections.abc import Sequence

from gpudoctor.model import Case, Gpu
from gpudoctor.rules.evidence import answering


def cpu_nodes(case: Case) -> dict[int, frozenset[int]]:
    """The NUMA nodes that have CPUs, with their CPUs. Nodes of memory only (HBM on Grace) are left out."""
    return {node.node: frozenset(node.cpus) for node in case.numa_nodes if node.cpus}


def node_of(case: Case, gpu: Gpu) -> int | None:
    """The CPU node of a GPU: as reported, else the one node of its affinity that has CPUs, else that of its CPUs."""
    known = cpu_nodes(case)
    if gpu.numa_node is not None and (not known or gpu.numa_node in known):
        return gpu.numa_node
    listed = [node for node in gpu.numa_nodes if not known or node in known]
    if len(listed) == 1:
        return listed[0]
    if gpu.local_cpus:
        holding = [node for node, cpus in known.items() if cpus >= set(gpu.local_cpus)]
        if len(holding) == 1:
            return holding[0]
    return None


def is_guest(case: Case) -> bool:
    return case.host.virtualization not in (None, "none") or any(
        gpu.virtualization in ("passthrough", "vgpu") for gpu in case.gpus
    )


def unknown_because(case: Case) -> str | None:
    """Why nothing is known about where the GPUs are, or None when their locality is believable.

    A guest without a NUMA layout of its own lists all CPUs for every GPU. So does every bare-metal machine with one
    node, where it is true: that is no reason for doubt.
    """
    gpus = answering(case)
    if not gpus:
        return None
    nodes = cpu_nodes(case)
    if len(nodes) > 1 or len({node_of(case, gpu) for gpu in gpus} - {None}) > 1:
        return _unknown_on_several_nodes(case, gpus, nodes)
    if _spans(case, gpus):
        return "every GPU lists the same several NUMA nodes"
    if is_guest(case) and _lists_all(case, gpus):
        return "this is a virtual machine, and every GPU lists all of its CPUs"
    if is_guest(case) and all(node_of(case, gpu) is None for gpu in gpus):
        return "this is a virtual machine, and no GPU names its NUMA node"
    return None


def _unknown_on_several_nodes(case: Case, gpus: Sequence[Gpu], nodes: dict[int, frozenset[int]]) -> str | None:
    everything = frozenset().union(*nodes.values())
    if len({node_of(case, gpu) for gpu in gpus} - {None}) > 1:
        return None
    if everything and all(gpu.local_cpus and frozenset(gpu.local_cpus) >= everything for gpu in gpus):
        return "every GPU lists the CPUs of all NUMA nodes"
    if all(node_of(case, gpu) is None and gpu.local_cpus != () for gpu in gpus):
        return "no GPU names its NUMA node (numa_node is -1)"
    return None


def _spans(case: Case, gpus: Sequence[Gpu]) -> bool:
    """All GPUs print one and the same list of several nodes. On Grace that is how the memory nodes show."""
    if any(
        "grace" in (gpu.name or "").lower() or "GB200" in (gpu.name or "") or "GH200" in (gpu.name or "")
        for gpu in gpus
    ):
        return False
    nodes = cpu_nodes(case)
    return all(len([n for n in gpu.numa_nodes if not nodes or n in nodes]) > 1 for gpu in gpus) and (
        len({gpu.numa_nodes for gpu in gpus}) == 1
    )


def _lists_all(case: Case, gpus: Sequence[Gpu]) -> bool:
    total = case.host.cpu_count or max((len(cpus) for cpus in cpu_nodes(case).values()), default=0)
    return bool(total) and all(gpu.local_cpus is not None and len(gpu.local_cpus) >= total for gpu in gpus)
