"""All workers draw the same random numbers.

What it means
    Fork copies the state of a random generator. torch seeds its own, Python's and (from 1.9 on) numpy's global one in
    each worker; a generator that is stored in the dataset stays a copy, and each worker draws the same from it.
Why it costs
    The same augmentation for as many rows as there are workers: quality, not speed
    (https://github.com/pytorch/pytorch/issues/5059).
How we know
    tune-loader found a generator in the dataset that fetching advances, and its state is the same in every worker; or
    torch is older than 1.9 and rows draw from numpy.
Fix
    Seed it in worker_init_fn: numpy.random.default_rng(torch.initial_seed() % 2**32).
When to ignore
    The numbers are meant to be equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, LoaderStudy, Remedy, Rule, WorkerCounts
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, trial

RULE = Rule(code="LDR018", name="numpy-seed-shared", severity="warning", needs=("loader",), since="0.2")
_SEEDED_FROM = (1, 9)


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    states = _equal_states(study)
    if states is None:
        return
    stored = study.preflight.generators
    old = _is_old(study.torch) and bool(study.preflight.draws_random)
    if not stored and not old:
        return
    what = f"the generator {', '.join(stored)} of the dataset" if stored else "numpy's global generator"
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"{what} has the same state in all {states} workers",
        evidence=(evidence(case, "loader.trials", "equal states", "a seed of its own in each worker"),),
        remedies=(
            Remedy(
                kind="code",
                text="in worker_init_fn: get_worker_info().dataset.rng = "
                "numpy.random.default_rng(torch.initial_seed() % 2**32)",
            ),
        ),
        confidence="certain",
    )


def _equal_states(study: LoaderStudy) -> int | None:
    """How many workers of one trial had equal generators; None when they differ or there were not two."""
    for item in study.trials:
        states = [counts.random_state for counts in item.per_worker if counts.random_state]
        if item.workers > 1 and len(states) > 1 and len(set(states)) == 1:
            return len(states)
    return None


def _is_old(torch: str | None) -> bool:
    found = re.match(r"(\d+)\.(\d+)", torch or "")
    return found is not None and (int(found[1]), int(found[2])) < _SEEDED_FROM


def _case(*states: str, stored: bool = True, torch: str = "2.4.0") -> Case:
    counts = tuple(
        WorkerCounts(worker=number, batches=10, samples=100, random_state=state) for number, state in enumerate(states)
    )
    return case_of(
        trials=(trial(len(states), per_worker=counts),),
        preflight={"generators": ("rng",) if stored else (), "draws_random": not stored},
        torch=torch,
    )


EXAMPLES = (
    Example(name="a stored generator", kind="fires", case=_case("a", "a"), subjects=("data.py:12",)),
    Example(
        name="an old torch", kind="fires", case=_case("a", "a", stored=False, torch="1.8.1"), subjects=("data.py:12",)
    ),
    Example(name="seeded in each worker", kind="quiet", case=_case("a", "b")),
    Example(name="the global one, torch 2", kind="quiet", case=_case("a", "a", stored=False)),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
