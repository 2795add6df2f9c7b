"""Six live data sets: what tune-loader picks, against a grid of every setting with three repeats.

    python tests/bench/bench_loaders.py [--budget 60] [--window 2] [NAME...]

Prints a Markdown table. The grid's figures are medians of three trials, which are made in turn; a host on which they
differ by more than 30 % gives no verdict on a pick.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from gpudoctor.collect import collect_case
from gpudoctor.model import LoaderStudy
from gpudoctor.observe.candidates import Candidates
from gpudoctor.tune.loader import targets
from gpudoctor.tune.loader.live import LiveRunner, read_preflight
from gpudoctor.tune.loader.search import Setting
from gpudoctor.tune.loader.session import Options, Session

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "loader" / "six.py"
NAMES = ("sleeping", "heavy_tail", "jpeg", "pure_python", "large", "tiny")
REPEATS = 3
BUSY = 0.30


def search(name: str, budget_s: float) -> tuple[LoaderStudy, float]:
    target = targets.parse([f"{SCRIPT}:{name}"], cwd=Path.cwd())
    session = Session(options=Options(target=target, cwd=Path.cwd(), budget_s=budget_s), machine=collect_case())
    begun = time.monotonic()
    study = session.run()
    assert study is not None
    return study, time.monotonic() - begun


def grid(name: str, settings: list[Setting], window_s: float) -> tuple[dict[Setting, list[float]], float]:
    target = targets.parse([f"{SCRIPT}:{name}"], cwd=Path.cwd())
    begun = time.monotonic()
    rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
    with Candidates([target.command], cwd=Path.cwd()) as candidates:
        hello = candidates.connect(120)[0]
        runner = LiveRunner(candidates, deadline=time.monotonic() + 3600, start_method=hello["start_method"])
        look = {"do": "preflight", "seconds": 3.0, "deadline_s": 60.0, "hang_s": 20.0}
        runner.preflight = read_preflight(candidates.ask(look, deadline_s=70)[0])
        runner.batch_size = hello["loader"]["batch_size"]
        runner.expected_batches = hello["loader"]["length"]
        runner.decide_window(max(setting.workers for setting in settings), 2)
        for _ in range(REPEATS):
            for setting in random.sample(settings, len(settings)):
                trial = runner.trial(setting, window_s, "explore")
                if trial.rate:
                    rates[setting].append(trial.rate)
    return rates, time.monotonic() - begun


def row(name: str, budget_s: float, window_s: float) -> str:
    study, searched_s = search(name, budget_s)
    uneven = (study.preflight.row_variation or 0) > 0.5
    prefetches = (2, 4, 8) if uneven else (2,)
    settings = [Setting(workers=0)]
    settings += [Setting(workers=w, prefetch=p) for w in range(1, study.most_workers + 1) for p in prefetches]
    assert study.choice is not None
    arguments = study.choice.arguments
    workers, prefetch = int(arguments["num_workers"] or 0), int(arguments.get("prefetch_factor") or 2)
    in_order = arguments.get("in_order") is not False
    picked = Setting(workers=workers, prefetch=prefetch if workers else 2, in_order=in_order or not workers)
    # a pick that the grid does not know (batches in any order) is measured beside it
    rates, grid_s = grid(name, settings if picked in settings else [*settings, picked], window_s)
    medians = {setting: statistics.median(found) for setting, found in rates.items() if found}
    best = max((setting for setting in medians if setting in settings), key=lambda setting: medians[setting])
    spread = statistics.median(max(found) / min(found) - 1 for found in rates.values() if len(found) > 1)
    loss = f"{1 - medians[picked] / medians[best]:.0%}" if picked in medians else "no rate"
    if spread > BUSY:
        loss += " (host busy)"
    shown = f"{workers}" + (f", prefetch {prefetch}" if workers and prefetch != 2 else "")
    shown += ", whole batches" if study.choice.whole_batch else ""
    shown += "" if in_order else ", any order"
    at = f"{best.workers}" + (f", prefetch {best.prefetch}" if best.workers and best.prefetch != 2 else "")
    foreign = f"{study.foreign_cpu:.1f}" if study.foreign_cpu is not None else "?"
    return (
        f"| {name} | {study.verdict} | {shown} | {at} | {loss} | {spread:.0%} | {searched_s:.0f} | {grid_s:.0f} "
        f"| {study.limit} | {foreign} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--window", type=float, default=2.0)
    arguments = parser.parse_args()
    print("| data | verdict | pick | grid's best | loss of the pick | spread of a cell | search s | grid s "
          "| limit | CPUs used by others |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in arguments.names:
        print(row(name, arguments.budget, arguments.window), flush=True)


if __name__ == "__main__":
    main()
