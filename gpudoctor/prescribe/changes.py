"""Candidates: what was watched becomes changes that can be tried, and advice where a patch is not possible.

The rate at which a change pays is not guessed here: tune measures it. What is proposed is only gated by time that
was seen to be lost, so that a well-set script yields nothing. Mechanisms: fetch, loader, sync (with the copies that
would keep the stall), copy, ddp, allocator, and with numerics allowed optimizer, matmul, convolution, channels-last,
autocast, gradients, threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpudoctor.model import Case, Change, Edit, Finding
from gpudoctor.prescribe.copy_changes import copy_changes, made_changes
from gpudoctor.prescribe.loader_changes import fetch_changes, loader_changes
from gpudoctor.prescribe.patch import apply_edits
from gpudoctor.prescribe.process_changes import ALLOCATOR, THREADS, allocator_changes, thread_changes
from gpudoctor.prescribe.proposal import Proposal, Safe
from gpudoctor.prescribe.rank_changes import rank_changes
from gpudoctor.prescribe.step_changes import step_changes
from gpudoctor.prescribe.sync_changes import sync_changes
from gpudoctor.prescribe.workers import loader_limit, worker_ladder

__all__ = ["MECHANISMS", "loader_limit", "propose", "worker_ladder"]

# In the order in which they are tried: what feeds the loop, what stalls it, what makes a step faster.
MECHANISMS = (
    "fetch",
    "loader",
    "sync",
    "copy",
    "ddp",
    ALLOCATOR,
    "optimizer",
    "matmul",
    "convolution",
    "channels-last",
    "autocast",
    "gradients",
    THREADS,
)


def propose(
    case: Case,
    findings: Sequence[Finding],
    *,
    texts: Mapping[str, str],
    safe: Safe,
    allow: Collection[str] = (),
) -> tuple[Change, ...]:
    """Changes for the watched command, the most time first; advice has no edits and says why in `reason`.

    texts: source by the file part of the sites. safe: whether every later use of a summed or collected name stays
    right (source.later_uses); a reason beside True says that the change cannot pay. allow: classes that may be kept:
    "numerics" is offered only then, and random tensors are drawn on the device only with "stochastic".
    """
    if case.watched is None:
        return ()
    proposal = Proposal(case, case.watched.records, {finding.subject for finding in findings}, texts, safe)
    groups: dict[str, list[Change]] = {}
    for change in _changes(proposal, allow):
        groups.setdefault(change.mechanism, []).append(change)
    ordered = sorted(groups, key=lambda name: -proposal.lost.get(name, 0.0))
    changes = _composed(proposal, [change for name in ordered for change in groups[name]])
    ids = {change.site: f"C{number}" for number, change in enumerate(changes, 1) if change.change_class == "logging"}
    return tuple(
        dataclasses.replace(change, id=f"C{number}", needs=tuple(ids[site] for site in change.needs))
        for number, change in enumerate(changes, 1)
    )


def _changes(proposal: Proposal, allow: Collection[str]) -> Iterator[Change]:
    pinning: set[str] = set()
    for record, loader in proposal.train_loaders():
        yield from loader_changes(proposal, record, loader, pinning)
        yield from fetch_changes(proposal, record, loader)
    yield from copy_changes(proposal, pinning)
    syncs = list(sync_changes(proposal))
    yield from syncs
    mechanism = "sync" if any(change.edits for change in syncs) else "copy"
    yield from made_changes(proposal, mechanism, draws="stochastic" in allow)
    yield from rank_changes(proposal)
    yield from allocator_changes(proposal)
    if "numerics" in allow:
        yield from step_changes(proposal)
        yield from thread_changes(proposal)


def _composed(proposal: Proposal, changes: Sequence[Change]) -> list[Change]:
    """The changes; one whose edits do not fit beside those of the changes before it becomes advice."""
    whole = [edit for change in changes for edit in change.edits]
    if not any(_misfit(proposal, whole, file) for file in _files(whole)):
        return list(changes)
    kept: list[Change] = []
    for change in changes:
        edits = [edit for each in (*kept, change) for edit in each.edits]
        why = next((why for file in _files(change.edits) if (why := _misfit(proposal, edits, file))), None)
        if why is not None:
            reason = "; ".join(part for part in (change.reason, f"not patched: beside the other changes {why}") if part)
            change = dataclasses.replace(change, edits=(), needs=(), reason=reason)
        kept.append(change)
    return kept


def _files(edits: Sequence[Edit]) -> set[str]:
    return {edit.site.rpartition(":")[0] for edit in edits}


def _misfit(proposal: Proposal, edits: Sequence[Edit], file: str) -> str | None:
    of_file = [edit for edit in edits if edit.site.rpartition(":")[0] == file]
    refused = apply_edits(proposal.texts[file], of_file, file=file).refused
    return refused[0][1] if refused else None
