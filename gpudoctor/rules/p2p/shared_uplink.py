"""GPUs that cannot copy directly share an uplink: their staged copies cross it twice.

What it means
    Peer access is off, so each copy between two GPUs goes up to host memory and down again. Two GPUs below one switch
    then use the same uplink for both halves; GPUs below different switches use one each.
Why it costs
    6.1 instead of 8.6 GB/s for a pair, 24 instead of 35 GB/s bus bandwidth for four
    (https://github.com/NVIDIA/nccl/issues/1127). The rule of thumb "near is fast" is turned round.
How we know
    The driver refuses peer access, and measured staged copies inside a switch are slower than across switches.
Fix
    Give jobs GPUs under different uplinks or sockets.
When to ignore
    Where peer access works, near GPUs are the best pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Gpu, Measurement, Pair, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import answering, evidence

RULE = Rule(code="P2P008", name="no-p2p-shared-uplink", severity="warning", needs=("gpus",), since="0.1")

_NEAR = ("PIX", "PXB")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    pairs = rates.gpu_pairs(case)
    if len(answering(case)) < 3 or any("OK" in (pair.p2p_read, pair.p2p_write) or pair.nvlinks for pair in pairs):
        return
    refused = [pair for pair in pairs if pair.p2p_read is not None or pair.p2p_write is not None]
    if not refused:
        yield Unchecked(reason="the P2P status of the pairs is unknown")
        return
    near = [pair for pair in refused if pair.path in _NEAR]
    far = [pair for pair in refused if pair.path is not None and pair.path not in _NEAR]
    if not near or not far:
        return
    staged = rates.by_pair(case, "p2p_staged")
    inside = [staged[pair.a, pair.b] for pair in near if (pair.a, pair.b) in staged]
    across = [staged[pair.a, pair.b] for pair in far if (pair.a, pair.b) in staged]
    if not inside or not across:
        yield Unchecked(reason="staged copies were not measured inside and across the switches")
        return
    slow, fast = statistics.median(inside), statistics.median(across)
    if slow >= case.threshold(RULE.code, "share") * fast:
        return
    names = [rates.name((pair.a, pair.b)) for pair in near]
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"without peer access, GPUs below one switch copy {slow:.1f} GB/s to each other, GPUs below different "
        f"ones {fast:.1f}: {rates.listed(names)} share their uplink",
        evidence=tuple(evidence(case, f"pairs[{pair.a},{pair.b}].path", pair.path) for pair in near),
        remedies=(Remedy(kind="env", text="choose GPUs under different uplinks with CUDA_VISIBLE_DEVICES"),),
        gain=Gain(low=1.0, high=fast / slow, unit="x", basis="measured", source="staged copies inside against across"),
        confidence="certain",
    )


def _case(inside: float | None, across: float = 8.6, status: str = "GNS") -> Case:
    pairs, items = [], []
    for a in range(4):
        for b in range(a + 1, 4):
            near = a // 2 == b // 2
            pairs.append(
                Pair(a=f"gpu:{a}", b=f"gpu:{b}", path="PIX" if near else "SYS", p2p_read=status)  # type: ignore[arg-type]
            )
            if inside is not None:
                rate = inside if near else across
                items.append(Measurement(metric="p2p_staged", subject=f"gpu:{a}-gpu:{b}", value=rate, unit="GB/s"))
    return Case(gpus=tuple(Gpu(index=i) for i in range(4)), pairs=tuple(pairs), measurements=tuple(items))


EXAMPLES = (
    Example(name="half the rate inside a switch", kind="fires", case=_case(6.1), subjects=("host",)),
    Example(name="the same", kind="quiet", case=_case(8.5)),
    Example(name="peer access works", kind="quiet", case=_case(6.1, status="OK")),
    Example(name="not measured", kind="lacks", case=_case(None)),
)
