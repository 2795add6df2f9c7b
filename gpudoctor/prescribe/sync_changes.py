"""Changes that take the waits for the GPU out of the loop.

Each line that was seen to wait at every step is read for what it does: a call that only waits is dropped; output and
NaN checks run every N steps; a sum or a list is kept on the device until the loop has ended. A sum that the output
shows at every step can pay only together with the rarer output: such a change names the other in `needs`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpudoctor.model import Change, Edit, SyncSite, WatchRecord
from gpudoctor.prescribe.accumulator import CUDA_GRAPHS, find_accumulation
from gpudoctor.prescribe.collect import find_collection
from gpudoctor.prescribe.counter import loops_around
from gpudoctor.prescribe.defer import find_deferral
from gpudoctor.prescribe.log_edit import EVERY, find_rare, is_check, showing
from gpudoctor.prescribe.patch import apply_edits
from gpudoctor.prescribe.proposal import Proposal, place_of, share_of
from gpudoctor.prescribe.tree import CannotEditError, Tree, parse

_HOST_READS = {"item": "SYN001", "float": "SYN001", "int": "SYN001", "tolist": "SYN001", "complex": "SYN001"}
_DROPPED = {"empty_cache": "SYN006", "synchronize": "SYN005"}
_BRANCH = re.compile(r"\s*(if|elif|while|assert)\b")


@dataclass(slots=True)
class _Rare:
    """Output of one loop, or a check, that is to run every N steps."""

    check: bool = False
    edits: list[Edit] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def site(self) -> str:
        return min((edit.site for edit in self.edits), key=place_of)


def sync_changes(proposal: Proposal) -> Iterator[Change]:
    """Changes and advice for the lines that wait for the GPU at about every step, the longest wait first."""
    yield from _Syncs(proposal).changes()


class _Syncs:
    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal
        self.rare: dict[tuple[str, int, bool], _Rare] = {}  # by file and first line of the loop, or of the check
        # A line at which steps are counted has to run at every step.
        self.counted = {record.step_site for record in proposal.records if record.step_source == "step-at"}
        self.graphs = any(CUDA_GRAPHS.search(text) for text in proposal.texts.values())

    def changes(self) -> Iterator[Change]:
        done: set[str] = set()
        found: list[tuple[Change, list[_Rare]]] = []
        for record, sync in self._waits():
            if sync.site in done:
                continue
            before = sum(len(rare.edits) for rare in self.rare.values())
            made = self._sync(sync)
            if made is not None or sum(len(rare.edits) for rare in self.rare.values()) > before:
                done.add(sync.site)
                self.proposal.lose("sync", share_of(record, sync.waited_ms))
            found += [made] if made is not None else []
        for rare in self.rare.values():
            yield self._rare_change(rare)
        for change, needed in found:
            yield dataclasses.replace(change, needs=tuple(rare.site for rare in needed))

    def _waits(self) -> list[tuple[WatchRecord, SyncSite]]:
        worst: dict[tuple[str, str], tuple[WatchRecord, SyncSite]] = {}
        for record in self.proposal.records:
            steps = max(record.optimizer_steps, len(record.steps))
            for sync in record.syncs:
                key = (sync.site, sync.function)
                seen = worst.get(key)
                # Fewer than every second step: somebody has rate-limited it already.
                often = sync.on_device > 0 and sync.calls_in_steps > 0 and 2 * sync.calls_in_steps >= steps
                if often and (seen is None or sync.waited_ms > seen[1].waited_ms):
                    worst[key] = (record, sync)
        return sorted(worst.values(), key=lambda pair: -pair[1].waited_ms)

    def _sync(self, sync: SyncSite) -> tuple[Change, list[_Rare]] | None:
        waits = f"waits for the GPU at every step, {sync.waited_ms:.0f} ms in all"
        if sync.function in _DROPPED:
            call = f"torch.cuda.{sync.function}"
            change = self.proposal.change(
                rule=_DROPPED[sync.function],
                mechanism="sync",
                title=f"drop {call}()",
                kind="exact",
                edits=[Edit(kind="drop-call", site=sync.site, name=call)],
                reason=f"{call}() {waits}",
            )
            return change, []
        title = f"read the value at {sync.site} every N steps"
        rule = _HOST_READS.get(sync.function, "SYN001")
        file, _, number = sync.site.rpartition(":")
        why = self.proposal.no_patch(sync.site)
        if why is not None or not number.isdigit():
            if sync.function not in _HOST_READS and sync.function != "sync":
                return None
            why = why or "the line is not known"
            return self._told(rule, sync.site, title, f"{sync.function} {waits}; not patched: {why}"), []
        try:
            tree = parse(self.proposal.texts[file].removeprefix("\ufeff"))
        except CannotEditError as error:
            return self._told(rule, sync.site, title, f"{sync.function} {waits}; {error}"), []
        reasons = []
        for attempt in (self._sum, self._list, self._deferred, self._output):
            try:
                return attempt(tree, sync, rule, waits)
            except CannotEditError as error:
                reasons.append(str(error))
        return self._only_told(tree, sync, rule, title, f"{sync.function} {waits}; ", reasons)

    def _only_told(
        self, tree: Tree, sync: SyncSite, rule: str, title: str, head: str, reasons: Sequence[str]
    ) -> tuple[Change, list[_Rare]] | None:
        line = _text_of(tree, sync.site)
        if sync.function == "bool" and _BRANCH.match(line):
            why = next(
                (each for each in reversed(reasons) if not each.startswith("no ")), "it decides what the step does"
            )
            reason = f"{head}{why}: decide on the device (torch.where, clamp) or check every N steps"
            return self._told("SYN002", sync.site, f"branch on a device value at {sync.site}", reason), []
        shown = sync.function in {"format", "repr"} and any(not each.startswith("no ") for each in reasons)
        if not shown and (sync.function not in _HOST_READS or f"{sync.function}(" not in line):
            return None  # the read is inside a library call: the finding tells, and nothing here can be edited
        why = next((each for each in reasons if not each.startswith("no ")), reasons[0])
        return self._told(rule, sync.site, title, head + why), []

    def _told(self, rule: str, site: str, title: str, reason: str) -> Change:
        return self.proposal.advice(rule, site, "sync", title, "logging", reason)

    # a sum

    def _sum(self, tree: Tree, sync: SyncSite, rule: str, waits: str) -> tuple[Change, list[_Rare]]:
        """A value that is summed: kept on the device, if need be with the output that shows the sum made rarer."""
        file, line = place_of(sync.site)
        name = find_accumulation(tree, line).name
        title = f"sum {name} on the device"
        if self.graphs:
            raise CannotEditError("the command uses CUDA graphs, which write their results into the same memory again")
        reason = ""
        for convert in (False, True):
            for rarely in (False, True):
                logs = self._showing(tree, file, line, name) if rarely else []
                if rarely and not logs:
                    continue
                edit = Edit(
                    kind="device-accumulator", site=sync.site, name=name, arguments={"convert": True} if convert else {}
                )
                is_safe, why = self._judged(file, line, edit, logs)
                if is_safe and why is None:
                    change = self.proposal.change(
                        rule=rule,
                        mechanism="sync",
                        title=title,
                        kind="exact",
                        edits=[edit],
                        reason=f"reading {name} {waits}",
                    )
                    needed = self._add(tree, logs, f"it shows {name}") if change.edits else []
                    return change, needed
                reason = reason if convert and reason else why or reason or "a later use may need a Python number"
        told = f"{sync.function} {waits}; not patched: {reason}"
        return self._told(rule, sync.site, f"read the value at {sync.site} every N steps", told), []

    def _judged(self, file: str, line: int, edit: Edit, logs: Sequence[Edit]) -> tuple[bool, str | None]:
        """Later uses of the sum in the text as it will be."""
        text = self.proposal.texts[file]
        with_logs = apply_edits(text, logs, file=file)
        if with_logs.refused:
            return False, with_logs.refused[0][1]
        moved = _moved(text, with_logs.text, line)
        both = apply_edits(text, [edit, *logs], file=file)
        assert edit.name is not None
        if any(refused is edit for refused, _ in both.refused):  # the reason is told where the change is made
            return self.proposal.safe(with_logs.text, edit.name, moved)
        return self.proposal.safe(both.text, edit.name, moved)

    def _showing(self, tree: Tree, file: str, line: int, name: str) -> list[Edit]:
        """Edits that make the output which shows the sum run every N steps."""
        edits = []
        for first in showing(tree, line, name):
            edit = Edit(kind="log-every", site=f"{file}:{first}", arguments={"every": EVERY})
            if edit.site not in self.counted and not apply_edits(self.proposal.texts[file], [edit], file=file).refused:
                edits.append(edit)
        return edits

    # a list

    def _list(self, tree: Tree, sync: SyncSite, rule: str, waits: str) -> tuple[Change, list[_Rare]]:
        file, line = place_of(sync.site)
        found = find_collection(tree, line)
        if self.graphs:
            raise CannotEditError("the command uses CUDA graphs, which write their results into the same memory again")
        is_safe, why = self.proposal.safe(self.proposal.texts[file], found.name, line)
        if not is_safe:
            raise CannotEditError(why or "a later use may need a Python number")
        change = self.proposal.change(
            rule=rule,
            mechanism="sync",
            title=f"collect {found.place} on the device",
            kind="exact",
            edits=[Edit(kind="collect-device", site=sync.site, name=found.name)],
            reason=f"reading a value for {found.place} {waits}; each keeps 512 bytes on the GPU until the loop ends",
        )
        return change, []

    # a value under a name of its own

    def _deferred(self, tree: Tree, sync: SyncSite, rule: str, waits: str) -> tuple[Change, list[_Rare]]:
        """``value = loss.item()``: read only where it is shown, with that output made rarer."""
        file, line = place_of(sync.site)
        found = find_deferral(tree, line)
        if self.graphs:
            raise CannotEditError("the command uses CUDA graphs, which write their results into the same memory again")
        edit = Edit(kind="defer-read", site=sync.site, name=found.name)
        text = self.proposal.texts[file]
        lines = [*found.shown, *(first for name, at in found.sums for first in showing(tree, at, name))]
        if counted := self.counted & {f"{file}:{each}" for each in lines}:
            raise CannotEditError(f"steps are counted at {counted.pop()}, which shows {found.name}")
        logs = [
            Edit(kind="log-every", site=f"{file}:{each}", arguments={"every": EVERY}) for each in dict.fromkeys(lines)
        ]
        both = apply_edits(text, [edit, *logs], file=file)
        refused = {place_of(each.site)[1]: why for each, why in both.refused if each in logs}
        if edit not in both.applied:
            raise CannotEditError(next(why for each, why in both.refused if each is edit))
        if blocking := [line for line in found.each_step if line in refused]:
            raise CannotEditError(f"line {blocking[0]} needs {found.name} at every step: {refused[blocking[0]]}")
        for name, at in (*found.sums, *found.lists):
            is_safe, why = self.proposal.safe(both.text, name, _moved(text, both.text, at))
            if not is_safe or why is not None:
                raise CannotEditError(why or f"a later use of {name} may need a Python number")
        rare = self._add(tree, [log for log in logs if log in both.applied], f"it shows {found.name}")
        change = self.proposal.change(
            rule=rule,
            mechanism="sync",
            title=f"keep {found.name} on the device",
            kind="exact",
            edits=[edit],
            reason=f"reading {found.name} {waits}",
        )
        return change, rare

    # output and checks

    def _output(self, tree: Tree, sync: SyncSite, _rule: str, waits: str) -> tuple[Change, list[_Rare]] | None:
        file, line = place_of(sync.site)
        statement = find_rare(tree, line)
        edit = Edit(kind="log-every", site=f"{file}:{tree.lines(statement)[0]}", arguments={"every": EVERY})
        refused = apply_edits(self.proposal.texts[file], [edit], file=file).refused
        if refused:
            raise CannotEditError(refused[0][1])
        if edit.site in self.counted:
            raise CannotEditError("steps are counted at this line")
        self._add(tree, [edit], f"it {waits}")
        return None

    def _add(self, tree: Tree, edits: Sequence[Edit], reason: str) -> list[_Rare]:
        """Gather the output of one loop, which is one decision and one trial; a check stands for itself."""
        touched = []
        for edit in edits:
            file, line = place_of(edit.site)
            statement = find_rare(tree, line)
            check = is_check(tree, statement)
            loop = next(loops_around(tree, statement))
            key = (file, tree.lines(statement if check else loop)[0], check)
            rare = self.rare.setdefault(key, _Rare(check=check))
            rare.edits += [edit] if edit not in rare.edits else []
            rare.reasons += [reason] if reason not in rare.reasons else []
            touched += [rare] if rare not in touched else []
        return touched

    def _rare_change(self, rare: _Rare) -> Change:
        edits = sorted(rare.edits, key=lambda edit: place_of(edit.site))
        sites = ", ".join(edit.site for edit in edits)
        noticed = [f"a NaN is then noticed up to {EVERY - 1} steps later"] if rare.check else []
        return self.proposal.change(
            rule="SYN002" if rare.check else "SYN003",
            mechanism="sync",
            title=f"{'check for NaN' if rare.check else 'output'} every {EVERY} steps at {sites}",
            kind="logging",
            edits=edits,
            reason="; ".join([*rare.reasons, *noticed]),
        )


def _text_of(tree: Tree, site: str) -> str:
    lines = tree.text.split("\n")
    number = place_of(site)[1]
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _moved(old: str, new: str, line: int) -> int:
    """Where a line of the old text, which the edits left as it is, stands in the new one."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    for block in matcher.get_matching_blocks():
        if block.a < line <= block.a + block.size:
            return line - block.a + block.b
    return line
