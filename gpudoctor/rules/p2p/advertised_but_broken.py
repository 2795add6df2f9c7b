"""A peer copy hung or delivered other data, although the driver grants the access.

What it means
    The driver says that one GPU may reach the memory of the other, and it is not so: the copy did not end, or the
    destination held something else afterwards.
Why it costs
    Collectives hang, or worse, go on with wrong numbers
    (https://github.com/tinygrad/open-gpu-kernel-modules/issues/45).
How we know
    `gpudoctor bench-pcie` wrote a pattern on one GPU, copied it, and read it back by the other GPU; a copy that does
    not end is given up with the process that made it.
Fix
    Update the driver or return to the stock one. NCCL_P2P_DISABLE=1 keeps jobs alive meanwhile.
When to ignore
    Never. Where ACS redirection is on, that is named instead (P2P006).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Measurement, Remedy, Rule, Unchecked
from gpudoctor.model.facts import Acs
from gpudoctor.rules import rates
from gpudoctor.rules.acs import redirecting
from gpudoctor.rules.evidence import answering

RULE = Rule(code="P2P004", name="p2p-advertised-but-broken", severity="error", needs=("gpus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if len(answering(case)) < 2:
        return
    checks = rates.of(case, "p2p_check")
    if not checks:
        yield Unchecked(reason="no peer copy was checked at its destination (`gpudoctor bench-pcie` does)")
        return
    broken: dict[tuple[str, str], list[Measurement]] = {}
    for item in checks:
        pair = rates.pair_of(item.subject)
        if pair is not None and item.value == 0:
            broken.setdefault(pair, []).append(item)
    if broken and redirecting(case):
        yield Unchecked(reason="peer copies fail, and ACS redirection explains it (P2P006)")
        return
    for pair, items in broken.items():
        why = next((item.notes[0] for item in items if item.notes), "the data did not arrive")
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=rates.name(pair),
            message=f"the driver grants peer access, but it is broken: {why}",
            evidence=tuple(rates.shown(case, item, "1 passed") for item in items),
            remedies=(
                Remedy(kind="env", text="NCCL_P2P_DISABLE=1", undo="unset it once the check passes"),
                Remedy(kind="config", text="another driver version; the stock driver in place of a patched one"),
            ),
            confidence="certain",
        )


def _case(value: float | None, *, acs: tuple[Acs, ...] = ()) -> Case:
    items = (
        ()
        if value is None
        else (
            Measurement(
                metric="p2p_check", subject="gpu:1-gpu:0", value=value, unit="passed", notes=("the copy did not end",)
            ),
        )
    )
    return Case(gpus=(Gpu(index=0), Gpu(index=1)), measurements=items, acs=acs)


EXAMPLES = (
    Example(name="the copy hung", kind="fires", case=_case(0.0), subjects=("gpu:0-gpu:1",)),
    Example(name="passed", kind="quiet", case=_case(1.0)),
    Example(name="one GPU", kind="quiet", case=Case(gpus=(Gpu(index=0),))),
    Example(name="not tried", kind="lacks", case=_case(None)),
    Example(name="redirected by ACS", kind="lacks", case=_case(0.0, acs=(Acs(on=("ReqRedir",)),))),
)
