"""The GPUs are spread unevenly over the NUMA nodes.

What it means
    One node has clearly more GPUs than another, or one GPU stands alone. The loader workers, the memory traffic and
    the copies of the full node meet in one place while the other idles.
Why it costs
    Ranks on the crowded node share its processors and memory; collectives wait for the slowest rank. A small job that
    takes GPUs 0 to 3 may straddle both nodes where a better choice would not.
How we know
    The number of GPUs by NUMA node differs by two or more, or a node has one GPU where another has several.
Fix
    Pick a subset on one node for small jobs (CUDA_VISIBLE_DEVICES); move a card to the other socket where slots allow.
When to ignore
    Jobs that copy little and decode on the GPU; slices of a larger machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gap, Gpu, NumaNode, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence
from gpudoctor.rules.locality import cpu_nodes, node_of, unknown_because

RULE = Rule(code="NUM004", name="gpus-uneven-over-nodes", severity="warning", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = answering(case)
    if len(gpus) < 3 or len(cpu_nodes(case)) == 1:
        return
    places = {gpu: node_of(case, gpu) for gpu in gpus}
    known = {gpu: place for gpu, place in places.items() if place is not None}
    cut = any(gap.path == "gpus" and gap.reason == "truncated" for gap in case.gaps)
    if len(known) < len(places) or cut or any(gpu.lost for gpu in case.gpus):
        reason = "not every GPU is shown" if cut else unknown_because(case) or "the NUMA node of some GPU is unknown"
        yield Unchecked(reason=reason)
        return
    counts = Counter(known.values())
    if len(counts) < 2:
        return
    most, least = max(counts.values()), min(counts.values())
    if most - least < case.threshold(RULE.code, "difference") and not (least == 1 and most > 1):
        return
    split = ", ".join(f"{count} on node {node}" for node, count in sorted(counts.items()))
    full = max(counts, key=lambda node: counts[node])
    members = ",".join(str(gpu.index) for gpu, place in known.items() if place == full)
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"the GPUs are spread unevenly over the NUMA nodes: {split}",
        evidence=tuple(evidence(case, path(gpu, "numa_node"), place) for gpu, place in known.items()),
        remedies=(
            Remedy(kind="env", text=f"keep a job of up to {most} GPUs on one node: CUDA_VISIBLE_DEVICES={members}"),
            Remedy(kind="hardware", text="move a card to a slot of the other socket"),
        ),
        confidence="certain",
    )


def _case(*nodes: int | None, gaps: tuple[Gap, ...] = (), lost: bool = False) -> Case:
    gpus = tuple(Gpu(index=i, numa_node=node, lost=lost and not i) for i, node in enumerate(nodes))
    return Case(gpus=gpus, gaps=gaps, numa_nodes=(NumaNode(node=0, cpus=(0,)), NumaNode(node=1, cpus=(1,))))


EXAMPLES = (
    Example(name="six and two", kind="fires", case=_case(0, 0, 0, 0, 0, 0, 1, 1), subjects=("host",)),
    Example(name="one stands alone", kind="fires", case=_case(0, 0, 1), subjects=("host",)),
    Example(name="two and two", kind="quiet", case=_case(0, 0, 1, 1)),
    Example(name="three and two", kind="quiet", case=_case(0, 0, 0, 1, 1)),
    Example(name="all on one", kind="quiet", case=_case(1, 1, 1)),
    Example(name="cut matrix", kind="lacks", case=_case(0, 0, 0, 1, gaps=(Gap(path="gpus", reason="truncated"),))),
    Example(name="one of four lost", kind="lacks", case=_case(0, 0, 0, 1, lost=True)),
)
