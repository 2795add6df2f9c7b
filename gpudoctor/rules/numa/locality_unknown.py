"""Where the GPUs are attached cannot be seen from here, so nothing should be bound by it.

What it means
    The system reports no NUMA node for the GPUs (numa_node is -1), or the same CPUs and nodes for all of them. That
    is what a virtual machine without a NUMA layout of its own shows, whatever the hardware below it looks like.
Why it costs
    Binding by such data puts every rank on node 0. Not binding costs what the node links cost, often nothing.
How we know
    All GPUs list all CPUs or the same several nodes in a virtual machine, or no GPU names a node on a machine with
    several.
Fix
    Do not bind. Use the topology file of the cloud vendor (NCCL_TOPO_FILE) where there is one, or measure copies
    from each node with `gpudoctor bench-pcie` (https://github.com/NVIDIA/nccl/issues/1298).
When to ignore
    On bare metal with one NUMA node all CPUs really are local; the rule is quiet there. With one GPU and one node
    there is nothing to bind.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Host, NumaNode, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, cpu_list, evidence
from gpudoctor.rules.locality import is_guest, unknown_because

RULE = Rule(code="NUM007", name="numa-locality-unknown", severity="unknown", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    reason = unknown_because(case)
    if reason is None:
        if _nothing_known(case):
            yield Unchecked(reason="neither NUMA nodes nor local CPUs of the GPUs are known")
        return
    facts = [
        evidence(case, path(gpu, "local_cpus"), cpu_list(gpu.local_cpus))
        if gpu.local_cpus
        else evidence(case, path(gpu, "numa_node"), "unknown")
        for gpu in answering(case)
    ]
    if is_guest(case):
        facts.append(evidence(case, "host.virtualization", case.host.virtualization or "passed through"))
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"where the GPUs are attached is unknown: {reason}; do not bind CPUs by it",
        evidence=tuple(facts),
        remedies=(
            Remedy(kind="config", text="do not bind ranks to CPUs or NUMA nodes on this machine"),
            Remedy(kind="env", text="NCCL_TOPO_FILE with the vendor's topology file, where the cloud ships one"),
            Remedy(kind="measure", text="gpudoctor bench-pcie on each NUMA node shows what is near"),
        ),
        confidence="certain",
    )


def _nothing_known(case: Case) -> bool:
    return all(gpu.numa_node is None and not gpu.numa_nodes and gpu.local_cpus is None for gpu in case.gpus)


def _gpu(index: int, *, node: int | None = None, nodes: tuple[int, ...] = (), cpus: int | None = None) -> Gpu:
    return Gpu(
        index=index,
        bdf=f"0000:{index + 1:02x}:00.0",
        numa_node=node,
        numa_nodes=nodes,
        local_cpus=None if cpus is None else tuple(range(cpus)),
    )


_ONE_NODE = (NumaNode(node=0, cpus=tuple(range(16))),)
_TWO_NODES = (NumaNode(node=0, cpus=tuple(range(8))), NumaNode(node=1, cpus=tuple(range(8, 16))))

EXAMPLES = (
    Example(
        name="H200 in a flat virtual machine",
        kind="fires",
        case=Case(
            host=Host(os="linux", virtualization="kvm", cpu_count=16),
            gpus=(_gpu(0, nodes=(0,), cpus=16),),
            numa_nodes=_ONE_NODE,
        ),
        subjects=("host",),
    ),
    Example(
        name="pasted matrix: 0-191 and nodes 0-1 for every GPU",
        kind="fires",
        case=Case(gpus=tuple(_gpu(index, nodes=(0, 1), cpus=192) for index in range(8))),
        subjects=("host",),
    ),
    Example(
        name="two nodes, numa_node is -1 everywhere",
        kind="fires",
        case=Case(host=Host(virtualization="none"), gpus=(_gpu(0), _gpu(1)), numa_nodes=_TWO_NODES),
        subjects=("host",),
    ),
    Example(
        name="bare-metal machine with one node",
        kind="quiet",
        case=Case(
            host=Host(virtualization="none", cpu_count=16), gpus=(_gpu(0, node=0, cpus=16),), numa_nodes=_ONE_NODE
        ),
    ),
    Example(
        name="virtual machine with a NUMA layout",
        kind="quiet",
        case=Case(
            host=Host(virtualization="kvm", cpu_count=16),
            gpus=(_gpu(0, node=0, cpus=8), Gpu(index=1, numa_node=1, local_cpus=tuple(range(8, 16)))),
            numa_nodes=_TWO_NODES,
        ),
    ),
    Example(name="nothing known", kind="lacks", case=Case(gpus=(_gpu(0),))),
)
