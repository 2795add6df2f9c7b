"""One GPU copies clearly slower than the others of this machine.

What it means
    Equal cards in equal slots agree closely. One that stays behind has a narrower or older link, a shared uplink, a far
    memory node, or is another card. The odd one out needs no table of what is usual.
Why it costs
    Collectives wait for it, and jobs on it load slower: 3.9 against 50 GB/s in one report
    (https://github.com/local-inference-lab/rtx6kpro/blob/e2c2b9577c938525d99a4ff62ba4a8ecc47a9990/hardware/pcie-bandwidth.md).
How we know
    Rates of one metric over all GPUs: one lies below 0.8 of the median, or, on machines whose cards agree within noise,
    clearly outside of that noise and by more than 3 %. Of copies between GPUs, the best partner of each GPU counts.
Fix
    Compare slot, link width and uplink of that GPU with the others; change cards between slots: does the fault move?
When to ignore
    It is a smaller model, or hangs on a slot that is meant to be narrower.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gain, Gpu, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates
from gpudoctor.rules.evidence import answering, evidence

RULE = Rule(
    code="BND003", name="one-device-slower-than-peers", severity="warning", needs=("measurements",), since="0.1"
)

_PAIRS = ("p2p_write", "p2p_read", "p2p_staged", "p2p_sum", "p2p_staged_sum")
_FEWEST = 3


def check(case: Case) -> Iterator[Finding | Unchecked]:
    compared = False
    said: dict[str, Finding] = {}
    for metric, table in _tables(case):
        if len(table) < _FEWEST:
            continue
        compared = True
        for name, (value, median) in _slow(case, table).items():
            if name not in said or value / median < _share(said[name]):
                said[name] = _finding(case, name, metric, value, median)
    if not compared and len(answering(case)) > 1:
        yield Unchecked(reason="no copies of three GPUs or more can be compared")
    yield from said.values()


def _tables(case: Case) -> Iterator[tuple[str, dict[str, float]]]:
    """Rates by GPU, of each metric and among GPUs of one name."""
    names = {f"gpu:{gpu.index}": gpu.name for gpu in case.gpus}
    for metric in (*rates.PINNED, *_PAIRS):
        table = _by_gpu(case, metric)
        for model in dict.fromkeys(names.get(name) for name in table):
            yield metric, {name: rate for name, rate in table.items() if names.get(name) == model}


def _by_gpu(case: Case, metric: str) -> dict[str, float]:
    """The rate of each GPU; of pairs the best that each GPU reaches with any other, whichever way."""
    table: dict[str, float] = {}
    for item in rates.of(case, metric):
        pair = rates.pair_of(item.subject)
        for name in pair or (item.subject,):
            table[name] = max(table.get(name, 0.0), item.value) if pair else item.value
    return table


def _slow(case: Case, table: dict[str, float]) -> dict[str, tuple[float, float]]:
    found = {}
    for name, value in table.items():
        others = [rate for other, rate in table.items() if other != name]
        median = statistics.median(others)
        scatter = 1.4826 * statistics.median(abs(rate - median) for rate in others)
        agree = min(others) >= case.threshold(RULE.code, "server_share") * median
        far = value < case.threshold(RULE.code, "share") * median
        clear = (
            len(others) >= _FEWEST
            and agree
            and median - value > max(case.threshold(RULE.code, "noise_factor") * scatter, 0.05 * median)
        )
        if far or clear:
            found[name] = (value, median)
    # More than a third below the median is no odd one out: the machine has two kinds of slots.
    return found if len(found) <= len(table) / 3 else {}


def _finding(case: Case, name: str, metric: str, value: float, median: float) -> Finding:
    local = _by_gpu(case, "d2d")
    smaller = name in local and len(local) > _FEWEST and local[name] < 0.6 * statistics.median(local.values())
    what = "copies" if metric in rates.PINNED else "reaches its best partner at"
    message = f"this GPU {what} {value:.3g} GB/s ({metric}), the others {median:.3g}"
    if smaller:
        message += "; its own memory is slower too, it may be a smaller card"
    items = [item for item in rates.of(case, metric) if name in (rates.pair_of(item.subject) or (item.subject,))]
    facts = tuple(rates.shown(case, item, f"{median:.4g} GB/s") for item in items[:8])
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=name,
        message=message,
        evidence=facts or (evidence(case, f"measurements.{metric}", f"{value:.4g} GB/s", f"{median:.4g} GB/s"),),
        remedies=(
            Remedy(kind="measure", text="compare link width, uplink and NUMA node of this GPU: gpudoctor topo"),
            Remedy(kind="hardware", text="change this card with another: the fault stays with the slot or moves"),
        ),
        gain=Gain(
            low=1.0, high=median / value, unit="x", basis="measured", source="the median of the others; copies only"
        ),
        confidence="likely",
    )


def _share(finding: Finding) -> float:
    return 1 / finding.gain.high if finding.gain else 1.0


def _case(*values: float, names: tuple[str, ...] = (), metric: str = "h2d") -> Case:
    gpus = tuple(Gpu(index=i, name=names[i] if names else None) for i in range(len(values)))
    items = tuple(
        Measurement(metric=metric, subject=f"gpu:{i}", value=value, unit="GB/s") for i, value in enumerate(values)
    )
    return Case(gpus=gpus, measurements=items)


EXAMPLES = (
    Example(name="half the rate", kind="fires", case=_case(26.3, 26.4, 13.1, 26.3), subjects=("gpu:2",)),
    Example(
        name="7 % below seven that agree",
        kind="fires",
        case=_case(55.4, 55.3, 55.4, 55.5, 51.6, 55.4, 55.3, 55.4),
        subjects=("gpu:4",),
    ),
    Example(name="workstation scatter", kind="quiet", case=_case(25.5, 24.3, 23.9, 26.3, 26.3, 26.4, 26.1, 26.3)),
    Example(name="two kinds of slots", kind="quiet", case=_case(26.3, 26.4, 13.1, 13.1)),
    Example(
        name="another model",
        kind="quiet",
        case=_case(26.3, 26.4, 6.3, 26.2, names=("RTX 4090", "RTX 4090", "T400", "RTX 4090")),
    ),
    Example(name="two GPUs", kind="lacks", case=_case(26.3, 13.1)),
)
