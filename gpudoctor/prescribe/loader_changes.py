"""Changes of loader settings and of fetching, from the time that the loop waits for its batches."""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Change, ChangeClass, Edit, WatchedLoader, WatchRecord
from gpudoctor.prescribe.proposal import COPY_SHARE, Proposal, share_of
from gpudoctor.prescribe.workers import loader_limit, needed_workers

_WAIT_SHARE = 0.05  # below it the loader is not the bottleneck (rule LDR020)
_FETCH_RATIO = 2.0  # whole batches at least this much faster (rule LDR023)
_RESTART_SHARE = 0.02  # of the time, lost to starting workers again each epoch
_RESTART_S_PER_WORKER = 0.1  # fork: 0.13, 0.21, 0.44 s to the first batch with 1, 2, 4 workers (ours)


def loader_changes(
    proposal: Proposal, record: WatchRecord, loader: WatchedLoader, pinning: set[str]
) -> Iterator[Change]:
    share = share_of(record, loader.wait_ms)
    unpinned = [copy for copy in proposal.copies_in_steps() if copy.from_loader and copy.pinned < copy.calls]
    copy_share = max((proposal.copy_share(copy) for copy in unpinned), default=0.0)
    arguments: dict[str, int | bool | None] = {}
    reasons, rule = [], "LDR003"
    kind: ChangeClass = "exact"
    limit = loader_limit(proposal.case, record, proposal.ranks)
    if share >= _WAIT_SHARE:
        proposal.lose("loader", share)
        short = "LDR001" if loader.num_workers == 0 else "LDR021"
        why = f"the loop waits {share:.0%} of the time for this loader"
        if loader.iterable_dataset:
            yield proposal.advice(
                short, loader.site, "loader", "more loader workers", "stochastic",
                f"{why}, but an iterable dataset that is not split by worker would deliver its rows several times",
            )  # fmt: skip
        elif limit == 0:
            yield proposal.advice(
                short, loader.site, "loader", "loader workers", "exact",
                f"{why}, but shared memory is too small for the batches of one worker (see CTR001)",
            )  # fmt: skip
        else:
            workers = min(limit, needed_workers(loader, record.watched_s or 0.0) or limit)
            if workers != loader.num_workers:
                arguments["num_workers"], rule = workers, short
                reasons.append(f"{why}; {workers} of at most {limit} workers would keep up")
                kind = "exact" if _draws_nothing(loader) else "stochastic"
    workers = int(arguments.get("num_workers") or loader.num_workers)
    if unpinned and not loader.pin_memory and (arguments or copy_share >= COPY_SHARE or proposal.told(unpinned)):
        arguments["pin_memory"] = True
        reasons.append("its batches are copied to the GPU from memory that is not pinned")
        proposal.lose("loader", copy_share)
    if workers and not loader.persistent_workers and _restart_share(record, loader, workers) >= _RESTART_SHARE:
        rule = rule if arguments else "LDR002"
        arguments["persistent_workers"] = True
        reasons.append("its workers start again each epoch")
        kind = "stochastic"
    if not arguments:
        return
    change = proposal.change(
        rule=rule,
        mechanism="loader",
        title=", ".join(f"{name}={value}" for name, value in arguments.items()),
        kind=kind,
        edits=[Edit(kind="loader-arguments", site=loader.site, name="DataLoader", arguments=arguments)],
        reason="; ".join(reasons),
    )
    if change.edits and "pin_memory" in arguments:
        pinning.add(loader.site)
    yield change


def fetch_changes(proposal: Proposal, record: WatchRecord, loader: WatchedLoader) -> Iterator[Change]:
    probe, share = loader.fetch_probe, share_of(record, loader.wait_ms)
    own = loader.iterable_dataset or loader.custom_collate or loader.custom_sampler
    if probe is None or probe.error is not None or own or not loader.batch_size or share < _WAIT_SHARE:
        return
    if probe.row_by_row_ms < _FETCH_RATIO * probe.whole_batch_ms:
        return
    proposal.lose("fetch", share)
    ratio = probe.row_by_row_ms / probe.whole_batch_ms if probe.whole_batch_ms > 0 else float("inf")
    why = f"indexing the dataset with a whole batch was {min(ratio, 999.0):.1f} times as fast as row by row"
    title = "fetch whole batches"
    same = {other.dataset_class for each in proposal.records for other in each.loaders if other.site == loader.site}
    if probe.draws_random:
        blocked = "the dataset draws random numbers, and for a whole batch it would draw others"
    elif not (probe.equal and probe.repeatable):
        blocked = "what it gives for a whole batch is not what its rows give"
    elif len(same) > 1:
        blocked = "this line makes loaders of several datasets, and the others were not probed"
    else:
        yield proposal.change(
            rule="LDR023",
            mechanism="fetch",
            title=title,
            kind="exact",
            edits=[Edit(kind="whole-batch", site=loader.site, name="DataLoader")],
            reason=why,
        )
        return
    yield proposal.advice("LDR023", loader.site, "fetch", title, "stochastic", f"{why}, but {blocked}")


def _draws_nothing(loader: WatchedLoader) -> bool:
    probe = loader.fetch_probe
    return probe is not None and probe.error is None and probe.repeatable and not probe.draws_random


def _restart_share(record: WatchRecord, loader: WatchedLoader, workers: int) -> float:
    """The time that starting the workers again takes, from the second epoch on, as a share of all time."""
    again = loader.iterators - 1
    if again < 1 or not record.watched_s:
        return 0.0
    if loader.num_workers and loader.first_batch_ms is not None:
        once_s = loader.first_batch_ms / 1000
    else:
        once_s = _RESTART_S_PER_WORKER * workers
    return again * once_s / record.watched_s
