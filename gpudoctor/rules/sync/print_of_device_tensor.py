"""A tensor on the GPU is printed or formatted in every step.

What it means
    print(t), f"{t}", str(t), "%s" % t and logging calls copy the values to the host, which waits for all queued work.
    Printing a whole tensor launches several small kernels and copies on top.
Why it costs
    As any read of a value: the GPU runs empty at the line. A few dozen waits for one printed tensor (own run on an
    H200: 64 in 8 steps).
How we know
    The source was read: the printed value comes from something on a GPU, and the line runs once a step. Shapes, dtypes
    and devices are known on the host and are not meant.
Fix
    Print every N steps. Between them add up on the device, without reading.
When to ignore
    Prints while debugging. Guards with a remainder (`step % N`) keep the rule quiet already.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="SYN003", name="print-of-device-tensor", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "print")):
        site = group[0]
        read = site.operation in ("item", "float", "int", "bool")
        how = f"a value is read with {site.operation}() to be printed" if read else "a tensor on the GPU is printed"
        yield sources.source_finding(
            RULE,
            site,
            f"{how} in each step: the host waits",
            (Remedy(kind="code", text="print every N steps (`if step % 100 == 0:`)", risk="fewer lines are printed"),),
        )


EXAMPLES = (
    Example(
        name="print of a tensor, and of a value that is read for it",
        kind="fires",
        case=sources.example_case(
            sources.example_site("print", "print", "print(loss)"),
            sources.example_site("print", "item", "loss.item()", line=22),
        ),
        subjects=("train.py:21", "train.py:22"),
    ),
    Example(name="nothing printed", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
