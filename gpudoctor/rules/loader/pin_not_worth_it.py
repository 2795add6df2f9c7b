"""Pinned batches do not reach the GPU faster.

What it means
    pin_memory=True copies each batch once more, into page-locked memory. For small batches, or where the copy hides
    behind the step anyway, that buys nothing.
Why it costs
    A thread, locked memory, and in one report a slower training (https://github.com/allenai/allennlp/issues/4670).
How we know
    tune-loader ran the loader with and without pinning in turn, with the copy to the GPU and the step's time.
Fix
    Leave pin_memory off here; look at the step's time, not at the time to fetch a batch.
When to ignore
    The link to the GPU is shared with offloading or with other ranks, which a trial alone does not show.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of

RULE = Rule(code="LDR004", name="pin-memory-not-worth-it", severity="info", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    study = case.loader
    assert study is not None  # `needs`
    if study.pin_gain is None:
        yield Unchecked(reason="pinning was not tried: no GPU was in use", subject=study.site)
    elif study.pin_gain < case.threshold(RULE.code, "gain"):
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=study.site,
            message=f"pinned batches give {study.pin_gain:.2f}x of the rate without, the copy to the GPU included",
            evidence=(evidence(case, "loader.pin_gain", f"{study.pin_gain:.2f}x", "more than 1.02x"),),
            remedies=(Remedy(kind="code", text="leave pin_memory off", undo="pin_memory=True"),),
            confidence="likely",
        )


EXAMPLES = (
    Example(name="slower with it", kind="fires", case=case_of(pin_gain=0.95), subjects=("data.py:12",)),
    Example(name="faster with it", kind="quiet", case=case_of(pin_gain=1.2)),
    Example(name="no GPU", kind="lacks", case=case_of()),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
