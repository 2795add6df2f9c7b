"""Tensors are copied from the GPU to the host in every step.

What it means
    .cpu(), .to("cpu"), .numpy() and .tolist() wait until the GPU has done all queued work, then copy.
Why it costs
    20 % in one report; 434 to 13 ms for one loss that copied a matrix per level
    (https://github.com/mindee/doctr/pull/2141).
How we know
    The source was read: the tensor is on a GPU, and the line runs once a step, or several times inside one.
Fix
    Do it on the device (torch.multinomial, topk, sort). Where the host needs the values: stack them and copy once a
    step, or collect on the device and copy after the loop.
When to ignore
    The host decides what happens next (an environment that runs on the CPU, a solver without a GPU version): then one
    copy a step is needed, but only one.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="CPY003", name="device-to-host-every-step", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "copy-to-host")):
        site = group[0]
        yield sources.source_finding(
            RULE,
            site,
            f".{site.operation}() copies from the GPU to the host in each step, and the host waits",
            (
                Remedy(kind="code", text="stay on the device, or collect there and copy once after the loop"),
                Remedy(kind="code", text="several copies a step: stack them into one"),
            ),
        )


EXAMPLES = (
    Example(
        name="cpu() and tolist()",
        kind="fires",
        case=sources.example_case(
            sources.example_site("copy-to-host", "cpu", "probs.cpu()"),
            sources.example_site("copy-to-host", "tolist", "scores.tolist()", line=22),
        ),
        subjects=("train.py:21", "train.py:22"),
    ),
    Example(name="no copy", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
