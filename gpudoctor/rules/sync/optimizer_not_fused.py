"""The optimizer updates each parameter with kernels of its own (foreach=False).

What it means
    On a GPU torch groups the updates of all parameters by itself. foreach=False switches that off: a few small kernels
    for each parameter are launched one after the other.
Why it costs
    Launching takes longer than the work: an update of 22 ms took 8 ms with fused=True, 3 % of the step
    (https://github.com/deepmodeling/deepmd-kit/pull/4463).
How we know
    The source was read: foreach=False is given as a constant, fused=True is not, and the program uses a GPU.
Fix
    fused=True where the optimizer has it, else leave foreach alone.
When to ignore
    Grouping needs memory for a copy of the gradients; foreach=False is right where that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="SYN009", name="optimizer-not-fused", severity="info", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for site in sources.sites(case, "single-tensor-optimizer"):
        yield sources.source_finding(
            RULE,
            site,
            f"{site.operation} with foreach=False: each parameter is updated by kernels of its own",
            (
                Remedy(
                    kind="code",
                    text="fused=True",
                    risk="the last bits of the parameters may differ",
                    undo="foreach=False",
                ),
            ),
            waits=False,
        )


EXAMPLES = (
    Example(
        name="foreach=False",
        kind="fires",
        case=sources.example_case(
            sources.example_site("single-tensor-optimizer", "Adam", "Adam(model.parameters(), foreach=False)", hot=None)
        ),
        subjects=("train.py:21",),
    ),
    Example(name="no such argument", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
