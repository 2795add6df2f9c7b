"""What trials of a loader may be called: change, keep, or no verdict where the host is busy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpudoctor.model import LoaderTrial
from gpudoctor.tune.loader import judge
from gpudoctor.tune.loader.search import Outcome, Ratio, Setting

OWN, BEST = Setting(workers=2), Setting(workers=4)


def session(
    ratio: Ratio,
    *,
    noise: float = 0.03,
    foreign: float | None = 0.0,
    best: Setting = BEST,
    variation: float | None = None,
) -> Any:
    """As much of a search's end as the judgement reads: 4 CPUs, the user's own setting is OWN."""
    rows = Outcome(
        best=best,
        rates={OWN: 100.0, best: 100.0 * ratio.value},
        repeats={OWN: [100.0, 100.0], best: [100.0 * ratio.value] * 2},
        over_present=ratio,
        noise=noise,
    )
    trials = [
        LoaderTrial(workers=each.workers, prefetch=2, purpose="confirm", rate=rate, samples=400, foreign_cpu=foreign)
        for each, rate in rows.rates.items()
    ]
    loader = SimpleNamespace(
        num_workers=2, prefetch_factor=None, persistent_workers=False, pin_memory=False, in_order=True, length=100,
        batch_size=8,
    )  # fmt: skip
    preflight = SimpleNamespace(fault=None, row_variation=variation)
    return SimpleNamespace(
        preflight=preflight, rows=rows, whole=None, notes=[], ceiling=None, pin=None,
        hello={"cpus": 4}, runner=SimpleNamespace(trials=trials), loader=lambda: loader, present=lambda: OWN,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "options", "word"),
    [
        ((1.15, 1.08, 1.22), {}, "change"),
        ((1.01, 0.97, 1.05), {}, "keep"),
        ((1.00, 1.00, 1.00), {"best": OWN}, "keep"),
        ((1.15, 1.08, 1.22), {"noise": 0.4}, "no verdict"),
        ((1.15, 1.08, 1.22), {"foreign": 1.0}, "change"),  # a quarter of the CPUs
        ((1.15, 1.08, 1.22), {"foreign": 2.0}, "no verdict"),
        ((1.01, 0.97, 1.05), {"foreign": 2.0}, "no verdict"),
        ((3.00, 2.70, 3.30), {"foreign": 2.0, "noise": 0.4}, "change"),  # not even a busy host fakes this
        ((1.15, 1.08, 1.22), {"foreign": None}, "change"),
    ],
)
def test_a_busy_host_gives_no_verdict_unless_the_gain_is_clear(
    ratio: tuple[float, float, float], options: dict[str, Any], word: str
) -> None:
    value, low, high = ratio
    found = judge.verdict(session(Ratio(value=value, low=low, high=high), **options))
    assert found.word == word, found.reason
    if word == "no verdict":
        assert found.reason.startswith("host busy")
        assert found.gain is None
        assert found.choice is not None
        assert found.choice.arguments == {"num_workers": 2}
    if (options.get("foreign") or 0) > 1 and word == "no verdict":
        assert "other processes keep 2.0 CPUs busy" in found.reason


def test_an_interval_that_tells_nothing_is_laid_to_what_makes_it_wide() -> None:
    """Rows of very different cost (a deviation of three times their mean), or too few trials; not to a busy host."""
    wide = Ratio(value=1.3, low=0.9, high=1.8)
    few = judge.verdict(session(wide))
    assert (few.word, few.gain) == ("no verdict", None)
    assert few.reason == "too few trials fitted into the budget: give a larger --budget"
    uneven = judge.verdict(session(wide, noise=0.2, variation=3.0))
    assert uneven.word == "no verdict"
    assert uneven.reason.startswith("rows cost so differently that one trial differs from the next by 20%")
    assert judge.verdict(session(Ratio(value=1.4, low=1.2, high=1.6), noise=0.2, variation=3.0)).word == "change"
    assert judge.verdict(session(wide, noise=0.2, variation=0.5)).reason.startswith("host busy")
