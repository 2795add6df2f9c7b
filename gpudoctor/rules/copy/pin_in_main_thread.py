"""pin_memory() is called in the loop, before the copy.

What it means
    Pinning allocates page-locked memory and copies into it, in the thread that should queue the next kernels. Only the
    copy after it is asynchronous.
Why it costs
    Up to twice as long as the plain copy (tutorial of PyTorch on pin_memory and non_blocking,
    https://github.com/pytorch/tutorials/pull/2983).
How we know
    The source was read: .pin_memory() stands in a loop that runs once a step.
Fix
    pin_memory=True in the DataLoader: it pins in a thread of its own. Without a loader: one pinned buffer, made before
    the loop and filled with copy_().
When to ignore
    It runs in a thread of its own that prefetches.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="CPY005", name="pin-in-main-thread", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "pinned-inline")):
        yield sources.source_finding(
            RULE,
            group[0],
            "pin_memory() in each step: the thread that queues kernels allocates and copies",
            (
                Remedy(kind="code", text="pin_memory=True in the DataLoader, and no .pin_memory() in the loop"),
                Remedy(kind="code", text="or one pinned buffer, made before the loop"),
            ),
            waits=False,
        )


EXAMPLES = (
    Example(
        name="x.pin_memory().to(...)",
        kind="fires",
        case=sources.example_case(sources.example_site("pinned-inline", "pin_memory", "x.pin_memory()")),
        subjects=("train.py:21",),
    ),
    Example(name="the loader pins", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
