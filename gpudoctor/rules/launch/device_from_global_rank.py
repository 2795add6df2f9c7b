"""The GPU is chosen by the global rank.

What it means
    The global rank counts through all nodes: on the second node of a job with 8 GPUs each it begins at 8, and there is
    no cuda:8. LOCAL_RANK counts within the node.
Why it costs
    "invalid device ordinal" or "Duplicate GPU detected" as soon as a second node joins
    (https://github.com/horovod/horovod/issues/3949). On one node nothing is seen.
How we know
    The source was read: the number in set_device, torch.device or .to() comes from torch.distributed.get_rank() or
    RANK, without a remainder by the number of devices.
Fix
    int(os.environ["LOCAL_RANK"]), which torchrun sets.
When to ignore
    Programs that only ever run on one node.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="LCH017", name="device-from-global-rank", severity="error", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "device-from-global-rank")):
        site = group[0]
        yield sources.source_finding(
            RULE,
            site,
            f"{site.operation} takes the global rank: on the second node there is no such GPU",
            (Remedy(kind="code", text='local_rank = int(os.environ["LOCAL_RANK"]), and the device from that'),),
            waits=False,
        )


EXAMPLES = (
    Example(
        name="set_device(dist.get_rank())",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "device-from-global-rank", "torch.cuda.set_device", "torch.cuda.set_device(rank)", hot=None
            )
        ),
        subjects=("train.py:21",),
    ),
    Example(name="LOCAL_RANK", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
