"""Direct copies between GPUs are slower than copies through host memory.

What it means
    Peer access is granted and works, yet the way around over host memory is faster. Something on the direct way holds
    it up: an IOMMU that translates each address, ACS that sends packets up and down again, the link between sockets.
Why it costs
    NCCL takes the direct way where it is granted: 2.6 instead of 13 GB/s until the IOMMU was off, 9.9 instead of 22
    GB/s on some cards (https://github.com/NVIDIA/nccl/issues/814).
How we know
    Copies were measured with peer access and staged through pinned host memory; direct ones reach less than 0.8 of
    staged ones, as the mean of both directions.
Fix
    Find the reason first: iommu=pt or off, ACS off on the bridges between the cards, another driver. Until then set
    NCCL_P2P_LEVEL below the bad hop, or NCCL_P2P_DISABLE=1. Measure both before setting anything.
When to ignore
    One cold cell in a matrix. Where access is refused both figures are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Gpu, Host, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import answering, evidence

RULE = Rule(code="P2P005", name="p2p-slower-than-staged", severity="warning", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if len(answering(case)) < 2:
        return
    slow, compared = slower_pairs(case)
    if not compared:
        yield Unchecked(reason="copies between GPUs were not measured both ways, direct and staged")
        return
    if not slow:
        return
    across = [pair for pair in slow if (known := rates.pair_between(case, pair)) is not None and known.path == "SYS"]
    where = ", all of them across sockets" if across and len(across) == len(slow) else ""
    names = [rates.name(pair) for pair in slow]
    direct, staged = zip(*slow.values(), strict=True)
    facts = [
        item
        for item in rates.of(case, *rates.PEER, "p2p_staged")
        if (pair := rates.pair_of(item.subject)) is not None and pair in slow
    ]
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=names[0] if len(names) == 1 else "host",
        message=f"direct copies are slower than copies through host memory: {rates.spread_text(direct)} against "
        f"{rates.spread_text(staged)} GB/s between {rates.listed(names)}{where}",
        evidence=(
            *(rates.shown(case, item) for item in facts),
            *((evidence(case, "host.iommu", case.host.iommu),) if case.host.iommu else ()),
        ),
        remedies=(
            Remedy(
                kind="config", text="iommu=pt on the kernel command line, or the IOMMU off", undo="the old command line"
            ),
            Remedy(kind="bios", text="ACS off on the bridges between the cards", undo="ACS on"),
            Remedy(kind="env", text="until then NCCL_P2P_DISABLE=1, if the job is faster with it", undo="unset it"),
        ),
        gain=Gain(
            low=1.0,
            high=max(after / before for before, after in slow.values()),
            unit="x",
            basis="measured",
            source="staged against direct copies of these pairs",
        ),
        confidence="certain",
    )


def slower_pairs(case: Case) -> tuple[dict[tuple[str, str], tuple[float, float]], bool]:
    """Pairs whose direct copies are slower than staged ones, with both rates; and whether any pair was compared."""
    direct, staged = rates.by_pair(case, *rates.PEER), rates.by_pair(case, "p2p_staged")
    share = case.threshold(RULE.code, "share")
    both = {pair: (direct[pair], staged[pair]) for pair in direct.keys() & staged.keys()}
    slow = {pair: both[pair] for pair in sorted(both) if both[pair][0] < share * both[pair][1]}
    return slow, bool(both)


def _case(*figures: tuple[str, str, float], iommu: str | None = None) -> Case:
    items = tuple(Measurement(metric=m, subject=s, value=v, unit="GB/s") for m, s, v in figures)
    return Case(host=Host(iommu=iommu), gpus=tuple(Gpu(index=i) for i in range(3)), measurements=items)


EXAMPLES = (
    Example(
        name="IOMMU in the way",
        kind="fires",
        case=_case(("p2p_write", "gpu:0-gpu:1", 2.6), ("p2p_staged", "gpu:0-gpu:1", 13.2), iommu="translated"),
        subjects=("gpu:0-gpu:1",),
    ),
    Example(
        name="all pairs of three",
        kind="fires",
        case=_case(
            *(
                (m, f"gpu:{a}-gpu:{b}", v)
                for m, v in (("p2p_write", 9.9), ("p2p_staged", 22.0))
                for a, b in ((0, 1), (2, 1))
            )
        ),
        subjects=("host",),
    ),
    Example(
        name="one cold cell",
        kind="quiet",
        case=_case(
            ("p2p_write", "gpu:0-gpu:1", 14.0), ("p2p_write", "gpu:1-gpu:0", 26.3), ("p2p_staged", "gpu:0-gpu:1", 22.2)
        ),
    ),
    Example(
        name="direct is faster",
        kind="quiet",
        case=_case(("p2p_read", "gpu:0-gpu:1", 26.3), ("p2p_staged", "gpu:0-gpu:1", 22.2)),
    ),
    Example(name="only direct measured", kind="lacks", case=_case(("p2p_write", "gpu:0-gpu:1", 2.6))),
)
