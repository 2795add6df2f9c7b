"""A forked worker waits for a lock that no thread of its own holds.

What it means
    The process had run native threads (GNU OpenMP, OpenCV) before it forked. The threads are not in the child, but the
    locks that they held are, and are never released there.
Why it costs
    The first batch never comes, with workers only, and maybe only for large images
    (https://github.com/pytorch/pytorch/issues/45198).
How we know
    In tune-loader a forked worker stayed at one row and slept in a futex, while the same loader gave batches without
    workers.
Fix
    cv2.setNumThreads(0) and OMP_NUM_THREADS=1 before the workers start; import cv2 in the worker; or
    multiprocessing_context="spawn" or "forkserver".
When to ignore
    The worker waits for a lock of the user's own; the stack in the finding shows it.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, LoaderFault, LoaderStudy, Remedy, Rule
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, trial, where

RULE = Rule(code="LDR013", name="fork-after-threads", severity="error", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    fault = locked(study)
    if fault is None:
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=fault.site or study.site,
        message=f"a forked worker waits for a lock{where(fault)}; without workers the loader works",
        evidence=(evidence(case, "loader.trials", f"sleeps in {fault.waits_in}", "a batch"),),
        remedies=(
            Remedy(
                kind="code", text="cv2.setNumThreads(0) before the loader is made, or import cv2 in the worker only"
            ),
            Remedy(kind="env", text="OMP_NUM_THREADS=1"),
            Remedy(kind="code", text='multiprocessing_context="forkserver" or "spawn"'),
        ),
        confidence="likely",
        symptoms=fault.stack[:5],
    )


def locked(study: LoaderStudy) -> LoaderFault | None:
    """A hang of a forked worker in a futex, where the loader gave batches without workers."""
    if study.start_method != "fork" or not any(item.rate for item in study.trials if item.workers == 0):
        return None
    for item in study.trials:
        fault = item.fault
        if fault is not None and fault.kind == "hang" and item.workers and (fault.waits_in or "").startswith("futex"):
            return fault
    return None


def _case(waits_in: str, rate: float | None = 100.0) -> Case:
    fault = LoaderFault(kind="hang", text="worker 0 has been at row 3 for 9 s", index=3, waits_in=waits_in)
    return case_of(trials=(trial(0, rate), trial(2, None, fault=fault)))


EXAMPLES = (
    Example(name="in a futex", kind="fires", case=_case("futex_wait_queue"), subjects=("data.py:12",)),
    Example(name="asleep", kind="quiet", case=_case("hrtimer_nanosleep")),
    Example(name="without workers, too", kind="quiet", case=_case("futex_wait_queue", rate=None)),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
