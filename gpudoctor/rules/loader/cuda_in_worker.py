"""Code that runs in loader workers touches the GPU.

What it means
    Fetching or collating moves data to CUDA. A forked worker cannot use the CUDA context of its parent, so it fails; a
    spawned one makes a context of its own, which takes hundreds of MiB of GPU memory each.
Why it costs
    num_workers above 0 does not work, and without workers the GPU waits for every batch
    (https://github.com/pytorch/pytorch/issues/77159).
How we know
    The lines are named from the source of the dataset and of the collate function; or a worker failed with torch's
    message about CUDA in a forked process. Or the source was read: .cuda(), .to("cuda") or device="cuda" is reached
    from __getitem__, __iter__ or collate_fn of a loader with workers.
Fix
    Return CPU tensors, and move the batch in the training loop: pin_memory=True and .to(device, non_blocking=True).
When to ignore
    The loader never has workers, and the data are on the GPU as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, LoaderFault, Remedy, Rule
from gpudoctor.rules import loader_sources, sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, faults

RULE = Rule(code="LDR011", name="cuda-in-worker", severity="error", needs=loader_sources.NEEDS, since="0.2")


def check(case: Case) -> Iterator[Finding]:
    yield from loader_sources.cuda_in_worker(RULE, case)
    study = case.loader
    if study is None:
        return
    failed = [fault for fault in faults(study) if fault.kind == "cuda"]
    lines = study.preflight.device_lines or tuple(fault.site for fault in failed if fault.site)
    if not failed and not lines:
        return
    told = f": {failed[0].text}" if failed else ""
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=lines[0] if lines else study.site,
        message=f"loader workers reach a GPU at {', '.join(lines) or 'a line that is not known'}{told}",
        evidence=tuple(
            evidence(case, "loader.preflight.device_lines", line, "CPU tensors only")
            for line in lines or ("not known",)
        ),
        remedies=(
            Remedy(kind="code", text="return CPU tensors; .to(device, non_blocking=True) in the loop, pin_memory=True"),
        ),
        confidence="certain" if failed else "likely",
    )


EXAMPLES = (
    Example(
        name="a line in __getitem__",
        kind="fires",
        case=case_of(preflight={"device_lines": ("data.py:7",)}),
        subjects=("data.py:7",),
    ),
    Example(
        name="torch's message",
        kind="fires",
        case=case_of(preflight={"fault": LoaderFault(kind="cuda", text="Cannot re-initialize CUDA")}),
        subjects=("data.py:12",),
    ),
    Example(name="CPU tensors", kind="quiet", case=case_of()),
    Example(
        name="in the source",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "cuda-in-worker", "device use in a worker", "x.cuda()", hot=None, detail="num_workers=2"
            )
        ),
        subjects=("train.py:21",),
    ),
    Example(name="not in the source", kind="quiet", case=sources.example_case()),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
