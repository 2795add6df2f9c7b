"""Candidate changes of a watched command, as groups for the search."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gpudoctor import checkup, rules
from gpudoctor.model import Case, Change, ChangeClass, Trial, WatchedLoader
from gpudoctor.prescribe import changes as proposing
from gpudoctor.source import later_use
from gpudoctor.tune import loader_study
from gpudoctor.tune import proof as proving
from gpudoctor.tune.runner import CommandRunner
from gpudoctor.tune.search import Group

# What a step may still wait for its loader before changing the loader is pointless; the same 2 % as everywhere.
POINTLESS_WAIT = 0.02
QUEUES = 8  # a window of so many times the batches that are prepared ahead is much longer than they last
_OTHER_ORDER = {"persistent_workers", "in_order"}  # arguments with which rows or draws come in another order


def candidates(
    case: Case,
    runner: CommandRunner,
    *,
    select: Sequence[str],
    ignore: Sequence[str],
    allow: frozenset[ChangeClass],
) -> tuple[list[Group], tuple[Change, ...], list[str]]:
    """(groups to try, advice, notes). What is not allowed or has no edit becomes advice; what is done for a rule that
    select or ignore leave out is not proposed."""
    envelope = checkup.examine(case, command="tune", select=select, ignore=ignore, fail_on="never")
    assert envelope.case is not None
    files = {site.rpartition(":")[0] for site in _sites(case)}
    texts, notes = {}, []
    for file in sorted(files):
        path = runner.cwd / file
        if not Path(file).is_absolute() and path.suffix == ".py" and path.is_file():
            try:
                texts[file] = runner.text(file)
            except (OSError, UnicodeDecodeError) as error:
                notes.append(f"{file} cannot be read as UTF-8 text and is not changed: {error}")

    def safe(text: str, name: str, line: int) -> tuple[bool, str | None]:
        uses = later_use.later_uses(text, name, line)
        return uses.safe, uses.reason

    tried, advice = [], []
    every = proposing.propose(envelope.case, envelope.findings, texts=texts, safe=safe, allow=allow)
    proposed = [change for change in every if rules.leaves(change.rule, select=select, ignore=ignore)]
    left_out = {change.id: change for change in every if change not in proposed}
    for change in proposed:
        if not change.can_be_tried:
            advice.append(change)
        elif change.change_class not in allow:
            advice.append(dataclasses.replace(change, reason=f"not tried: needs --allow {change.change_class}"))
        elif without := [left_out[other] for other in change.needs if other in left_out]:
            why = f"not tried: it pays only together with what is done for {without[0].rule}, which was left out"
            advice.append(dataclasses.replace(change, reason=why))
        elif missing := [other for other in proposed if other.id in change.needs and other.change_class not in allow]:
            why = (
                f"not tried: it pays only together with {missing[0].id}, which needs --allow {missing[0].change_class}"
            )
            advice.append(dataclasses.replace(change, reason=why))
        else:
            tried.append(change)
    loader = _busiest_loader(case)
    groups = []
    for mechanism in proposing.MECHANISMS:
        members = [change for change in with_the_stall(tried) if change.mechanism == mechanism]
        if members and (group := _group(mechanism, members, case, loader, allow)).options:
            groups.append(group)
    return groups, tuple(advice), notes


def workers_to_choose(groups: Sequence[Group]) -> str | None:
    """The loader's site, where several numbers of workers would be tried and fetching whole batches is not on offer."""
    if any(group.mechanism == "fetch" for group in groups):
        return None
    several = (group for group in groups if len(group.options) > 1)
    changes = (change for group in several for change in group.options[0])
    return next((change.edits[0].site for change in changes if _touches(change, {"num_workers"})), None)


def with_the_stall(changes: Sequence[Change]) -> list[Change]:
    """Copies that wait keep the whole stall that the other waits of a loop make, and before those are gone they hide
    behind them: tried earlier, pinning would seem to add nothing. So it joins the other waits, where there are any."""
    if not any(change.mechanism == "sync" for change in changes):
        return list(changes)
    split = [part for change in changes for part in _split(change)]
    joins = {part.id for part in split if _touches(part, {"pin_memory"}) or _moves(part)}
    return [dataclasses.replace(part, mechanism="sync") if part.id in joins else part for part in split]


def _sites(case: Case) -> Iterable[str]:
    for record in case.watched.records if case.watched else ():
        yield from (loader.site for loader in record.loaders)
        yield from (copy.site for copy in record.copies)
        yield from (sync.site for sync in record.syncs)


def _busiest_loader(case: Case) -> WatchedLoader | None:
    loaders = [loader for record in (case.watched.records if case.watched else ()) for loader in record.loaders]
    return max(loaders, key=lambda loader: loader.wait_ms, default=None)


