"""Counting GPUs up does not count NUMA nodes up: rank numbers do not tell where a GPU is.

What it means
    GPU 0 is on a higher node than a GPU behind it. Scripts that bind rank r to node r // k bind some or all ranks to
    the wrong node.
Why it costs
    A rank bound to the wrong node copies everything through the link between the nodes, worse than no binding at all.
How we know
    The NUMA nodes of the GPUs, in nvidia-smi's order, do not ascend.
Fix
    Bind by the bus address of each GPU, as torchrun --numa-binding=node does; never compute the node from the rank.
When to ignore
    Nothing is bound by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, NumaNode, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence
from gpudoctor.rules.locality import cpu_nodes, node_of, unknown_because

RULE = Rule(code="NUM003", name="gpu-order-not-numa-order", severity="info", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = sorted(answering(case), key=lambda gpu: gpu.index)
    if len(gpus) < 2 or len(cpu_nodes(case)) == 1:
        return
    places = [node_of(case, gpu) for gpu in gpus]
    known = [place for place in places if place is not None]
    if len(known) < len(places):
        yield Unchecked(reason=unknown_because(case) or "the NUMA node of some GPU is unknown")
        return
    if all(left <= right for left, right in itertools.pairwise(known)):
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"GPUs {gpus[0].index}-{gpus[-1].index} sit on NUMA nodes {', '.join(map(str, known))}, in this order: "
        "bind each rank by the address of its GPU, never by its number",
        evidence=tuple(evidence(case, path(gpu, "numa_node"), node) for gpu, node in zip(gpus, known, strict=True)),
        remedies=(
            Remedy(kind="command", text="torchrun --numa-binding=node (newer torch), or gpudoctor launch for the map"),
        ),
        confidence="certain",
    )


def _case(*nodes: int | None, machine: tuple[NumaNode, ...] = ()) -> Case:
    return Case(gpus=tuple(Gpu(index=i, numa_node=node) for i, node in enumerate(nodes)), numa_nodes=machine)


EXAMPLES = (
    Example(name="two cards the other way round", kind="fires", case=_case(1, 0), subjects=("host",)),
    Example(name="four nodes per socket", kind="fires", case=_case(3, 1, 7, 5), subjects=("host",)),
    Example(name="ascending", kind="quiet", case=_case(0, 0, 1, 1)),
    Example(name="ids 0 and 8", kind="quiet", case=_case(0, 8)),
    Example(name="one node", kind="quiet", case=_case(None, None, machine=(NumaNode(node=0, cpus=(0,)),))),
    Example(name="unknown", kind="lacks", case=_case(None, 0)),
)
