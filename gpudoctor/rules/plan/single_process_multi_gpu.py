"""One process drives several GPUs.

What it means
    nn.DataParallel copies the model to all GPUs in each step and gathers the outputs on one, with one Python thread
    each. Layers that are put on several GPUs by hand leave all but one GPU waiting.
Why it costs
    110 to 101 s from DataParallel to DistributedDataParallel on two GPUs in one report
    (https://github.com/huggingface/transformers/issues/9371); layers by hand use one GPU at a time.
How we know
    The source was read: nn.DataParallel wraps a model, or __init__ of a module puts layers on several devices and
    forward moves data between them, without torch.distributed.pipelining.
Fix
    One process per GPU (torchrun) with DistributedDataParallel; a model that does not fit:
    torch.distributed.pipelining, or fully_shard.
When to ignore
    Inference with one model that does not fit on one GPU, where a pipeline is not worth it.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="PLN017", name="single-process-multi-gpu", severity="warning", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for site in sources.sites(case, "data-parallel", "layers-by-hand"):
        if site.kind == "data-parallel":
            message, fix = "nn.DataParallel copies the model in each step", "torchrun with DistributedDataParallel"
        else:
            message = f"layers of {site.operation} stand on several GPUs ({site.detail}), of which one works at a time"
            fix = (
                "torch.distributed.pipelining, or fully_shard; DistributedDataParallel where the model fits on one GPU"
            )
        yield sources.source_finding(RULE, site, message, (Remedy(kind="code", text=fix),), waits=False)


EXAMPLES = (
    Example(
        name="DataParallel, and layers by hand",
        kind="fires",
        case=sources.example_case(
            sources.example_site("data-parallel", "nn.DataParallel", "nn.DataParallel(model)", hot=None),
            sources.example_site(
                "layers-by-hand", "Net", "class Net(nn.Module):", line=3, hot=None, detail="cuda:0, cuda:1 in __init__"
            ),
        ),
        subjects=("train.py:21", "train.py:3"),
    ),
    Example(name="one GPU", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
