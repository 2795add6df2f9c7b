"""torch.cuda.synchronize() without a device, in a program that uses several GPUs.

What it means
    The call waits for the current device only. Work on the other GPUs may still run when it returns.
Why it costs
    Nothing by itself. Times measured around it are too short, and data of the other GPU may be read too early.
How we know
    The source was read: several devices are written out (cuda:0, cuda:1), and the call names none. Documentation of
    torch.cuda.synchronize: the device is the current one when none is given.
Fix
    torch.cuda.synchronize(device) for each device that is meant, or events on the streams concerned.
When to ignore
    One process per GPU, where only the current device is used.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="SYN012", name="synchronize-one-device-only", severity="info", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for site in sources.sites(case, "synchronize-one-device"):
        yield sources.source_finding(
            RULE,
            site,
            f"torch.cuda.synchronize() waits for the current device only, and the program uses {site.detail}",
            (Remedy(kind="code", text="torch.cuda.synchronize(device) for each device that is meant"),),
            waits=False,
        )


EXAMPLES = (
    Example(
        name="two devices",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "synchronize-one-device",
                "torch.cuda.synchronize",
                "torch.cuda.synchronize()",
                hot=None,
                detail="cuda:0, cuda:1",
            )
        ),
        subjects=("train.py:21",),
    ),
    Example(name="one device", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
