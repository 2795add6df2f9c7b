"""All GPUs are attached to one NUMA node of a machine that has several.

What it means
    The processors and the memory of the other nodes are far from every GPU. Nothing is wrong: a slice of a larger
    machine looks like this, and so do boards whose slots all belong to one socket.
Why it costs
    A loader that runs on the far node sends every batch through the link between the nodes.
How we know
    Every GPU names the same node, and there are other nodes (or its number shows that there must be).
Fix
    Bind every rank, its loader workers and its memory to that node.
When to ignore
    The batch system binds the job already. Machines with one node are quiet.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, NumaNode, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence
from gpudoctor.rules.locality import cpu_nodes, node_of, unknown_because

RULE = Rule(code="NUM002", name="gpus-on-one-node", severity="info", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = answering(case)
    if len(gpus) < 2:
        return
    places = {node_of(case, gpu) for gpu in gpus}
    if None in places:
        if len(cpu_nodes(case)) != 1:
            yield Unchecked(reason=unknown_because(case) or "the NUMA node of some GPU is unknown")
        return
    if len(places) > 1:
        return
    (node,) = places
    nodes = cpu_nodes(case)
    if not nodes and node == 0:
        yield Unchecked(reason="whether there are other NUMA nodes is unknown")
        return
    if len(nodes) > 1 or (not nodes and node != 0):
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject="host",
            message=f"all {len(gpus)} GPUs are attached to NUMA node {node}: keep ranks, workers and memory there",
            evidence=tuple(evidence(case, path(gpu, "numa_node"), node) for gpu in gpus),
            remedies=(
                Remedy(kind="command", text=f"numactl --cpunodebind={node} --membind={node} before the command"),
            ),
            confidence="certain",
        )


def _gpu(index: int, node: int | None) -> Gpu:
    return Gpu(index=index, numa_node=node)


_TWO = (NumaNode(node=0, cpus=(0, 1)), NumaNode(node=1, cpus=(2, 3)))

EXAMPLES = (
    Example(
        name="second of two",
        kind="fires",
        case=Case(gpus=(_gpu(0, 1), _gpu(1, 1)), numa_nodes=_TWO),
        subjects=("host",),
    ),
    Example(name="node 3 is never alone", kind="fires", case=Case(gpus=(_gpu(0, 3), _gpu(1, 3))), subjects=("host",)),
    Example(name="one on each", kind="quiet", case=Case(gpus=(_gpu(0, 0), _gpu(1, 1)), numa_nodes=_TWO)),
    Example(name="one node", kind="quiet", case=Case(gpus=(_gpu(0, 0), _gpu(1, 0)), numa_nodes=_TWO[:1])),
    Example(name="one GPU", kind="quiet", case=Case(gpus=(_gpu(0, 1),), numa_nodes=_TWO)),
    Example(name="node unknown", kind="lacks", case=Case(gpus=(_gpu(0, None), _gpu(1, 1)), numa_nodes=_TWO)),
    Example(name="other nodes unknown", kind="lacks", case=Case(gpus=(_gpu(0, 0), _gpu(1, 0)))),
)
