"""FullyShardedDataParallel wraps the whole model as one unit.

What it means
    FSDP gathers and frees parameters unit by unit. Without a wrap policy the whole model is one unit: all parameters
    are gathered at once, and no communication overlaps with computation.
Why it costs
    The memory that sharding was to save is needed in each forward pass, and the gather is waited for
    (https://docs.pytorch.org/docs/stable/notes/fsdp.html).
How we know
    The source was read: FullyShardedDataParallel gets no auto_wrap_policy, and it is the only one around this model.
Fix
    auto_wrap_policy per block of the model, or fully_shard(block) for each block and then the whole.
When to ignore
    Blocks are wrapped by hand in code that was not read.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="PLN018", name="fsdp-without-wrap-policy", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    found = sources.sites(case, "fsdp-one-unit")
    for site in found:
        file = site.site.rpartition(":")[0]
        if sum(other.site.rpartition(":")[0] == file for other in found) > 1:
            continue  # several: blocks are wrapped one by one
        yield sources.source_finding(
            RULE,
            site,
            "FSDP without a wrap policy: the whole model is one unit, gathered at once",
            (Remedy(kind="code", text="auto_wrap_policy=..., or fully_shard(block) for each block"),),
            waits=False,
        )


EXAMPLES = (
    Example(
        name="no policy",
        kind="fires",
        case=sources.example_case(
            sources.example_site("fsdp-one-unit", "FullyShardedDataParallel", "FSDP(model)", hot=None)
        ),
        subjects=("train.py:21",),
    ),
    Example(
        name="blocks wrapped one by one",
        kind="quiet",
        case=sources.example_case(
            sources.example_site("fsdp-one-unit", "FullyShardedDataParallel", "FSDP(block)", hot=None),
            sources.example_site("fsdp-one-unit", "FullyShardedDataParallel", "FSDP(model)", line=22, hot=None),
        ),
    ),
    Example(name="no source read", kind="lacks", case=Case()),
)
