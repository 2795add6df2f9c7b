"""Loader workers run out of file descriptors.

What it means
    With the sharing strategy file_descriptor each tensor that a worker hands over is an open file in the training
    process, until it is freed. The soft limit is often 1024.
Why it costs
    "Too many open files" or "received 0 items of ancdata", after some batches
    (https://github.com/pytorch/pytorch/issues/973).
How we know
    A trial of tune-loader failed with that message; or the tensors in flight, (workers x prefetch_factor + 2) x
    tensors of a batch, exceed the limit of this process.
Fix
    ulimit -n 65536 before the start; torch.multiprocessing.set_sharing_strategy("file_system"); copy the batches that
    are kept; fewer, larger tensors in a batch.
When to ignore
    Batches hold few tensors and none is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Limits, LoaderFault, Remedy, Rule
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, faults, trial

RULE = Rule(code="CTR008", name="open-files-limit", severity="error", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    failed = [fault for fault in faults(study) if fault.kind == "files"]
    loader, tensors, limit = study.loader, study.preflight.batch_tensors, case.limits.nofile
    need = (loader.num_workers * (loader.prefetch_factor or 2) + 2) * (tensors or 0) if loader.num_workers else 0
    if failed:
        message = failed[0].text
    elif limit is not None and need > limit:
        message = f"{need} tensors in flight are as many open files, and the limit is {limit}"
    else:
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=message,
        evidence=(evidence(case, "limits.nofile", limit if limit is not None else "unknown", "65536"),),
        remedies=(
            Remedy(kind="command", text="ulimit -n 65536", undo="a new shell has the former limit"),
            Remedy(kind="code", text='torch.multiprocessing.set_sharing_strategy("file_system")'),
            Remedy(kind="code", text="copy the batches that are kept; fewer, larger tensors in a batch"),
        ),
        confidence="certain" if failed else "likely",
    )


def _case(tensors: int, nofile: int) -> Case:
    made = case_of(preflight={"batch_tensors": tensors})
    return Case(loader=made.loader, limits=Limits(nofile=nofile))


EXAMPLES = (
    Example(name="200 tensors a batch, limit 1024", kind="fires", case=_case(200, 1024), subjects=("data.py:12",)),
    Example(
        name="torch's message",
        kind="fires",
        case=case_of(trials=(trial(2, None, fault=LoaderFault(kind="files", text="Too many open files")),)),
        subjects=("data.py:12",),
    ),
    Example(name="two tensors a batch", kind="quiet", case=_case(2, 1024)),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
