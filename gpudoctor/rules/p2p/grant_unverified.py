"""Peer access is granted to GeForce cards, and nobody checked that the data arrives.

What it means
    The stock driver refuses peer access on these cards; here a patched driver or a virtual machine's setting grants it.
    A grant is the driver's answer and no proof: copies have been seen to hang or to deliver other data.
Why it costs
    Wrong data in a collective ruins a training run without an error message
    (https://github.com/noonghunna/club-3090/issues/922).
How we know
    The P2P status is OK between GeForce cards that no NVLink joins, and no copy was checked at its destination.
Fix
    Copy one way and read the result at the destination (`gpudoctor bench-pcie` does), then a small all-reduce with a
    value check. Until then switch custom all-reduce kernels off.
When to ignore
    Data-centre boards. After the check passed the rule is quiet.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Measurement, Pair, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import evidence

RULE = Rule(code="P2P003", name="p2p-grant-unverified", severity="unknown", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    pairs = [pair for pair in rates.gpu_pairs(case) if "OK" in (pair.p2p_read, pair.p2p_write) and not pair.nvlinks]
    if not pairs:
        return
    names = {f"gpu:{gpu.index}": gpu.name for gpu in case.gpus}
    if any(names[key] is None for pair in pairs for key in (pair.a, pair.b)):
        yield Unchecked(reason="peer access is granted, but the models of the GPUs are unknown")
        return
    checked = {rates.pair_of(item.subject) for item in rates.of(case, "p2p_check")}
    open_pairs = [
        pair
        for pair in pairs
        if all("GeForce" in (names[key] or "") for key in (pair.a, pair.b)) and (pair.a, pair.b) not in checked
    ]
    if not open_pairs:
        return
    words = [rates.name((pair.a, pair.b)) for pair in open_pairs]
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=words[0] if len(words) == 1 else "host",
        message=f"peer access is granted between {rates.listed(words)}, which the stock driver refuses here; "
        "whether the data arrives was not checked",
        evidence=tuple(evidence(case, f"pairs[{pair.a},{pair.b}].p2p_read", pair.p2p_read) for pair in open_pairs),
        remedies=(
            Remedy(kind="measure", text="gpudoctor bench-pcie copies one way and checks the data at the destination"),
            Remedy(kind="command", text="until then: vLLM --disable-custom-all-reduce, NCCL_P2P_DISABLE=1"),
        ),
        confidence="certain",
    )


def _case(name: str | None, *, check: bool = False, nvlinks: int | None = None) -> Case:
    items = (Measurement(metric="p2p_check", subject="gpu:0-gpu:1", value=1.0, unit="passed"),) if check else ()
    return Case(
        gpus=(Gpu(index=0, name=name), Gpu(index=1, name=name)),
        pairs=(Pair(a="gpu:0", b="gpu:1", p2p_read="OK", nvlinks=nvlinks),),
        measurements=items,
    )


EXAMPLES = (
    Example(name="two RTX 5090", kind="fires", case=_case("NVIDIA GeForce RTX 5090"), subjects=("gpu:0-gpu:1",)),
    Example(name="checked", kind="quiet", case=_case("NVIDIA GeForce RTX 5090", check=True)),
    Example(name="bridge between RTX 3090", kind="quiet", case=_case("NVIDIA GeForce RTX 3090", nvlinks=4)),
    Example(name="data-centre board", kind="quiet", case=_case("NVIDIA L40S")),
    Example(name="names unknown", kind="lacks", case=_case(None)),
)
