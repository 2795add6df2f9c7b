"""Some NVLinks of a GPU are down while others, or those of its siblings, are up.

What it means
    A link that the board has is inactive: a bridge without full contact, a damaged connector, or a link that failed to
    train. What is left carries the traffic.
Why it costs
    Two of six links lost is 100 of 150 GB/s in each direction (https://github.com/Azure/azhpc-diagnostics/issues/73),
    and collectives run at the rate of the weakest GPU.
How we know
    The states of the links: fewer are active than on other GPUs of the same model here, or, where no other GPU is
    shown, some of one GPU's own links are down on a board that uses all of them.
Fix
    Seat the bridge again, reset the GPUs, or have the board serviced.
When to ignore
    Cards without a bridge (all links down), boards with fewer links by design, cube meshes: there all GPUs agree.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Gpu, NvLink, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence, subject

RULE = Rule(code="NVL001", name="nvlink-links-missing", severity="error", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for gpu in answering(case):
        if gpu.mig:
            yield Unchecked(reason="NVLink queries are not supported while MIG is on", subject=subject(gpu))
            continue
        states = [link for link in gpu.nvlinks if link.active is not None]
        if not states:
            if _silent(case, gpu):
                continue
            yield Unchecked(reason="the states of its NVLinks are unknown", subject=subject(gpu))
            continue
        up = sum(1 for link in states if link.active)
        usual = _usual(case, gpu, len(states))
        if 0 < up < usual or (up == 0 and usual and not _is_card(gpu)):
            yield _finding(case, gpu, up, usual)


def _silent(case: Case, gpu: Gpu) -> bool:
    """Whether it is known that this GPU has no NVLink, or no bridge."""
    gap = case.gap(path(gpu, "nvlinks"))
    if gap is not None:
        return gap.reason in ("not supported", "not present")
    return not any(other.nvlinks for other in case.gpus) and bool(case.pairs) and not any(p.nvlinks for p in case.pairs)


def _usual(case: Case, gpu: Gpu, shown: int) -> int:
    """How many links should be up: as many as on the best GPU of the same model; alone, all that the board shows."""
    siblings = [
        sum(1 for link in other.nvlinks if link.active)
        for other in answering(case)
        if other.index != gpu.index and other.name == gpu.name and other.nvlinks
    ]
    if siblings:
        return max(siblings)
    return shown if not _is_card(gpu) else 0


def _is_card(gpu: Gpu) -> bool:
    """A card for a slot: its links need a bridge, which is optional. SXM boards say so in their names."""
    return "SXM" not in (gpu.name or "") and "HBM3" not in (gpu.name or "")


def _finding(case: Case, gpu: Gpu, up: int, usual: int) -> Finding:
    down = [str(link.link) for link in gpu.nvlinks if link.active is False]
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject(gpu),
        message=f"{up} of {usual} NVLinks are active; inactive: {', '.join(down)}",
        evidence=(evidence(case, path(gpu, "nvlinks"), f"{up} active", f"{usual} active"),),
        remedies=(
            Remedy(kind="hardware", text="seat the NVLink bridge again; have the board serviced"),
            Remedy(kind="command", text="nvidia-smi nvlink -s and -e show states and error counters of the links"),
        ),
        gain=Gain(
            low=1.0, high=usual / max(1, up), unit="x", basis="estimate", source="the share of links that are up"
        ),
        confidence="certain",
    )


def _gpu(index: int, up: int, total: int = 6, name: str = "Tesla V100-SXM2-32GB", *, mig: bool = False) -> Gpu:
    links = tuple(NvLink(link=number, active=number < up) for number in range(total))
    return Gpu(index=index, name=name, nvlinks=links, mig=mig or None)


EXAMPLES = (
    Example(name="two of six, alone in the paste", kind="fires", case=Case(gpus=(_gpu(3, 4),)), subjects=("gpu:3",)),
    Example(
        name="fewer than its siblings", kind="fires", case=Case(gpus=(_gpu(0, 6), _gpu(1, 5))), subjects=("gpu:1",)
    ),
    Example(
        name="none on one board of two", kind="fires", case=Case(gpus=(_gpu(0, 6), _gpu(1, 0))), subjects=("gpu:1",)
    ),
    Example(name="all boards use four", kind="quiet", case=Case(gpus=(_gpu(0, 4), _gpu(1, 4)))),
    Example(name="card without a bridge", kind="quiet", case=Case(gpus=(_gpu(0, 0, 4, "NVIDIA RTX A6000"),))),
    Example(
        name="third card without a bridge",
        kind="quiet",
        case=Case(gpus=(_gpu(0, 4, 4, "RTX A6000"), _gpu(1, 4, 4, "RTX A6000"), _gpu(2, 0, 4, "RTX A6000"))),
    ),
    Example(name="MIG", kind="lacks", case=Case(gpus=(_gpu(0, 0, mig=True),))),
    Example(name="unknown", kind="lacks", case=Case(gpus=(Gpu(index=0),))),
)
