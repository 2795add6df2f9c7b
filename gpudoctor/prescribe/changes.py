"""Candidates: what was watched becomes changes that can be tried, and advice where a patch is not possible.

The rate at which a change pays is not guessed here: tune measures it. What is proposed is only gated by time that
was seen to be lost, so that a well-set script yields nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath

from gpudoctor.model import (
    Case,
    Change,
    ChangeClass,
    CopySite,
    Edit,
    Finding,
    SyncSite,
    WatchedLoader,
    WatchRecord,
)
from gpudoctor.prescribe.accumulator import find_accumulation
from gpudoctor.prescribe.patch import apply_edits
from gpudoctor.prescribe.tree import CannotEditError, parse
from gpudoctor.prescribe.workers import loader_limit, needed_workers, worker_ladder

__all__ = ["loader_limit", "propose", "worker_ladder"]

Safe = Callable[[str, str, int], tuple[bool, str | None]]

_WAIT_SHARE = 0.05  # below it the loader is not the bottleneck (rule LDR020)
_COPY_SHARE = 0.01  # of the time; less is within the noise of a trial
_FETCH_RATIO = 2.0  # whole batches at least this much faster (rule LDR023)
_RESTART_SHARE = 0.02  # of the time, lost to starting workers again each epoch
_RESTART_S_PER_WORKER = 0.1  # fork: 0.13, 0.21, 0.44 s to the first batch with 1, 2, 4 workers (ours)
_HOST_READS = {"item": "SYN001", "float": "SYN001", "int": "SYN001", "tolist": "SYN001", "complex": "SYN001"}
_DROPPED = {"empty_cache": "SYN006", "synchronize": "SYN005"}
_PACKAGES = {"site-packages", "dist-packages"}


def propose(case: Case, findings: Sequence[Finding], *, texts: Mapping[str, str], safe: Safe) -> tuple[Change, ...]:
    """Changes for the watched command, the most time first; advice has no edits and says why in `reason`.

    texts: source by the file part of the sites. safe: whether every later use of a summed name stays right
    (source.later_uses); a reason beside True says that the change cannot pay.
    """
    if case.watched is None:
        return ()
    proposal = _Proposal(case, case.watched.records, {finding.subject for finding in findings}, texts, safe)
    groups: dict[str, list[Change]] = {}
    for change in proposal.changes():
        groups.setdefault(change.mechanism, []).append(change)
    ordered = sorted(groups, key=lambda name: -proposal.lost.get(name, 0.0))
    changes = [change for name in ordered for change in groups[name]]
    return tuple(dataclasses.replace(change, id=f"C{number}") for number, change in enumerate(changes, 1))


class _Proposal:
    def __init__(
        self,
        case: Case,
        records: Sequence[WatchRecord],
        subjects: set[str],
        texts: Mapping[str, str],
        safe: Safe,
    ) -> None:
        self.case, self.records, self.subjects, self.texts, self.safe = case, records, subjects, texts, safe
        self.ranks = max(1, len(records))
        self.lost: dict[str, float] = {}  # share of the time by mechanism

    def changes(self) -> Iterator[Change]:
        pinning: set[str] = set()
        for record, loader in self._train_loaders():
            yield from self._loader(record, loader, pinning)
            yield from self._fetch(record, loader)
        yield from self._copies(pinning)
        yield from self._syncs()

    # what was seen

    def _train_loaders(self) -> list[tuple[WatchRecord, WatchedLoader]]:
        """Each loader that fed the training loop once: the rank that waited longest for it speaks for all."""
        worst: dict[str, tuple[float, WatchRecord, WatchedLoader]] = {}
        for record in self.records:
            trained = [loader for loader in record.loaders if loader.role == "train"]
            for loader in trained or [loader for loader in record.loaders if loader.role == "unknown"]:
                share = _share(record, loader.wait_ms)
                if loader.site not in worst or share > worst[loader.site][0]:
                    worst[loader.site] = (share, record, loader)
        return [(record, loader) for _, record, loader in worst.values()]

    def _loss(self, mechanism: str, share: float) -> None:
        self.lost[mechanism] = max(self.lost.get(mechanism, 0.0), share)

    def _no_patch(self, site: str) -> str | None:
        """Why the file of a site is not edited, or None."""
        file = site.rpartition(":")[0]
        if _PACKAGES & set(PurePath(file).parts):
            return "the line belongs to an installed package: set it through an option of that package"
        if PurePath(file).is_absolute():
            return "the file lies outside of the directory where the command runs"
        return None if file in self.texts else "the source of this line is not at hand"

    def _change(
        self, *, rule: str, mechanism: str, title: str, kind: ChangeClass, edits: Sequence[Edit], reason: str | None
    ) -> Change:
        """A change with those edits that the source takes; advice with the reasons when it takes none."""
        taken: list[Edit] = []
        refused: list[str] = []
        for edit in edits:
            why = self._no_patch(edit.site)
            if why is None:
                file = edit.site.rpartition(":")[0]
                why = next((why for _, why in apply_edits(self.texts[file], [edit], file=file).refused), None)
            if why is None:
                taken.append(edit)
            else:
                refused.append(f"{edit.site}: {why}")
        site = (taken or list(edits))[0].site
        told = "; ".join(part for part in (reason, *(f"not patched: {why}" for why in refused)) if part) or None
        return Change(
            id="",
            rule=rule,
            site=site,
            mechanism=mechanism,
            title=title,
            change_class=kind,
            edits=tuple(taken),
            reason=told,
        )

    def _advice(self, rule: str, site: str, mechanism: str, title: str, kind: ChangeClass, reason: str) -> Change:
        return Change(id="", rule=rule, site=site, mechanism=mechanism, title=title, change_class=kind, reason=reason)

    # the loader

    def _loader(self, record: WatchRecord, loader: WatchedLoader, pinning: set[str]) -> Iterator[Change]:
        share = _share(record, loader.wait_ms)
        unpinned = [copy for copy in self._copies_in_steps() if copy.from_loader and copy.pinned < copy.calls]
        copy_share = max((self._copy_share(copy) for copy in unpinned), default=0.0)
        arguments: dict[str, int | bool | None] = {}
        reasons, rule = [], "LDR003"
        kind: ChangeClass = "exact"
        limit = loader_limit(self.case, record, self.ranks)
        if share >= _WAIT_SHARE:
            self._loss("loader", share)
            short = "LDR001" if loader.num_workers == 0 else "LDR021"
            why = f"the loop waits {share:.0%} of the time for this loader"
            if loader.iterable_dataset:
                yield self._advice(
                    short, loader.site, "loader", "more loader workers", "stochastic",
                    f"{why}, but an iterable dataset that is not split by worker would deliver its rows several times",
                )  # fmt: skip
            elif limit == 0:
                yield self._advice(
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
        if unpinned and not loader.pin_memory and (arguments or copy_share >= _COPY_SHARE or self._told(unpinned)):
            arguments["pin_memory"] = True
            reasons.append("its batches are copied to the GPU from memory that is not pinned")
            self._loss("loader", copy_share)
        if workers and not loader.persistent_workers and _restart_share(record, loader, workers) >= _RESTART_SHARE:
            rule = rule if arguments else "LDR002"
            arguments["persistent_workers"] = True
            reasons.append("its workers start again each epoch")
            kind = "stochastic"
        if not arguments:
            return
        change = self._change(
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

    def _fetch(self, record: WatchRecord, loader: WatchedLoader) -> Iterator[Change]:
        probe, share = loader.fetch_probe, _share(record, loader.wait_ms)
        own = loader.iterable_dataset or loader.custom_collate or loader.custom_sampler
        if probe is None or probe.error is not None or own or not loader.batch_size or share < _WAIT_SHARE:
            return
        if probe.row_by_row_ms < _FETCH_RATIO * probe.whole_batch_ms:
            return
        self._loss("fetch", share)
        ratio = probe.row_by_row_ms / probe.whole_batch_ms if probe.whole_batch_ms > 0 else float("inf")
        why = f"indexing the dataset with a whole batch was {min(ratio, 999.0):.1f} times as fast as row by row"
        title = "fetch whole batches"
        same = {other.dataset_class for each in self.records for other in each.loaders if other.site == loader.site}
        if probe.draws_random:
            blocked = "the dataset draws random numbers, and for a whole batch it would draw others"
        elif not (probe.equal and probe.repeatable):
            blocked = "what it gives for a whole batch is not what its rows give"
        elif len(same) > 1:
            blocked = "this line makes loaders of several datasets, and the others were not probed"
        else:
            yield self._change(
                rule="LDR023",
                mechanism="fetch",
                title=title,
                kind="exact",
                edits=[Edit(kind="whole-batch", site=loader.site, name="DataLoader")],
                reason=why,
            )
            return
        yield self._advice("LDR023", loader.site, "fetch", title, "stochastic", f"{why}, but {blocked}")

    # copies and synchronisation

    def _copies_in_steps(self) -> list[CopySite]:
        """Host-to-device copies of the loop, one a site: the rank that waited longest."""
        worst: dict[str, CopySite] = {}
        for record in self.records:
            for copy in record.copies:
                seen = worst.get(copy.site)
                if copy.kind == "h2d" and copy.calls_in_steps > 0 and (seen is None or copy.waited_ms > seen.waited_ms):
                    worst[copy.site] = copy
        return list(worst.values())

    def _copy_share(self, copy: CopySite) -> float:
        return max((_share(record, copy.waited_ms) for record in self.records if copy in record.copies), default=0.0)

    def _told(self, copies: Sequence[CopySite]) -> bool:
        return any(copy.site in self.subjects for copy in copies)

    def _copies(self, pinning: set[str]) -> Iterator[Change]:
        """Copies that stop waiting once their source is pinned; without a pinned source there is nothing to win."""
        pinned_by_loader = bool(pinning) or any(loader.pin_memory for _, loader in self._train_loaders())
        wanted = [
            copy
            for copy in self._copies_in_steps()
            if copy.function in {"to", "cuda"}
            and copy.non_blocking < copy.calls
            and (copy.pinned == copy.calls or (copy.from_loader and pinned_by_loader))
        ]
        share = sum(self._copy_share(copy) for copy in wanted)
        if not wanted or not (pinning or share >= _COPY_SHARE or self._told(wanted)):
            return
        self._loss("loader", share)
        sites = sorted({copy.site for copy in wanted}, key=_place)
        yield self._change(
            rule="CPY001",
            mechanism="loader",
            title=f"non_blocking=True at {', '.join(sites)}",
            kind="exact",
            edits=[Edit(kind="non-blocking", site=site) for site in sites],
            reason=f"each step waits for these copies, {share:.0%} of the time; from pinned memory it need not",
        )

    def _syncs(self) -> Iterator[Change]:
        worst: dict[tuple[str, str], tuple[WatchRecord, SyncSite]] = {}
        for record in self.records:
            steps = max(record.optimizer_steps, len(record.steps))
            for sync in record.syncs:
                key = (sync.site, sync.function)
                seen = worst.get(key)
                # Fewer than every second step: somebody has rate-limited it already.
                often = sync.on_device > 0 and sync.calls_in_steps > 0 and 2 * sync.calls_in_steps >= steps
                if often and (seen is None or sync.waited_ms > seen[1].waited_ms):
                    worst[key] = (record, sync)
        done: set[str] = set()
        for record, sync in sorted(worst.values(), key=lambda pair: -pair[1].waited_ms):
            if sync.site not in done and (change := self._sync(sync)) is not None:
                done.add(sync.site)
                self._loss("sync", _share(record, sync.waited_ms))
                yield change

    def _sync(self, sync: SyncSite) -> Change | None:
        waits = f"waits for the GPU at every step, {sync.waited_ms:.0f} ms in all"
        if sync.function in _DROPPED:
            call = f"torch.cuda.{sync.function}"
            return self._change(
                rule=_DROPPED[sync.function],
                mechanism="sync",
                title=f"drop {call}()",
                kind="exact",
                edits=[Edit(kind="drop-call", site=sync.site, name=call)],
                reason=f"{call}() {waits}",
            )
        if sync.function != "sync" and sync.function not in _HOST_READS:
            return None
        return self._host_read(sync, waits)

    def _host_read(self, sync: SyncSite, waits: str) -> Change | None:
        """A value read at each step: summed on the device where that is what it is read for, else advice."""
        rule = _HOST_READS.get(sync.function, "SYN001")
        file, _, line = sync.site.rpartition(":")
        title = f"read the value at {sync.site} every N steps"
        why = self._no_patch(sync.site)
        if why is None:
            text = self.texts[file]
            try:
                name = find_accumulation(parse(text.removeprefix("\ufeff")), int(line)).name
            except (CannotEditError, ValueError) as error:
                if sync.function == "sync" or not _written(text, line, sync.function):
                    return None  # the read is inside a library call: the finding tells, and nothing here can be edited
                return self._advice(rule, sync.site, "sync", title, "logging", f"{sync.function} {waits}; {error}")
            is_safe, reason = self.safe(text, name, int(line))
            if is_safe and reason is None:
                return self._change(
                    rule=rule,
                    mechanism="sync",
                    title=f"sum {name} on the device",
                    kind="exact",
                    edits=[Edit(kind="device-accumulator", site=sync.site, name=name)],
                    reason=f"reading {name} {waits}",
                )
            why = reason or "a later use may need a Python number"
        return self._advice(rule, sync.site, "sync", title, "logging", f"{sync.function} {waits}; not patched: {why}")


def _share(record: WatchRecord, lost_ms: float) -> float:
    """The part of the watched time that was lost, between 0 and 1; 0 when the time is unknown."""
    total_ms = (record.watched_s or 0.0) * 1000 or sum(step.wall_ms for step in record.steps)
    return min(1.0, lost_ms / total_ms) if total_ms > 0 else 0.0


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


def _written(text: str, line: str, function: str) -> bool:
    """Whether the line itself holds the call, such as ``.item()``."""
    lines = text.split("\n")
    number = int(line) if line.isdigit() else 0
    return 0 < number <= len(lines) and f"{function}(" in lines[number - 1]


def _place(site: str) -> tuple[str, int]:
    file, _, line = site.rpartition(":")
    return file, int(line) if line.isdigit() else 0
