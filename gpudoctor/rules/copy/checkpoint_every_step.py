"""The state is saved in every step.

What it means
    torch.save and the save methods of frameworks copy all parameters to the host and write them to a file while the
    training waits.
Why it costs
    Each save waits for the GPU, copies gigabytes and writes them: seconds for a large model.
How we know
    The source was read: the call stands in a loop that runs once a step, under no condition that makes it rare.
Fix
    Save every N steps, at the end of an epoch, or asynchronously (torch.distributed.checkpoint.async_save).
When to ignore
    A step takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="CPY007", name="checkpoint-every-step", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "checkpoint")):
        site = group[0]
        yield sources.source_finding(
            RULE,
            site,
            f"{site.operation}() in each step: all state is copied to the host and written while training waits",
            (
                Remedy(kind="code", text="save every N steps or once an epoch", risk="a crash loses more steps"),
                Remedy(kind="code", text="or torch.distributed.checkpoint.async_save"),
            ),
        )


EXAMPLES = (
    Example(
        name="torch.save in the loop",
        kind="fires",
        case=sources.example_case(
            sources.example_site("checkpoint", "torch.save", "torch.save(model.state_dict(), path)")
        ),
        subjects=("train.py:21",),
    ),
    Example(name="guarded", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
