"""A tensor is built on the host and copied to the GPU in every step.

What it means
    torch.tensor(list, device="cuda") makes a tensor on the CPU, copies it, and waits for the copy; so does
    torch.zeros(...).to(device). torch.zeros(..., device=...), arange, full and rand are made on the GPU and wait for
    nothing.
Why it costs
    The host stood still for the whole forward pass before it, for 8 bytes, in one report
    (https://github.com/sgl-project/sglang/pull/35106).
How we know
    The source was read: the tensor is made in a loop that runs once a step (or in what it calls) and goes to a GPU.
Fix
    Make it on the device (device= of zeros, full, arange, rand), build it once before the loop, or from a pinned
    tensor with non_blocking=True.
When to ignore
    The data is new in each step and small copies are not what limits the loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, SourceSite, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="CPY006", name="tensor-built-on-host", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "built-on-host")):
        yield _finding(group[0])


def _finding(site: SourceSite) -> Finding:
    moved = site.operation in ("to", "cuda")
    how = "a new tensor is made on the CPU and moved" if moved else f"{site.operation} builds a tensor from host data"
    first = (
        "make it on the device: device= of zeros, full, arange, rand"
        if moved
        else "build it once before the loop, or on the device"
    )
    return sources.source_finding(
        RULE,
        site,
        f"{how} in each step: the host waits for the copy",
        (
            Remedy(kind="code", text=first),
            Remedy(
                kind="code",
                text="new data in each step: torch.tensor(..., pin_memory=True).to(device, non_blocking=True)",
            ),
        ),
    )


EXAMPLES = (
    Example(
        name="torch.tensor(list, device=...) and zeros().to()",
        kind="fires",
        case=sources.example_case(
            sources.example_site("built-on-host", "torch.tensor", "torch.tensor([a, b], device=dev)"),
            sources.example_site("built-on-host", "to", "torch.zeros(4).to(dev)", line=22),
        ),
        subjects=("train.py:21", "train.py:22"),
    ),
    Example(name="made on the device", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
