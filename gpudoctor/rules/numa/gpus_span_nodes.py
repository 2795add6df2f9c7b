"""The GPUs of this machine are attached to two or more NUMA nodes.

What it means
    Each CPU socket, or part of it, has its own memory and its own PCIe slots. A process that feeds a GPU from CPUs
    and memory of another node sends every copy through the link between the nodes.
Why it costs
    Usually 1-10 % (the range in torch's own documentation of NUMA binding). Much more where a node has few lanes
    to its neighbour and the step is heavy on the host; nothing at all on some new servers. Measure before believing.
How we know
    NVML and sysfs name the node, or the local CPUs, of each GPU, and they differ.
Fix
    Bind each rank to the CPUs and the memory of its GPU's node, found by bus id and not by rank number:
    `torchrun --numa-binding=node`, or `numactl --cpunodebind=N --membind=N`. Keep small jobs on one node.
When to ignore
    The job uses one GPU or GPUs of one node, or it already binds its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpudoctor.model import Case, Example, Finding, Gain, Gpu, NumaNode, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, cpu_list, evidence, subject
from gpudoctor.rules.locality import node_of, unknown_because

RULE = Rule(code="NUM001", name="gpus-span-numa-nodes", severity="info", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = answering(case)
    if len(gpus) < 2:
        return
    unknown = unknown_because(case)
    if unknown is not None:
        yield Unchecked(reason=unknown)
        return
    places = _places(case, gpus)
    for gpu, place in places.items():
        if place is None:
            yield Unchecked(reason="its NUMA node is unknown", subject=subject(gpu))
    groups: dict[str, list[str]] = {}
    for gpu, place in places.items():
        if place is not None:
            groups.setdefault(place, []).append(str(gpu.index))
    lists = {gpu.local_cpus for gpu in gpus}
    if len(groups) < 2 or (len(lists) == 1 and lists != {None}):
        return
    split = "; ".join(f"{place}: GPU {', '.join(members)}" for place, members in sorted(groups.items()))
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"the GPUs are attached to {len(groups)} NUMA nodes ({split}): bind each rank to the node of its GPU",
        evidence=tuple(
            evidence(case, path(gpu, "local_cpus" if place.startswith("CPUs") else "numa_node"), place)
            for gpu, place in places.items()
            if place is not None
        ),
        remedies=(
            Remedy(kind="command", text="torchrun --numa-binding=node (newer torch), or numactl for each rank"),
            Remedy(kind="config", text="keep a job that needs few GPUs on one node with CUDA_VISIBLE_DEVICES"),
        ),
        gain=Gain(
            low=case.threshold(RULE.code, "gain_low_pct"),
            high=case.threshold(RULE.code, "gain_high_pct"),
            unit="%",
            basis="published",
            source="docstring of torch/numa/binding.py; some servers gain nothing",
        ),
        confidence="certain",
    )


def _places(case: Case, gpus: Sequence[Gpu]) -> dict[Gpu, str | None]:
    """The node of each GPU. Old matrices print no nodes: there, lists of CPUs that do not overlap tell them apart."""
    nodes = {gpu: node_of(case, gpu) for gpu in gpus}
    lists = {gpu.local_cpus for gpu in gpus if gpu.local_cpus}
    apart = sum(len(cpus) for cpus in lists) == len({cpu for cpus in lists for cpu in cpus})
    if apart and set(nodes.values()) == {None}:
        return {gpu: f"CPUs {cpu_list(gpu.local_cpus)}" if gpu.local_cpus else None for gpu in gpus}
    return {gpu: None if node is None else f"node {node}" for gpu, node in nodes.items()}


def _gpu(index: int, node: int | None, cpus: range | None = None) -> Gpu:
    return Gpu(
        index=index,
        bdf=f"0000:{index + 1:02x}:00.0",
        numa_node=node,
        local_cpus=tuple(cpus) if cpus is not None else None,
    )


_TWO_NODES = (NumaNode(node=0, cpus=tuple(range(8))), NumaNode(node=1, cpus=tuple(range(8, 16))))

EXAMPLES = (
    Example(
        name="one GPU on each socket",
        kind="fires",
        case=Case(gpus=(_gpu(0, 0, range(8)), _gpu(1, 1, range(8, 16))), numa_nodes=_TWO_NODES),
        subjects=("host",),
    ),
    Example(
        name="only the nodes are known, ids 0 and 8 as on POWER9",
        kind="fires",
        case=Case(gpus=(_gpu(0, 0), _gpu(1, 8))),
        subjects=("host",),
    ),
    Example(
        name="an old matrix without nodes: the CPU lists differ",
        kind="fires",
        case=Case(gpus=(_gpu(0, None, range(8)), _gpu(1, None, range(8, 16)))),
        subjects=("host",),
    ),
    Example(
        name="both on one node of two",
        kind="quiet",
        case=Case(gpus=(_gpu(0, 1, range(8, 16)), _gpu(1, 1, range(8, 16))), numa_nodes=_TWO_NODES),
    ),
    Example(name="one CPU list for both", kind="quiet", case=Case(gpus=(_gpu(0, 0, range(16)), _gpu(1, 1, range(16))))),
    Example(name="one GPU", kind="quiet", case=Case(gpus=(_gpu(0, 0, range(8)),), numa_nodes=_TWO_NODES)),
    Example(
        name="numa_node is -1 on both",
        kind="lacks",
        case=Case(gpus=(_gpu(0, None), _gpu(1, None)), numa_nodes=_TWO_NODES),
    ),
)
