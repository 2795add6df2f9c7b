"""The dataset holds open files when its workers are forked.

What it means
    All workers inherit one file description, with one position: what one reads moves the others. HDF5, zip and LMDB
    handles keep state besides. A dataset that opens lazily gets there too, as soon as one row is read in the parent.
Why it costs
    Rows are wrong without any error: about a third of them were right in our trial with a shared position
    (https://github.com/pytorch/pytorch/issues/11929).
How we know
    tune-loader looked through the attributes of the dataset, a few levels deep, at the moment when the loader would
    start its workers. Or the source was read: __init__ of the dataset keeps an open file that __getitem__ reads, and
    the loader has workers.
Fix
    Open in the worker: in worker_init_fn, or at the first row of each process (compare os.getpid()); never read a row
    in the process that starts the workers.
When to ignore
    The handle is never read from, or the loader never has workers.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule
from gpudoctor.rules import loader_sources, sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of

RULE = Rule(code="LDR012", name="handle-opened-before-fork", severity="error", needs=loader_sources.NEEDS, since="0.2")


def check(case: Case) -> Iterator[Finding]:
    yield from loader_sources.handle_before_fork(RULE, case)
    study = case.loader
    if study is None:
        return
    handles = study.preflight.handles
    if not handles or study.start_method != "fork":
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"the dataset holds {', '.join(handles[:5])} before its workers are forked: they share its position",
        evidence=tuple(
            evidence(case, "loader.preflight.handles", handle, "opened in each worker") for handle in handles
        ),
        remedies=(
            Remedy(kind="code", text="open it in worker_init_fn, or at the first row of each process (os.getpid())"),
            Remedy(kind="code", text="read no row in the process that starts the workers"),
        ),
        confidence="likely",
    )


EXAMPLES = (
    Example(
        name="an HDF5 file",
        kind="fires",
        case=case_of(preflight={"handles": ("file: h5py.File",)}),
        subjects=("data.py:12",),
    ),
    Example(name="none", kind="quiet", case=case_of()),
    Example(
        name="spawned workers get none",
        kind="quiet",
        case=case_of(start_method="spawn", preflight={"handles": ("file: open file",)}),
    ),
    Example(
        name="in the source",
        kind="fires",
        case=sources.example_case(
            sources.example_site("handle-before-fork", "h5py.File", "h5py.File(path)", hot=None, detail="num_workers=4")
        ),
        subjects=("train.py:21",),
    ),
    Example(name="not in the source", kind="quiet", case=sources.example_case()),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
