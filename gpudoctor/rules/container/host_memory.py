"""The kernel killed a loader worker because memory ran out.

What it means
    Workers, their rows and the batches in flight did not fit into the memory of the host or of the container.
Why it costs
    The job dies after minutes or epochs (https://github.com/open-mmlab/mmrotate/issues/501).
How we know
    The log says that a worker was killed by signal: Killed, which is how the kernel's OOM killer ends a process; or, in
    tune-loader, the control group counted an OOM kill during a trial.
Fix
    Fewer workers or a smaller prefetch_factor; arrays in place of Python objects in the dataset; more memory.
When to ignore
    Somebody sent SIGKILL: the kernel log (dmesg) names the processes that it killed itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, LoaderFault, Remedy, Rule
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, faults

RULE = Rule(code="CTR009", name="host-memory-exhausted", severity="error", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    for fault in [item for item in faults(study) if item.kind == "oom"][:1]:
        counted = bool(study.trials)
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=fault.site or study.site,
            message=f"out of host memory, the kernel killed a loader worker: {fault.text}",
            evidence=(
                evidence(case, "loader", "an OOM kill was counted" if counted else fault.text, "no worker killed"),
            ),
            remedies=(
                Remedy(kind="code", text="fewer workers, a smaller prefetch_factor"),
                Remedy(kind="code", text="arrays or memory maps in place of Python objects and caches in the dataset"),
                Remedy(kind="measure", text="dmesg | grep -i 'killed process' names what the kernel killed"),
            ),
            confidence="certain" if counted else "likely",
        )


_KILLED = LoaderFault(kind="oom", text="DataLoader worker (pid 7) is killed by signal: Killed.", site="log:3")

EXAMPLES = (
    Example(name="killed by signal: Killed", kind="fires", case=case_of(faults=(_KILLED,)), subjects=("log:3",)),
    Example(
        name="exited unexpectedly",
        kind="quiet",
        case=case_of(faults=(LoaderFault(kind="killed", text="exited unexpectedly"),)),
    ),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
