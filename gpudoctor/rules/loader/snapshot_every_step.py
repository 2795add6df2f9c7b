"""The state of the loader is saved at every batch, and it is large.

What it means
    StatefulDataLoader takes a snapshot of the dataset's state in each worker every snapshot_every_n_steps batches; the
    default is every one.
Why it costs
    The state is pickled and sent with each batch: 2 s became 10 ms an iteration in one report
    (https://github.com/meta-pytorch/data/issues/1317).
How we know
    tune-loader read the option, and pickled the dataset's state_dict once.
Fix
    snapshot_every_n_steps as large as the distance between two checkpoints.
When to ignore
    The state is small, or a checkpoint is written at every step.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, mib

RULE = Rule(code="LDR019", name="snapshot-every-step", severity="warning", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    every, size = study.preflight.snapshot_every, study.preflight.state_bytes
    if every is None or size is None or every > 1 or size < case.threshold(RULE.code, "state_bytes"):
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"the loader saves {mib(size)} of state with every batch",
        evidence=(evidence(case, "loader.preflight.snapshot_every", every, "the checkpoint interval"),),
        remedies=(
            Remedy(
                kind="code",
                text="snapshot_every_n_steps=N, N the number of steps between two checkpoints",
                risk="a loader that is resumed fetches up to N batches again",
            ),
        ),
        confidence="likely",
    )


EXAMPLES = (
    Example(
        name="10 MiB each step",
        kind="fires",
        case=case_of(preflight={"snapshot_every": 1, "state_bytes": 10 * 2**20}),
        subjects=("data.py:12",),
    ),
    Example(name="small", kind="quiet", case=case_of(preflight={"snapshot_every": 1, "state_bytes": 200})),
    Example(name="rarely", kind="quiet", case=case_of(preflight={"snapshot_every": 100, "state_bytes": 10 * 2**20})),
    Example(name="an ordinary loader", kind="quiet", case=case_of()),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
