"""non_blocking=True is asked for, but the memory is not pinned.

What it means
    Only from pinned (page-locked) memory can a copy run while the host goes on. From other memory the driver copies
    into a pinned buffer of its own first, and the flag gains next to nothing.
Why it costs
    8.6 % throughput and 1.8 to 0.07 ms of waiting for a batch after pinning in the loader
    (https://github.com/metatensor/metatrain/pull/1273).
How we know
    The source was read: the copy is in a step loop with non_blocking=True, and the loader or the tensor that it copies
    from is not pinned.
Fix
    pin_memory=True in the DataLoader (with workers), or a pinned buffer that is made once. Do not call .pin_memory() in
    the loop.
When to ignore
    Scripts on the CPU. When pinning was tried and the step did not get faster.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="CPY002", name="non-blocking-without-pinning", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "copy-to-device")):
        site = next((one for one in group if one.non_blocking is True and one.pinned is False), None)
        if site is None:
            continue
        source = f"the loader at {site.from_loader} does not pin" if site.from_loader else "its source is not pinned"
        fix = (
            f"pin_memory=True in the DataLoader at {site.from_loader}"
            if site.from_loader
            else "a pinned source, made once"
        )
        yield sources.source_finding(
            RULE, site, f"non_blocking=True without effect: {source}", (Remedy(kind="code", text=fix),), waits=False
        )


EXAMPLES = (
    Example(
        name="the loader does not pin",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "copy-to-device",
                "to",
                "x.to(device, non_blocking=True)",
                non_blocking=True,
                pinned=False,
                from_loader="train.py:12",
            )
        ),
        subjects=("train.py:21",),
    ),
    Example(
        name="a blocking copy is CPY001",
        kind="quiet",
        case=sources.example_case(
            sources.example_site("copy-to-device", "to", "x.to(device)", non_blocking=False, pinned=False)
        ),
    ),
    Example(name="no source read", kind="lacks", case=Case()),
)
