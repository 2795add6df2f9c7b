"""GPUs share one uplink: copying at once, they get together what one of them gets alone.

What it means
    Several GPUs hang on one switch, or on one port of the processor, and their copies from host memory pass through the
    same link upwards. A server with PCIe switches is built so; without a switch in sight it is a surprise.
Why it costs
    Each of two GPUs has half of its rate while both copy. Jobs that feed all GPUs from the host at the same time feel
    it; those that copy little do not.
How we know
    `gpudoctor bench-pcie` measured each GPU alone, all at once, and pairs of them: the sum of a pair is far below the
    sum of both alone. Only the time in which both copied counts.
Fix
    Give a job that uses some of the GPUs those under different uplinks. Copy less: decode and augment on the GPU, send
    smaller types. Where the tree shows no switch, look for a split slot or a bifurcation card.
When to ignore
    Training that is not limited by copies.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Gpu, Measurement, PcieHop, Remedy, Rule, Severity, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import answering

RULE = Rule(code="PCI008", name="uplink-shared", severity="warning", needs=("gpus",), since="0.1")

_SUMS = ("h2d_pair_sum", "d2h_pair_sum")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if len(answering(case)) < 2:
        return
    pairs = rates.of(case, *_SUMS)
    if not pairs:
        if _lost(case):
            yield Unchecked(reason="GPUs lose rate when all copy, but no pairs of them were measured")
        elif not rates.of(case, "h2d_all", "d2h_all"):
            yield Unchecked(reason="the GPUs were not measured at once (`gpudoctor bench-pcie` does)")
        return
    for group, seen in _groups(case, pairs):
        yield _finding(case, group, seen)


def _lost(case: Case) -> bool:
    share = case.threshold(RULE.code, "pair_share")
    return any(
        isinstance(alone := item.settings.get("alone"), float) and item.value < share * alone
        for item in rates.of(case, "h2d_all", "d2h_all")
    )


def _groups(case: Case, pairs: tuple[Measurement, ...]) -> list[tuple[list[str], list[Measurement]]]:
    """GPUs that share, joined pair by pair, with the pairs that show it."""
    share = case.threshold(RULE.code, "pair_share")
    groups: list[tuple[list[str], list[Measurement]]] = []
    for item in pairs:
        names = rates.pair_of(item.subject)
        alone = item.settings.get("alone")
        if names is None or not isinstance(alone, float) or item.value >= share * alone:
            continue
        near = [group for group in groups if set(group[0]) & set(names)]
        members = list(dict.fromkeys([*(name for group in near for name in group[0]), *names]))
        seen = [*(one for group in near for one in group[1]), item]
        groups = [group for group in groups if group not in near] + [(members, seen)]
    return [(sorted(members, key=lambda name: int(name[4:])), seen) for members, seen in groups]


def _finding(case: Case, group: list[str], seen: list[Measurement]) -> Finding:
    worst = min(seen, key=lambda item: item.value / float(item.settings["alone"] or 1))
    alone = float(worst.settings["alone"] or 0.0)
    switch = _common_switch(case, group)
    severity: Severity = RULE.severity
    message = (
        f"{rates.listed(group)} share an uplink: {worst.subject.replace('-', ' and ')} copy {worst.value:.1f} GB/s at "
        f"once, {alone:.1f} GB/s one after the other"
    )
    if switch is not None:
        severity = "info"
        message += f"; they hang on the switch {switch}, so the machine is built that way"
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=severity,
        subject=rates.name(group) if len(group) == 2 else "host",
        message=message,
        evidence=tuple(rates.shown(case, item, f"{item.settings['alone']:.4g} GB/s") for item in seen),
        remedies=(
            Remedy(kind="env", text="give a job that uses some of the GPUs those under different uplinks"),
            Remedy(kind="config", text="copy less: decode on the GPU, send bytes instead of floats"),
        ),
        gain=Gain(
            low=1.0,
            high=alone / worst.value,
            unit="x",
            basis="measured",
            source="the pair alone against at once; bounds copies that overlap, not the whole job",
        ),
        confidence="certain",
    )


def _common_switch(case: Case, group: list[str]) -> str | None:
    """The upper port that is on the way of every GPU of the group, or None."""
    ways = [
        {hop.bdf for hop in gpu.pcie_path if hop.kind == "switch-up"}
        for name in group
        if (gpu := rates.gpu_named(case, name)) is not None
    ]
    common = set.intersection(*ways) if ways else set()
    return min(common) if common else None


def _case(total: float, *, switch: bool = False, alone: float = 52.0) -> Case:
    gpus = []
    for index in range(2):
        bdf = f"0000:0{index + 3}:00.0"
        hops = (PcieHop(bdf=bdf, kind="endpoint"), PcieHop(bdf="0000:01:00.0", kind="switch-up"))
        gpus.append(Gpu(index=index, bdf=bdf, pcie_path=hops if switch else ()))
    item = Measurement(
        metric="h2d_pair_sum", subject="gpu:0-gpu:1", value=total, unit="GB/s", settings={"alone": alone}
    )
    return Case(gpus=tuple(gpus), measurements=(item,))


EXAMPLES = (
    Example(name="no switch in sight", kind="fires", case=_case(26.5), subjects=("gpu:0-gpu:1",)),
    Example(
        name="one switch by design",
        kind="fires",
        case=_case(26.5, switch=True),
        subjects=("gpu:0-gpu:1",),
        severity="info",
    ),
    Example(name="both at full rate", kind="quiet", case=_case(51.0)),
    Example(name="one GPU", kind="quiet", case=Case(gpus=(Gpu(index=0),))),
    Example(name="not measured at once", kind="lacks", case=Case(gpus=(Gpu(index=0), Gpu(index=1)))),
)
