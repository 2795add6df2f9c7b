"""Copies between GPUs are faster inside groups than across them.

What it means
    The GPUs fall into groups that reach each other at one rate and everybody else at a lower one: cards below one
    switch or socket, or joined by NVLink.
Why it costs
    A process group that reaches over the edge runs at the lower rate: 21.8 instead of 26.3 GB/s on one machine
    (https://github.com/NVIDIA/nvbandwidth/issues/50).
How we know
    The measured matrix: every pair inside a group is faster than every pair across.
Fix
    Keep tensor-parallel and other talkative groups inside.
When to ignore
    One GPU per process group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import answering, evidence

RULE = Rule(code="BND009", name="peer-bandwidth-groups", severity="info", needs=("measurements",), since="0.1")

_METRICS = ("p2p_read", "p2p_write", "p2p_sum")
_FEWEST = 4


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if len(answering(case)) < _FEWEST and not rates.of(case, *_METRICS):
        return
    for metric in _METRICS:
        table = rates.by_pair(case, metric)
        names = sorted({name for pair in table for name in pair}, key=lambda name: int(name[4:]))
        if len(names) < _FEWEST or len(table) < len(names) * (len(names) - 1) // 2:
            continue
        groups = _groups(case, names, table)
        if groups:
            yield _finding(case, metric, groups, table)
        return
    yield Unchecked(reason="no whole matrix of copies between four GPUs or more was measured")


def _groups(case: Case, names: list[str], table: dict[tuple[str, str], float]) -> list[list[str]]:
    """Groups in which every pair is faster than every pair across; [] when there is no such division."""
    ordered = sorted(table.values())
    # The widest gap between neighbouring rates divides fast pairs from slow ones.
    gaps = [(high - low, low, high) for low, high in itertools.pairwise(ordered)]
    _, low, high = max(gaps)
    if low > case.threshold(RULE.code, "share") * high:
        return []
    groups: list[list[str]] = []
    for name in names:
        home = next((group for group in groups if table[_key(group[0], name)] >= high), None)
        if home is None:
            groups.append([name])
        else:
            home.append(name)
    inside = all(table[_key(a, b)] >= high for group in groups for a, b in itertools.combinations(group, 2))
    across = all(table[_key(a, b)] <= low for one, two in itertools.combinations(groups, 2) for a in one for b in two)
    return groups if inside and across and any(len(group) > 1 for group in groups) and len(groups) > 1 else []


def _key(a: str, b: str) -> tuple[str, str]:
    return (a, b) if int(a[4:]) < int(b[4:]) else (b, a)


def _finding(case: Case, metric: str, groups: list[list[str]], table: dict[tuple[str, str], float]) -> Finding:
    of = {name: place for place, group in enumerate(groups) for name in group}
    inside = [rate for (a, b), rate in table.items() if of[a] == of[b]]
    across = [rate for (a, b), rate in table.items() if of[a] != of[b]]
    words = "; ".join(", ".join(name[4:] for name in group) for group in groups)
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"copies between GPUs reach {rates.spread_text(inside)} GB/s inside the groups {words}, "
        f"{rates.spread_text(across)} across them",
        evidence=(evidence(case, f"measurements.{metric}", f"{len(table)} pairs in {len(groups)} groups"),),
        remedies=(
            Remedy(kind="config", text="keep talkative process groups (tensor parallel) inside one group of GPUs"),
        ),
        confidence="certain",
    )


def _case(inside: float, across: float, gpus: int = 4) -> Case:
    items = tuple(
        Measurement(
            metric="p2p_read", subject=f"gpu:{a}-gpu:{b}", value=inside if a // 2 == b // 2 else across, unit="GB/s"
        )
        for a in range(gpus)
        for b in range(gpus)
        if a != b
    )
    return Case(gpus=tuple(Gpu(index=i) for i in range(gpus)), measurements=items)


EXAMPLES = (
    Example(name="two switches", kind="fires", case=_case(26.3, 21.8), subjects=("host",)),
    Example(name="all alike", kind="quiet", case=_case(26.3, 26.2)),
    Example(
        name="two GPUs",
        kind="quiet",
        case=Case(
            gpus=(Gpu(index=0), Gpu(index=1)),
            measurements=(Measurement(metric="h2d", subject="gpu:0", value=26.0, unit="GB/s"),),
        ),
    ),
    Example(
        name="not measured",
        kind="lacks",
        case=Case(
            gpus=tuple(Gpu(index=i) for i in range(4)),
            measurements=(Measurement(metric="h2d", subject="gpu:0", value=26.0, unit="GB/s"),),
        ),
    ),
)
