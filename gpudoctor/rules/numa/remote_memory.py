"""Copies from the memory of a far NUMA node are much slower than from the near one.

What it means
    The same pinned copy was measured with host memory and CPUs on each node. Where the far node is clearly slower, a
    process that is not bound may get either figure, depending on where its pages fall.
Why it costs
    3.8 instead of 12.2 GB/s to the GPU and 2.5 instead of 12.9 GB/s back on an old server
    (https://github.com/mpicbg-scicomp/gearshifft/pull/82). New servers lose nothing: measure, never assume.
How we know
    `gpudoctor bench-pcie` sets CPUs and memory policy before it allocates, checks where the pages lie, and compares the
    nodes. Other tools under numactl give the same figures.
Fix
    Bind CPU and memory of each rank to the node of its GPU.
When to ignore
    Ranks are bound already.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Gpu, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import answering, subject

RULE = Rule(code="NUM010", name="remote-node-host-memory", severity="warning", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for gpu in answering(case):
        worst: tuple[Measurement, Measurement] | None = None
        compared = False
        for metric in ("h2d_node", "d2h_node"):
            items = [item for item in rates.of(case, metric) if item.subject == subject(gpu) and _placed(item)]
            if len({item.settings.get("node") for item in items}) < 2:
                continue
            compared = True
            near = max((i for i in items if i.settings.get("near")), key=_value, default=max(items, key=_value))
            far = min(items, key=_value)
            if far.value < case.threshold(RULE.code, "share") * near.value and (
                worst is None or far.value / near.value < worst[1].value / worst[0].value
            ):
                worst = (near, far)
        if worst is not None:
            yield _finding(case, gpu, *worst)
        elif not compared:
            yield Unchecked(reason="copies were not measured for memory of two NUMA nodes", subject=subject(gpu))


def _placed(item: Measurement) -> bool:
    """Whether the pages lay on the node that the figure is for, as far as that is known."""
    share = item.settings.get("on_node")
    return not isinstance(share, int | float) or share > 0.9


def _value(item: Measurement) -> float:
    return item.value


def _finding(case: Case, gpu: Gpu, near: Measurement, far: Measurement) -> Finding:
    way = "to the GPU" if far.metric.startswith("h2d") else "from the GPU"
    node = near.settings.get("node")
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject(gpu),
        message=f"pinned copies {way} reach {far.value:.1f} GB/s with memory of node {far.settings.get('node')}, "
        f"{near.value:.1f} GB/s with memory of node {node}: bind CPU and memory",
        evidence=(rates.shown(case, near), rates.shown(case, far, f"{near.value:.4g} GB/s")),
        remedies=(
            Remedy(kind="command", text=f"numactl --cpunodebind={node} --membind={node} for the rank of this GPU"),
            Remedy(kind="command", text="or torchrun --numa-binding=node (newer torch; binds CPUs, memory follows)"),
        ),
        gain=Gain(
            low=1.0,
            high=near.value / far.value,
            unit="x",
            basis="measured",
            source="far against near memory; bounds host-device copies of an unbound process only",
        ),
        confidence="certain",
    )


def _case(*figures: tuple[str, int, float, bool]) -> Case:
    items = tuple(
        Measurement(metric=metric, subject="gpu:0", value=value, unit="GB/s", settings={"node": node, "near": near})
        for metric, node, value, near in figures
    )
    return Case(gpus=(Gpu(index=0, numa_node=0),), measurements=items)


EXAMPLES = (
    Example(
        name="old server",
        kind="fires",
        case=_case(("h2d_node", 0, 12.2, True), ("h2d_node", 1, 3.8, False)),
        subjects=("gpu:0",),
    ),
    Example(
        name="only the way back",
        kind="fires",
        case=_case(
            ("h2d_node", 0, 12.2, True),
            ("h2d_node", 1, 12.0, False),
            ("d2h_node", 0, 12.9, True),
            ("d2h_node", 1, 9.0, False),
        ),
        subjects=("gpu:0",),
    ),
    Example(name="new server", kind="quiet", case=_case(("h2d_node", 0, 25.15, True), ("h2d_node", 1, 25.13, False))),
    Example(
        name="the far memory was not there",
        kind="lacks",
        case=Case(
            gpus=(Gpu(index=0, numa_node=0),),
            measurements=tuple(
                Measurement(
                    metric="h2d_node", subject="gpu:0", value=12.2, unit="GB/s", settings={"node": n, "on_node": share}
                )
                for n, share in ((0, 1.0), (1, 0.0))
            ),
        ),
    ),
    Example(name="one node measured", kind="lacks", case=_case(("h2d_node", 0, 12.2, True))),
)
