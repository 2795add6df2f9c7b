"""NVLink joins two GPUs, and yet the driver refuses peer access between them.

What it means
    Links are up between the two, so that nothing but a fault keeps them from reaching each other: a link that failed
    after start, a fabric that is not set up, or a driver in a bad state.
Why it costs
    Copies fall back to PCIe or host memory, a tenth of the rate (https://github.com/NVIDIA/nccl/issues/2329).
How we know
    The matrix names bonded NVLinks for the pair, and its P2P status is not OK.
Fix
    Look at the link states, reset the GPUs, restart the fabric manager where there is an NVSwitch, then service.
When to ignore
    MIG is on: then no GPU has peer access.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Pair, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import evidence

RULE = Rule(code="NVL003", name="nvlink-p2p-broken", severity="error", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    mig = {f"gpu:{gpu.index}" for gpu in case.gpus if gpu.mig}
    joined = [pair for pair in rates.gpu_pairs(case) if pair.nvlinks and not {pair.a, pair.b} & mig]
    if not joined:
        return
    known = [pair for pair in joined if pair.p2p_read is not None]
    if not known:
        yield Unchecked(reason="NVLinks join GPUs, but the P2P status of the pairs is unknown")
        return
    for pair in known:
        if pair.p2p_read not in ("OK", "U"):
            yield Finding(
                rule=RULE.code,
                name=RULE.name,
                severity=RULE.severity,
                subject=rates.name((pair.a, pair.b)),
                message=f"{pair.nvlinks} NVLinks join these GPUs, but the driver refuses peer access ({pair.p2p_read})",
                evidence=(
                    evidence(case, f"pairs[{pair.a},{pair.b}].p2p_read", pair.p2p_read, "OK"),
                    evidence(case, f"pairs[{pair.a},{pair.b}].nvlinks", pair.nvlinks),
                ),
                remedies=(
                    Remedy(
                        kind="command",
                        text="nvidia-smi nvlink -s; with NVSwitch: systemctl status nvidia-fabricmanager",
                    ),
                    Remedy(kind="command", text="reset the GPUs when no job runs: nvidia-smi --gpu-reset"),
                ),
                confidence="certain",
            )


def _case(status: str | None, nvlinks: int | None = 18, *, mig: bool = False) -> Case:
    pair = Pair(a="gpu:0", b="gpu:1", nvlinks=nvlinks, p2p_read=status)  # type: ignore[arg-type]
    return Case(gpus=(Gpu(index=0, mig=mig or None), Gpu(index=1)), pairs=(pair,))


EXAMPLES = (
    Example(name="refused over NV18", kind="fires", case=_case("NS"), subjects=("gpu:0-gpu:1",)),
    Example(name="granted", kind="quiet", case=_case("OK")),
    Example(name="PCIe pair", kind="quiet", case=_case("GNS", None)),
    Example(name="MIG", kind="quiet", case=_case("NS", mig=True)),
    Example(name="no status", kind="lacks", case=_case(None)),
)
