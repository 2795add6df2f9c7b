"""The search of `tune-loader` inside `tune`: one run of the command, stopped at its loader, in place of a whole trial
for each number of workers. It says which loader settings a trial of the command is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Case, LoaderStudy
from gpudoctor.tune import proof as proving
from gpudoctor.tune.loader.session import Options, Session
from gpudoctor.tune.loader.targets import Target
from gpudoctor.tune.runner import CommandRunner, Interrupted

BUDGET_SHARE = 0.1  # of what is left: more than two or three whole trials it must not cost
LEAST_S = 15.0  # a search in less tells little
MOST_S = 60.0
SLOW_START, START_S = 3.0, 15.0  # the start may take so many times as long as it did, and some seconds more


def search_s(case: Case, left_s: float) -> float | None:
    """Seconds for the search, or None where it would cost more than it tells.

    Ranks are left to trials of the whole command: their loaders share the CPUs in ways that only it shows.
    """
    records = proving.training_records(case.watched) if case.watched is not None else []
    if len(records) != 1:
        return None
    seconds = min(MOST_S, BUDGET_SHARE * left_s - (records[0].start_up_s or 0.0))
    return seconds if seconds >= LEAST_S else None


def study(
    case: Case, runner: CommandRunner, site: str, *, seconds: float, on_stage: Callable[[str], None]
) -> tuple[LoaderStudy | None, list[str]]:
    """The study of the loader made at `site`, and notes. Raises runner.Interrupted."""
    assert case.watched is not None
    start_up_s = max(record.start_up_s or 0.0 for record in proving.training_records(case.watched))
    target = Target(shown=" ".join(runner.command), command=tuple(runner.command), is_callable=False)
    patience_s = SLOW_START * start_up_s + START_S
    options = Options(target=target, cwd=runner.cwd, budget_s=seconds, site=site, start_up_s=patience_s)
    session = Session(options=options, machine=case, on_stage=lambda text: on_stage(f"loader, {text}"))
    try:
        found = session.run()
    except GpudoctorError as error:
        return None, [f"the loader's settings were not searched beforehand: {error}"]
    if session.interrupted:
        raise Interrupted
    return found, []


def chosen(found: LoaderStudy | None, site: str) -> Mapping[str, int | bool | None] | None:
    """The arguments that a trial of the command is worth: none where the search says keep; None when it cannot tell.

    Settings for whole batches do not count: they are right only where the trial of whole batches is kept.
    """
    if found is None or found.site != site or found.choice is None or found.choice.whole_batch:
        return None
    if found.verdict == "keep":
        return {}
    return found.choice.arguments if found.verdict == "change" else None
