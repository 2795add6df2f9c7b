"""Which GPUs a job sees, and on which CPUs and NUMA node each of them is, where that can be believed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpudoctor.model import Case, Finding, Gpu, gpu_path


def usable_gpus(case: Case) -> list[Gpu]:
    """The GPUs that answer and may be used, in nvidia-smi's order."""
    return sorted(
        (gpu for gpu in case.gpus if not gpu.lost and gpu.compute_mode != "prohibited"), key=lambda g: g.index
    )


def visible_gpus(case: Case) -> tuple[list[Gpu] | None, str | None]:
    """The GPUs that CUDA shows to a process here, in its order, or None where that cannot be told; and a note."""
    gpus = usable_gpus(case)
    environment = case.software.environment or {}
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return gpus, None
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    chosen = []
    for part in value.split(","):
        part = part.strip()
        if re.fullmatch(r"\d{1,3}", part) and by_bus:
            found = [gpu for gpu in gpus if gpu.index == int(part)]
        else:
            found = [gpu for gpu in gpus if part and gpu.uuid and gpu.uuid.startswith(part)]
        if len(found) != 1:
            return None, "CUDA_VISIBLE_DEVICES is set, and its GPUs cannot be told from here"
        chosen += found
    return chosen, "CUDA_VISIBLE_DEVICES is set already and is kept"


def unknown_because(case: Case, findings: Sequence[Finding]) -> str | None:
    """Why no rank may be bound on this machine, or None."""
    for finding in findings:
        if finding.rule == "NUM007":
            return "where the GPUs are attached is unknown (NUM007)"
        if finding.rule == "NUM005" and finding.subject == "host":
            return "the allowed CPUs are not near the GPUs (NUM005)"
    if case.host.virtualization not in (None, "none"):
        return "this is a virtual machine, which may not show where its GPUs are"
    if len(cpu_nodes(case)) < 2:
        return "one NUMA node, so every CPU is near" if case.numa_nodes else "the NUMA nodes are not known"
    for gpu in usable_gpus(case):
        if any(conflict.path == gpu_path(gpu, "numa_node") for conflict in case.conflicts):
            return "the sources disagree about the NUMA node of a GPU"
        if node_of(case, gpu) is None:
            return f"the NUMA node of GPU {gpu.index} is not known"
    return None


def cpu_nodes(case: Case) -> dict[int, tuple[int, ...]]:
    """NUMA nodes that have CPUs; memory-only nodes (as on Grace) are no place for a rank."""
    return {node.node: node.cpus for node in case.numa_nodes if node.cpus}


def node_of(case: Case, gpu: Gpu) -> int | None:
    """The CPU node of a GPU: as reported, else the only node with CPUs in its affinity."""
    nodes = cpu_nodes(case)
    if gpu.numa_node in nodes:
        return gpu.numa_node
    listed = [node for node in gpu.numa_nodes if node in nodes]
    return listed[0] if len(listed) == 1 else None


def rank_cpus(case: Case, node: int) -> tuple[int, ...]:
    """The CPUs of a node that this process may use; empty when there is none, or the node's memory is forbidden."""
    limits = case.limits
    if limits.allowed_nodes is not None and node not in limits.allowed_nodes:
        return ()
    allowed = None if limits.allowed_cpus is None else set(limits.allowed_cpus)
    return tuple(sorted(cpu for cpu in cpu_nodes(case)[node] if allowed is None or cpu in allowed))


def cpu_ranges(cpus: Sequence[int]) -> str:
    """``0-3,8`` for (0, 1, 2, 3, 8)."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
