"""Each loader worker runs a thread pool for all CPUs.

What it means
    torch sets its own OpenMP pool to one thread in a worker. OpenBLAS, MKL and OpenCV keep theirs at the number of
    CPUs: workers times CPUs threads then fight for the CPUs.
Why it costs
    Switching between them, and spinning while they wait: up to ten times slower
    (https://github.com/transferable-samplers/transferable-samplers/pull/12), 8.5 minutes became 4.5 in another
    report.
How we know
    In tune-loader other threads than the fetching one used CPU time while rows were fetched, and the pools of the
    workers have more threads, all together, than there are CPUs.
Fix
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 before the start, cv2.setNumThreads(0) in
    worker_init_fn; threadpoolctl.threadpool_limits(1) in worker_init_fn limits the workers alone.
When to ignore
    There are few workers and many CPUs, and the rows need the threads.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, LoaderStudy, Remedy, Rule, ThreadPool, Unchecked
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, real, trial

RULE = Rule(code="LCH006", name="cpu-thread-oversubscription", severity="warning", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    study = case.loader
    assert study is not None  # `needs`
    helpers, pools = study.preflight.helper_share, study.preflight.pools
    if helpers is None or not pools:
        yield Unchecked(reason="the CPU time of other threads while rows are fetched is unknown", subject=study.site)
        return
    pool = max(pools, key=lambda item: item.threads)
    workers = _workers(study)
    threads = workers * study.ranks * pool.threads
    if helpers < case.threshold(RULE.code, "helper_share") or pool.threads < 2 or threads <= study.cpus:
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"{workers} workers with {pool.threads} {pool.library} threads each, {threads} on {study.cpus:g} CPUs; "
        f"they use {helpers:.0%} of CPU time beside the fetching thread",
        evidence=tuple(
            evidence(case, "loader.preflight.pools", f"{item.library}: {item.threads} threads", "1 in a worker")
            for item in pools
            if item.threads > 1
        ),
        remedies=(
            Remedy(
                kind="env",
                text="OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1",
                risk="work on the CPU in the training process gets one thread, too",
            ),
            Remedy(kind="code", text="in worker_init_fn: threadpoolctl.threadpool_limits(1), cv2.setNumThreads(0)"),
        ),
        gain=_gain(study),
        confidence="likely",
    )


def _workers(study: LoaderStudy) -> int:
    """Of the loader as it is; where it has none, of the setting that is chosen."""
    chosen = study.choice.arguments.get("num_workers") if study.choice is not None else None
    own = study.loader.num_workers if study.present_known else 0
    return own or (chosen if isinstance(chosen, int) else 0) or 1


def _gain(study: LoaderStudy) -> Gain | None:
    """Measured where one-thread trials were made beside others."""
    limited = [item.rate or 0.0 for item in real(study) if item.one_thread]
    free = [item.rate or 0.0 for item in real(study) if not item.one_thread and item.purpose == "variant"]
    if not limited or not free:
        return None
    ratio = max(limited) / max(*free, 1e-9)
    if ratio <= 1:
        return None
    return Gain(low=1.0, high=round(ratio, 3), unit="x", basis="measured", source="the loader alone, in turn")


def _case(helpers: float | None, threads: int = 8, workers: int = 4) -> Case:
    return case_of(
        preflight={"helper_share": helpers, "pools": (ThreadPool(library="openblas", threads=threads),)},
        loader={"num_workers": workers},
        trials=(trial(4),),
    )


EXAMPLES = (
    Example(name="4 workers, 8 threads each, 8 CPUs", kind="fires", case=_case(0.8), subjects=("data.py:12",)),
    Example(name="the pool is never used", kind="quiet", case=_case(0.0)),
    Example(name="limited to one", kind="quiet", case=_case(0.8, threads=1)),
    Example(name="one worker, as many threads as CPUs", kind="quiet", case=_case(0.8, workers=1)),
    Example(name="no row was timed", kind="lacks", case=_case(None)),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
