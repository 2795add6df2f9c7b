"""Workers wait because batches have to come in order.

What it means
    Rows differ widely in cost. A worker that has finished waits until the slow batch before its own was taken, for the
    loader gives batches in the order of the sampler.
Why it costs
    1.2 to 1.6 times the rate in our trials with a heavy tail; up to 7.5 times is reported
    (https://github.com/pytorch/pytorch/pull/141833).
How we know
    tune-loader ran the same setting in and out of order, in turn.
Fix
    in_order=False, where the order of batches may depend on timing; or a larger prefetch_factor; or rows of similar
    cost in one batch (bucketing).
When to ignore
    The run must be reproducible batch by batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, LoaderStudy, Remedy, Rule
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, median_rate, real, trial

RULE = Rule(code="LDR008", name="head-of-line-blocking", severity="warning", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    ratio = _ratio(study)
    variation = study.preflight.row_variation or 0.0
    if ratio is None or ratio < case.threshold(RULE.code, "factor"):
        return
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=study.site,
        message=f"rows cost unevenly (variation {variation:.1f}), and batches out of order come {ratio:.2f}x as fast",
        evidence=(evidence(case, "loader.preflight.row_variation", f"{variation:.2f}", "below 0.5"),),
        remedies=(
            Remedy(
                kind="code",
                text="in_order=False",
                risk="the order of batches then depends on timing, so runs do not repeat",
                undo="in_order=True",
            ),
            Remedy(kind="code", text="a larger prefetch_factor, or rows of similar cost in one batch"),
        ),
        gain=Gain(low=1.0, high=round(ratio, 3), unit="x", basis="measured", source="the loader alone, in turn"),
        confidence="likely",
    )


def _ratio(study: LoaderStudy) -> float | None:
    """Rate out of order over rate in order, at the same workers and prefetch; None when it was not tried."""
    free = [item for item in real(study) if not item.in_order]
    if not free:
        return None
    key = (free[0].workers, free[0].prefetch, free[0].whole_batch)
    bound = [
        item
        for item in real(study)
        if item.in_order and (item.workers, item.prefetch, item.whole_batch) == key and item.purpose == "variant"
    ]
    if len(free) < 2 or len(bound) < 2:
        return None
    return median_rate(free) / max(median_rate(bound), 1e-9)


def _case(rate: float) -> Case:
    pairs = [(trial(4, 1000.0, purpose="variant"), trial(4, rate, purpose="variant", in_order=False))] * 2
    return case_of(trials=tuple(item for pair in pairs for item in pair), preflight={"row_variation": 2.1})


EXAMPLES = (
    Example(name="half as fast again", kind="fires", case=_case(1500.0), subjects=("data.py:12",)),
    Example(name="no gain", kind="quiet", case=_case(1020.0)),
    Example(name="not tried", kind="quiet", case=case_of(trials=(trial(4),))),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
