"""find_unused_parameters=True.

What it means
    DistributedDataParallel walks the graph after each forward pass to find parameters that got no gradient. It is
    needed only where some parameters take no part in some steps.
Why it costs
    About 5 % of throughput in one report (https://github.com/mosaicml/composer/issues/9).
How we know
    The source was read: it is given as a constant. Whether parameters are unused only a run can tell, so that this is
    no more than a hint.
Fix
    Leave it out; torch tells at the first step when it is needed. static_graph=True where the same parameters are
    unused in each step.
When to ignore
    Parameters really are unused in some steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="PLN014", name="find-unused-parameters-on", severity="info", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for site in sources.sites(case, "find-unused-parameters"):
        yield sources.source_finding(
            RULE,
            site,
            "the graph is searched for unused parameters after each forward pass",
            (Remedy(kind="code", text="leave it out, or static_graph=True", undo="find_unused_parameters=True"),),
            waits=False,
        )


EXAMPLES = (
    Example(
        name="given as True",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "find-unused-parameters",
                "find_unused_parameters=True",
                "DDP(net, find_unused_parameters=True)",
                hot=None,
            )
        ),
        subjects=("train.py:21",),
    ),
    Example(name="not given", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
