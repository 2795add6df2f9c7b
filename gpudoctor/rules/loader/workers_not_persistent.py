"""The workers start anew each epoch, and that takes a noticeable part of it.

What it means
    Without persistent_workers the DataLoader ends its workers after the last batch of an epoch and starts new ones
    for the next. Spawned workers import torch and unpickle the dataset each time.
Why it costs
    The first batch of each epoch is waited for: epochs of 7 minutes became 35 s in one report
    (https://github.com/open-mmlab/mmhuman3d/pull/233); nothing was gained with fork and a small dataset in another.
How we know
    tune-loader timed the first batch of its trials and the rate after it: the start takes more than the share of an
    epoch below, and more than the seconds below. Or the source was read: num_workers is above 0, persistent_workers is
    not set, and the loop over the loader stands in a loop over epochs.
Fix
    persistent_workers=True. The workers of a validation loader then stay as well and keep their memory.
When to ignore
    There is a single epoch, or the dataset changes between epochs and the workers must see it.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, LoaderStudy, Remedy, Rule
from gpudoctor.rules import loader_sources, sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, median_rate, median_start_s, real, trial

RULE = Rule(code="LDR002", name="workers-not-persistent", severity="warning", needs=loader_sources.NEEDS, since="0.2")


def check(case: Case) -> Iterator[Finding]:
    yield from loader_sources.restarted_workers(RULE, case)
    study = case.loader
    if study is None:
        return
    loader = study.loader
    found = _start(study)
    if not study.present_known or loader.persistent_workers or not loader.num_workers or found is None:
        return
    start_s, epoch_s = found
    share = start_s / (start_s + epoch_s)
    if start_s < case.threshold(RULE.code, "start_s") or share < case.threshold(RULE.code, "share"):
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"{loader.num_workers} workers ({study.start_method}) start again each epoch: {start_s:.1f} s to the "
        f"first batch, {epoch_s:.1f} s for all {loader.length} batches",
        evidence=(evidence(case, "loader", f"{start_s:.1f} s to the first batch", "once"),),
        remedies=(
            Remedy(
                kind="code",
                text="persistent_workers=True",
                risk="random numbers differ from the second epoch on; workers keep their memory",
                undo="persistent_workers=False",
            ),
            Remedy(kind="code", text="fork or forkserver in place of spawn, and a dataset that is small to pickle"),
        ),
        gain=Gain(
            low=1.0,
            high=round(1 / max(0.01, 1 - share), 3),
            unit="x",
            basis="measured",
            source=f"upper bound: the start takes {share:.0%} of an epoch",
        ),
        confidence="certain",
    )


def _start(study: LoaderStudy) -> tuple[float, float] | None:
    """Seconds to the first batch, and of the rest of an epoch, with the workers of the loader as it is."""
    loader = study.loader
    if not loader.length or not loader.batch_size:
        return None
    trials = [item for item in real(study) if item.workers == loader.num_workers and item.first_batch_s]
    if not trials:
        return None
    return median_start_s(trials), loader.length * loader.batch_size / max(median_rate(trials), 1e-9)


EXAMPLES = (
    Example(
        name="spawn, 5 s for an epoch of 1 s",
        kind="fires",
        case=case_of(start_method="spawn", trials=(trial(4, first_batch_s=5.0),)),
        subjects=("data.py:12",),
    ),
    Example(name="fork, 0.1 s", kind="quiet", case=case_of(trials=(trial(4, first_batch_s=0.1),))),
    Example(name="a long epoch", kind="quiet", case=case_of(trials=(trial(4, rate=10.0, first_batch_s=5.0),))),
    Example(
        name="they persist",
        kind="quiet",
        case=case_of(trials=(trial(4, first_batch_s=5.0),), loader={"persistent_workers": True}),
    ),
    Example(name="no workers", kind="quiet", case=case_of(trials=(trial(0),), loader={"num_workers": 0})),
    Example(
        name="in the source: two workers, epochs",
        kind="fires",
        case=sources.example_case(
            loaders=(
                sources.example_loader(
                    persistent_workers=False, epochs="for epoch in range(3)", epochs_site="train.py:13"
                ),
            )
        ),
        subjects=("train.py:12",),
    ),
    Example(
        name="in the source: one epoch, no workers, persistent, not known",
        kind="quiet",
        case=sources.example_case(
            loaders=(
                sources.example_loader(persistent_workers=False),
                sources.example_loader(num_workers=0, persistent_workers=False, epochs="for e in range(3)"),
                sources.example_loader(persistent_workers=True, epochs="for e in range(3)"),
                sources.example_loader(persistent_workers=None, epochs="for e in range(3)"),
            )
        ),
    ),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
