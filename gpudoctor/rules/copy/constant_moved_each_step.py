"""The same tensor is moved to the GPU in every step.

What it means
    A tensor that is made once, on the CPU, is copied with .to(device) each time it is used: in forward(), or in the
    loop.
Why it costs
    A copy from memory that is not pinned makes the host wait until the GPU has done what was queued before
    (https://github.com/Nerogar/OneTrainer/pull/1608).
How we know
    The source was read: the tensor is made outside of the loop that copies it, and is no parameter or buffer of a
    module, which would move with it.
Fix
    In a module self.register_buffer("name", tensor) in place of self.name = tensor; elsewhere move it once before the
    loop.
When to ignore
    It is too large to stay on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="CPY004", name="constant-moved-each-step", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "constant-to-device")):
        yield sources.source_finding(
            RULE,
            group[0],
            "a tensor that does not change is copied to the GPU in each step",
            (
                Remedy(kind="code", text='self.register_buffer("name", tensor) in a module, which then moves with it'),
                Remedy(kind="code", text="or move it once, before the loop"),
            ),
            waits=False,
        )


EXAMPLES = (
    Example(
        name="statistics of a module",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "constant-to-device", "to", "self.mean.to(x.device)", chain=("train.py:16 calls Norm.forward()",)
            )
        ),
        subjects=("train.py:21",),
    ),
    Example(name="nothing moved", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
