"""The driver refuses direct copies between GPUs of this model.

What it means
    Peer-to-peer access (one GPU reading the memory of another over PCIe) is not offered for this product: the P2P
    matrix says GNS, "GPU not supported", and a program that asks for access is refused (NS). GeForce boards with the
    stock driver are like this. No setting lifts it.
Why it costs
    Copies between GPUs are staged through host memory: about 38 GB/s for a pair on Gen5, and 27 GB/s all-reduce bus
    bandwidth on four RTX 5090 (https://github.com/NVIDIA/nccl/issues/1127). Training that communicates little does
    not notice.
How we know
    The P2P status of the pair, from NVML or `nvidia-smi topo -p2p r`, is GNS, or the connectivity matrix of
    p2pBandwidthLatencyTest holds 0; and no NVLink joins the pair.
Fix
    Accept staging. NCCL_P2P_LEVEL cannot lift a refusal. Prefer layouts that communicate little: data parallel over
    tensor parallel, larger batches, gradient accumulation.
When to ignore
    Jobs with one GPU per process group. CNS (chipset) is another fault, and so is a GPU that is lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Pair, Remedy, Rule, Unchecked
from gpudoctor.rules.evidence import answering, evidence

RULE = Rule(code="P2P001", name="p2p-not-supported", severity="info", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    """One finding for all refused pairs: the cause is the product, not the pair."""
    pairs = [pair for pair in case.pairs if pair.a.startswith("gpu:") and pair.b.startswith("gpu:")]
    if len(answering(case)) < 2:
        return
    known = [pair for pair in pairs if pair.p2p_read is not None or pair.p2p_write is not None]
    if not known:
        yield Unchecked(reason="the P2P status of the pairs is unknown (`nvidia-smi topo -p2p r` prints it)")
        return
    refused = [pair for pair in known if {"GNS", "NS"} & {pair.p2p_read, pair.p2p_write} and not pair.nvlinks]
    if not refused:
        return
    names = [f"{pair.a}-{pair.b}" for pair in refused]
    words = sorted({word for pair in refused for word in (pair.p2p_read, pair.p2p_write) if word in ("GNS", "NS")})
    count = "this pair" if len(names) == 1 else f"{len(names)} of {len(known)} pairs"
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=names[0] if len(names) == 1 else "host",
        message=f"the driver offers no direct copies between these GPUs ({'/'.join(words)}, {count}): copies go "
        "through host memory",
        evidence=tuple(
            evidence(
                case,
                f"pairs[{pair.a},{pair.b}].{'p2p_read' if pair.p2p_read in ('GNS', 'NS') else 'p2p_write'}",
                pair.p2p_read if pair.p2p_read in ("GNS", "NS") else pair.p2p_write,
                "OK where the product supports it",
            )
            for pair in refused
        ),
        remedies=(
            Remedy(
                kind="config", text="prefer layouts with little traffic between GPUs; NCCL_P2P_LEVEL cannot lift this"
            ),
        ),
        confidence="certain",
    )


def _case(status: str | None, *, nvlinks: int | None = None, gpus: int = 2) -> Case:
    pairs = tuple(
        Pair(
            a=f"gpu:{a}",
            b=f"gpu:{b}",
            path="PHB",
            nvlinks=nvlinks,
            p2p_read="GNS" if status == "GNS" else "OK" if status == "OK" else "CNS" if status == "CNS" else None,
        )
        for a in range(gpus)
        for b in range(a + 1, gpus)
    )
    return Case(gpus=tuple(Gpu(index=index) for index in range(gpus)), pairs=pairs)


EXAMPLES = (
    Example(name="two GeForce boards", kind="fires", case=_case("GNS"), subjects=("gpu:0-gpu:1",)),
    Example(name="four boards, one finding", kind="fires", case=_case("GNS", gpus=4), subjects=("host",)),
    Example(name="granted", kind="quiet", case=_case("OK")),
    Example(name="NVLink bridge between them", kind="quiet", case=_case("GNS", nvlinks=4)),
    Example(name="refused by the chipset is P2P002", kind="quiet", case=_case("CNS")),
    Example(name="no status in the matrix", kind="lacks", case=_case(None)),
)
