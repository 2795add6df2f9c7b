"""The workers may run on fewer CPUs than the process that started them.

What it means
    A library that binds its threads when it is imported may leave a narrow CPU mask behind, and every worker inherits
    it. All of them then share one or few CPUs, however many there are.
Why it costs
    About ten times slower in one report (https://github.com/pytorch/pytorch/issues/101850).
How we know
    tune-loader reads the affinity mask in each worker and in the process.
Fix
    os.sched_setaffinity(0, range(os.cpu_count())) in worker_init_fn; import torch before numpy; unset the OpenMP
    binding variables (OMP_PROC_BIND, GOMP_CPU_AFFINITY, KMP_AFFINITY).
When to ignore
    The workers are bound on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, WorkerCounts
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, trial

RULE = Rule(code="LDR009", name="worker-affinity-narrow", severity="error", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    masks = [
        counts.cpus for item in study.trials if item.workers for counts in item.per_worker if counts.cpus is not None
    ]
    if not masks or min(masks) >= study.cpus:
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"workers may use {min(masks)} of the {study.cpus:g} CPUs that the process may use",
        evidence=(evidence(case, "loader.trials", f"{min(masks)} CPUs in a worker's mask", f"{study.cpus:g}"),),
        remedies=(
            Remedy(
                kind="code",
                text="in worker_init_fn: os.sched_setaffinity(0, range(os.cpu_count()))",
                risk="not where a launcher binds ranks to CPUs on purpose",
            ),
            Remedy(
                kind="env", text="unset OMP_PROC_BIND, GOMP_CPU_AFFINITY and KMP_AFFINITY; import torch before numpy"
            ),
        ),
        confidence="certain",
    )


def _case(cpus: int) -> Case:
    counts = (WorkerCounts(worker=0, batches=10, samples=100, cpus=cpus),)
    return case_of(trials=(trial(1, per_worker=counts),))


EXAMPLES = (
    Example(name="one CPU of eight", kind="fires", case=_case(1), subjects=("data.py:12",)),
    Example(name="all of them", kind="quiet", case=_case(8)),
    Example(name="no trial", kind="quiet", case=case_of()),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
