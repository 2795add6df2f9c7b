"""NVLink joins some pairs of GPUs and not others, or some pairs by more links.

What it means
    Bridges join two cards; cube meshes and boards of four join neighbours by one or two links. What is not joined talks
    over PCIe. That is the design of the machine, and where work is placed on it matters.
Why it costs
    A group that reaches over the edge of an island runs at the rate of its slowest pair
    (https://github.com/NVIDIA/nccl-tests/issues/29).
How we know
    The matrix names bonded links for some pairs only, or different numbers of them.
Fix
    Put tensor-parallel groups inside an island, on the pairs with more links; let pipeline or data parallel traffic
    cross the edges.
When to ignore
    One GPU per process group.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Pair, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import answering, evidence

RULE = Rule(code="NVL005", name="nvlink-not-all-to-all", severity="info", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = answering(case)
    if len(gpus) < 3:
        return
    pairs = rates.gpu_pairs(case)
    joined = [pair for pair in pairs if pair.nvlinks]
    apart = [pair for pair in pairs if not pair.nvlinks and (pair.path is not None or pair.nvlinks == 0)]
    if not pairs:
        yield Unchecked(reason="what lies between the GPUs is unknown")
        return
    counts = {pair.nvlinks for pair in joined}
    if not joined or (not apart and len(counts) < 2):
        return
    best = max(count or 0 for count in counts)
    names = [rates.name((pair.a, pair.b)) for pair in joined if pair.nvlinks == best]
    text = f"NVLink joins {len(joined)} of {len(joined) + len(apart)} pairs of GPUs"
    if len(counts) > 1:
        text += f", by {min(count or 0 for count in counts)} to {best} links"
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"{text}; the best pairs (NV{best}): {rates.listed(names, 8)}",
        evidence=tuple(evidence(case, f"pairs[{pair.a},{pair.b}].nvlinks", pair.nvlinks) for pair in joined),
        remedies=(
            Remedy(kind="config", text="tensor-parallel groups inside an island, on the pairs with more links"),
            Remedy(kind="env", text="jobs of two GPUs on one of the best pairs: CUDA_VISIBLE_DEVICES"),
        ),
        confidence="certain",
    )


def _case(*links: tuple[int, int, int | None]) -> Case:
    pairs = tuple(
        Pair(a=f"gpu:{a}", b=f"gpu:{b}", nvlinks=count, path=None if count else "SYS") for a, b, count in links
    )
    return Case(gpus=tuple(Gpu(index=i) for i in range(3)), pairs=pairs)


EXAMPLES = (
    Example(
        name="bridge over two of three",
        kind="fires",
        case=_case((0, 1, 4), (0, 2, None), (1, 2, None)),
        subjects=("host",),
    ),
    Example(name="one and two links", kind="fires", case=_case((0, 1, 2), (0, 2, 1), (1, 2, 2)), subjects=("host",)),
    Example(name="switch", kind="quiet", case=_case((0, 1, 18), (0, 2, 18), (1, 2, 18))),
    Example(name="no NVLink", kind="quiet", case=_case((0, 1, None), (0, 2, None), (1, 2, None))),
    Example(name="nothing known", kind="lacks", case=Case(gpus=tuple(Gpu(index=i) for i in range(3)))),
)
