"""Python decides by a tensor that is on the GPU, in every step.

What it means
    `if`, `while`, `assert`, `and`, `or`, `not`, max() and range() need a Python bool or number. For a tensor on the GPU
    the host waits until the GPU has done all work queued before it, then reads one value.
Why it costs
    The queue of kernels runs empty at each such line: 7 % of step time in one report
    (https://github.com/lucidrains/x-transformers/pull/355). Nothing where the GPU is the bottleneck anyway.
How we know
    The source was read: the value comes from something on a GPU, and the line runs once a step. Tests for None, of
    shapes and of Python flags are not meant.
Fix
    Keep the decision on the device: torch.where, clamp, masks. Or decide every N steps (`if step % 100 == 0`).
When to ignore
    The branch saves more than the wait costs, or ends the program (an assertion while debugging).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, SourceSite, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="SYN002", name="branch-on-device-tensor", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "branch")):
        yield _finding(group[0])


def _finding(site: SourceSite) -> Finding:
    how = {
        "comparison": "a comparison with a tensor on the GPU decides what Python does next",
        "condition": "a tensor on the GPU decides what Python does next",
        "range": "range() takes its bound from a tensor on the GPU",
    }.get(site.operation, f"{site.operation} needs the truth of a tensor on the GPU")
    return sources.source_finding(
        RULE,
        site,
        f"{how}: the host waits in each step",
        (
            Remedy(kind="code", text="torch.where, clamp or a mask in place of the branch; bounds from shapes"),
            Remedy(kind="code", text="or decide every N steps", risk="the decision comes later"),
        ),
    )


EXAMPLES = (
    Example(
        name="if on a comparison, and a while",
        kind="fires",
        case=sources.example_case(
            sources.example_site("branch", "comparison", "n_valid == 0"),
            sources.example_site("branch", "condition", "torch.isnan(loss)", line=22),
            sources.example_site("branch", "max()", "max(a, b)", line=23),
        ),
        subjects=("train.py:21", "train.py:22", "train.py:23"),
    ),
    Example(
        name="reads are SYN001",
        kind="quiet",
        case=sources.example_case(sources.example_site("host-read", "item", "x.item()")),
    ),
    Example(name="no source read", kind="lacks", case=Case()),
)
