"""Tensors are copied from the GPU to the host in every step.

What it means
    .cpu(), .to("cpu"), .numpy() and .tolist() wait until the GPU has done all queued work, then copy.
Why it costs
    20 % in one report; 434 to 13 ms for one loss that copied a matrix per level
    (https://github.com/mindee/doctr/pull/2141).
How we know
    The source was read: the tensor is on a GPU, and the line runs once a step, or several times inside one. Or the
    command was watched: the line copies to the host in about every step, and waits for a noticeable share of it.
Fix
    Do it on the device (torch.multinomial, topk, sort). Where the host needs the values: stack them and copy once a
    step, or collect on the device and copy after the loop.
When to ignore
    The host decides what happens next (an environment that runs on the CPU, a solver without a GPU version): then one
    copy a step is needed, but only one.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, CopySite, Example, Finding, Remedy, Rule, Step, Unchecked, Watched, WatchRecord
from gpudoctor.rules import sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound_of_waits, copy_symptom, per_step, records, spent, worst, worth

RULE = Rule(code="CPY003", name="device-to-host-every-step", severity="warning", needs=sources.NEEDS, since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.watched is not None and not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
        return
    often = case.threshold(RULE.code, "calls_per_step")
    found = [
        (copy, spent(record, copy))
        for record in records(case)
        for copy in record.copies
        if copy.kind == "d2h" and per_step(record, copy.calls_in_steps) >= often
    ]
    for copy, price in worst(found):
        if price.share >= case.threshold(RULE.code, "wait_share"):
            yield _finding(case, copy, price)
    for group in sources.by_line(sources.sites(case, "copy-to-host")):
        site = group[0]
        yield sources.source_finding(
            RULE,
            site,
            f".{site.operation}() copies from the GPU to the host in each step, and the host waits",
            (
                Remedy(kind="code", text="stay on the device, or collect there and copy once after the loop"),
                Remedy(kind="code", text="several copies a step: stack them into one"),
            ),
        )


def _finding(case: Case, copy: CopySite, price: Cost) -> Finding:
    severity, but = worth(case, price, RULE.severity, case.threshold(RULE.code, "wait_share"))
    rate = per_step(price.record, copy.calls_in_steps)
    size = copy.bytes / max(1, copy.calls) / 1e6
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=severity,
        subject=copy.site,
        message=(
            f"{copy.function}() copies from the GPU to the host {rate:.1f} times a step ({size:.2g} MB each) and waits"
            f" {a_step(price)}{but}"
        ),
        evidence=(evidence(case, "watched", f"{copy.function}: {copy.calls} copies to the host", "one every N steps"),),
        remedies=(
            Remedy(kind="code", text="stay on the device, or collect there and copy once after the loop"),
            Remedy(kind="code", text="several copies a step: stack them into one"),
        ),
        gain=bound_of_waits(case, price),
        confidence="likely",
        symptoms=(copy_symptom(price.record, copy),),
    )


def _case(*, kind: str = "d2h", in_steps: int = 100, waited_ms: float = 2.0, steps: int = 100) -> Case:
    copy = CopySite(
        site="train.py:60",
        function="cpu",
        kind="d2h" if kind == "d2h" else "h2d",
        calls=100,
        bytes=100 * 2**20,
        calls_in_steps=in_steps,
        waited_ms=waited_ms * 100,
    )
    record = WatchRecord(pid=1, cuda=True, steps=(Step(wall_ms=20, copy_wait_ms=waited_ms),) * steps, copies=(copy,))
    return Case(watched=Watched(command=("python", "train.py"), cwd="", records=(record,)))


EXAMPLES = (
    Example(
        name="cpu() and tolist()",
        kind="fires",
        case=sources.example_case(
            sources.example_site("copy-to-host", "cpu", "probs.cpu()"),
            sources.example_site("copy-to-host", "tolist", "scores.tolist()", line=22),
        ),
        subjects=("train.py:21", "train.py:22"),
    ),
    Example(name="watched: 2 of 20 ms", kind="fires", case=_case(), subjects=("train.py:60",)),
    Example(name="watched: every tenth step", kind="quiet", case=_case(in_steps=10)),
    Example(name="watched: no wait", kind="quiet", case=_case(waited_ms=0.1)),
    Example(name="watched: to the GPU is CPY001", kind="quiet", case=_case(kind="h2d")),
    Example(name="no step seen", kind="lacks", case=_case(steps=0)),
    Example(name="no copy", kind="quiet", case=sources.example_case()),
    Example(name="nothing watched, no source read", kind="lacks", case=Case()),
)