def _group(
    mechanism: str,
    members: Sequence[Change],
    case: Case,
    loader: WatchedLoader | None,
    allow: frozenset[ChangeClass],
) -> Group:
    if all(change.environment for change in members):  # values of one setting
        return Group(mechanism=mechanism, options=tuple((change,) for change in members))
    split = [part for change in members for part in _split(change)]
    studied = _as_studied(split, case, allow)
    split = split if studied is None else studied
    units: list[frozenset[str]] = []
    copies = frozenset(change.id for change in split if _touches(change, {"pin_memory"}) or _moves(change))
    workers = frozenset(change.id for change in split if _touches(change, {"num_workers", "persistent_workers"}))
    if copies:
        units.append(copies)
    units += [frozenset({change.id}) for change in split if change.id not in copies | workers]
    persistent = frozenset(change.id for change in split if _touches(change, {"persistent_workers"}))
    if persistent and loader is not None and loader.num_workers > 0:
        units.append(persistent)
        workers -= persistent
    if workers:
        units.append(workers)
    options = [tuple(split)] if split else []
    beyond = False
    if loader is not None and studied is None:
        options, beyond = _worker_options(split, case, loader)
    waits = mechanism in ("fetch", "loader")
    queue = loader.num_workers * (loader.prefetch_factor or 0) if loader is not None else 0
    return Group(
        mechanism=mechanism,
        options=tuple(options),
        units=tuple(units),
        beyond=beyond,
        pointless=functools.partial(_pointless, queue=queue) if waits and not copies else None,
    )


def _split(change: Change) -> list[Change]:
    """One change an argument, so that leave-one-out can drop each on its own."""
    if not change.edits:
        return [change]
    edit = change.edits[0]
    if edit.kind != "loader-arguments" or len(change.edits) > 1 or len(edit.arguments) < 2:
        return [change]
    return list(_one_each(change, edit.arguments))


def _one_each(change: Change, arguments: Mapping[str, int | bool | None]) -> Iterator[Change]:
    """The change once for each of these arguments of its loader."""
    for number, (name, value) in enumerate(arguments.items(), start=1):
        edit = dataclasses.replace(change.edits[0], arguments={name: value})
        yield dataclasses.replace(change, id=f"{change.id}.{number}", title=f"{name}={value}", edits=(edit,))


def _touches(change: Change, names: set[str]) -> bool:
    return any(edit.kind == "loader-arguments" and names & set(edit.arguments) for edit in change.edits)


def _moves(change: Change) -> bool:
    return any(edit.kind == "non-blocking" for edit in change.edits)


def _as_studied(split: Sequence[Change], case: Case, allow: frozenset[ChangeClass]) -> list[Change] | None:
    """The loader arguments that the search over the loader itself chose, in place of the proposed workers; None where
    it was not made or cannot tell."""
    target = next((change for change in split if _touches(change, {"num_workers"})), None)
    found = loader_study.chosen(case.loader, target.edits[0].site) if target is not None else None
    if target is None or found is None:
        return None
    result: list[Change] = []
    for change in split:
        if change is target:
            parts = [
                dataclasses.replace(part, change_class="stochastic") if _touches(part, _OTHER_ORDER) else part
                for part in _one_each(target, found)
            ]
            result += [part for part in parts if part.change_class in allow]
        elif not _touches(change, set(found)):
            result.append(change)
    return result


def _worker_options(
    split: Sequence[Change], case: Case, loader: WatchedLoader
) -> tuple[list[tuple[Change, ...]], bool]:
    """The group with the proposed worker count, twice that, and the most that is allowed; the smallest first. And
    whether all of them are more than now."""
    record = next(item for item in case.watched.records if loader in item.loaders) if case.watched else None
    target = next((change for change in split if _touches(change, {"num_workers"})), None)
    if target is None or record is None or case.watched is None:
        return [tuple(split)], False
    proposed = target.edits[0].arguments["num_workers"]
    limit = proposing.loader_limit(case, record, len(proving.training_records(case.watched)))
    if not isinstance(proposed, int) or proposed < 1:
        return [tuple(split)], False
    counts = sorted({proposed, min(limit, proposed * 2), max(limit, proposed)} - {loader.num_workers})
    options = []
    for count in counts:
        edit = dataclasses.replace(target.edits[0], arguments={**target.edits[0].arguments, "num_workers": count})
        variant = dataclasses.replace(target, title=f"num_workers={count}", edits=(edit, *target.edits[1:]))
        options.append(tuple(variant if change is target else change for change in split))
    return options or [tuple(split)], bool(counts) and min(counts) > loader.num_workers


def _pointless(trial: Trial, *, queue: int) -> str | None:
    """queue: batches that are prepared ahead; only a window much longer than it shows what the steps really wait."""
    if trial.rate is None or trial.loader_wait_ms is None:
        return None
    share = trial.loader_wait_ms * trial.rate / 1000
    if trial.steady_wait is not None and trial.steps >= QUEUES * max(1, queue):
        share = min(share, trial.steady_wait)
    if share >= POINTLESS_WAIT:
        return None
    return f"not tried: a step waits {share:.1%} of its time for the loader, so little is left to win"
