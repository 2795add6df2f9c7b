"""The size of a result depends on values that are on the GPU, in every step.

What it means
    x[mask], nonzero, unique, masked_select, torch.where with one argument and repeat_interleave without output_size
    give tensors whose size only the GPU knows. The host must wait for it before it can go on.
Why it costs
    151 to 128 ms a step in one report with hundreds of such reads, 6 % of tokens/s in another
    (https://github.com/vllm-project/vllm/pull/16436); nothing where the GPU is 90 % busy.
How we know
    The source was read: the tensor is on a GPU, and the line runs once a step. `x[mask] = 0` with a Python number is a
    masked_fill and waits for nothing; torch.where with three arguments and integer repeats do neither.
Fix
    Keep the size: torch.where(mask, x, 0), multiply by the mask, masked_fill, weights in a loss, output_size=,
    counts that stay tensors.
When to ignore
    The selection throws most of the work away, so that the smaller tensor pays for the wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="SYN004", name="data-dependent-shape", severity="warning", needs=("source",), since="0.2")

_FIXES = {
    "mask index": "torch.where(mask, x, 0), x * mask or a weighted loss: the size stays, nothing is read",
    "masked assignment of a tensor": "x = torch.where(mask, values, x); a plain number is assigned without a wait",
    "nonzero": "work with the mask itself; count with mask.sum(), which stays on the device",
    "argwhere": "work with the mask itself; count with mask.sum(), which stays on the device",
    "one-argument where": "torch.where(mask, x, other) keeps the size",
    "masked_select": "torch.where(mask, x, 0), or x * mask",
    "repeat_interleave": "repeat_interleave(..., output_size=N) with N known on the host",
    "bincount": "torch.zeros(N).scatter_add_(0, index, ones) with N known on the host",
    "one_hot without num_classes": "one_hot(x, num_classes=N)",
}


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "dynamic-shape")):
        site = group[0]
        what = ", ".join(dict.fromkeys(other.operation for other in group))
        fix = _FIXES.get(site.operation, "an operation whose result has a size that is known on the host")
        yield sources.source_finding(
            RULE,
            site,
            f"{what}: the size of the result is read from the GPU in each step, and the host waits",
            (Remedy(kind="code", text=fix),),
        )


EXAMPLES = (
    Example(
        name="mask, nonzero, repeat_interleave",
        kind="fires",
        case=sources.example_case(
            sources.example_site("dynamic-shape", "mask index", "logits[pos]"),
            sources.example_site("dynamic-shape", "nonzero", "(x > 0).nonzero()", line=22),
            sources.example_site("dynamic-shape", "repeat_interleave", "x.repeat_interleave(n)", line=23),
        ),
        subjects=("train.py:21", "train.py:22", "train.py:23"),
    ),
    Example(name="sizes are known", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
