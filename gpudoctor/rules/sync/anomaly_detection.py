"""Anomaly detection is on while the program trains.

What it means
    torch.autograd.set_detect_anomaly(True), or detect_anomaly=True of a Trainer, keeps a stack trace for each operation
    and looks for NaN in each gradient on the host. It is a tool to find a NaN once.
Why it costs
    1.7 to 2.5 times the time: 289 to 170 s after it was removed in one report
    (https://github.com/stanfordnlp/pyvene/pull/98).
How we know
    The source was read: it is switched on with a constant, under no debug flag, in a program that trains on a GPU.
Fix
    Remove it, or set it from a command line option that is off.
When to ignore
    While looking for a NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="SYN008", name="anomaly-detection-left-on", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for site in sources.sites(case, "anomaly-detection"):
        yield sources.source_finding(
            RULE,
            site,
            f"{site.operation} is on in a program that trains: each backward pass is checked on the host",
            (Remedy(kind="code", text="remove it, or switch it on with an option for debugging"),),
            waits=False,
        )


EXAMPLES = (
    Example(
        name="switched on for good",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "anomaly-detection", "torch.autograd.set_detect_anomaly", "set_detect_anomaly(True)", hot=None
            )
        ),
        subjects=("train.py:21",),
    ),
    Example(name="not used", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
