"""What a proposal is made from: the watched records, the source texts, and how a change is made of edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

from gpudoctor.model import Case, Change, ChangeClass, CopySite, Edit, WatchedLoader, WatchRecord
from gpudoctor.prescribe.patch import apply_edits

Safe = Callable[[str, str, int], tuple[bool, str | None]]
COPY_SHARE = 0.01  # of the time, lost to copies; less is within the noise of a trial
_PACKAGES = {"site-packages", "dist-packages"}


class Proposal:
    """The case and what was seen in it; `lost` is the share of the time by mechanism."""

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
        self.lost: dict[str, float] = {}

    # what was seen

    def train_loaders(self) -> list[tuple[WatchRecord, WatchedLoader]]:
        """Each loader that fed the loop once: the rank that waited longest for it speaks for all."""
        worst: dict[str, tuple[float, WatchRecord, WatchedLoader]] = {}
        for record in self.records:
            for loader in record.feeding:
                share = share_of(record, loader.wait_ms)
                if loader.site not in worst or share > worst[loader.site][0]:
                    worst[loader.site] = (share, record, loader)
        return [(record, loader) for _, record, loader in worst.values()]

    def copies_in_steps(self) -> list[CopySite]:
        """Host-to-device copies of the loop, one a site: the rank that waited longest."""
        worst: dict[str, CopySite] = {}
        for record in self.records:
            for copy in record.copies:
                seen = worst.get(copy.site)
                if copy.kind == "h2d" and copy.calls_in_steps > 0 and (seen is None or copy.waited_ms > seen.waited_ms):
                    worst[copy.site] = copy
        return list(worst.values())

    def copy_share(self, copy: CopySite) -> float:
        return max((share_of(record, copy.waited_ms) for record in self.records if copy in record.copies), default=0.0)

    def told(self, copies: Sequence[CopySite]) -> bool:
        return any(copy.site in self.subjects for copy in copies)

    def lose(self, mechanism: str, share: float) -> None:
        self.lost[mechanism] = max(self.lost.get(mechanism, 0.0), share)

    def no_patch(self, site: str) -> str | None:
        """Why the file of a site is not edited, or None."""
        file = site.rpartition(":")[0]
        if _PACKAGES & set(PurePath(file).parts):
            return "the line belongs to an installed package: set it through an option of that package"
        if PurePath(file).is_absolute():
            return "the file lies outside of the directory where the command runs"
        return None if file in self.texts else "the source of this line is not at hand"

    def change(
        self, *, rule: str, mechanism: str, title: str, kind: ChangeClass, edits: Sequence[Edit], reason: str | None
    ) -> Change:
        """A change with those edits that the source takes; advice with the reasons when it takes none."""
        taken: list[Edit] = []
        refused: list[str] = []
        for edit in edits:
            why = self.no_patch(edit.site)
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

    def advice(self, rule: str, site: str, mechanism: str, title: str, kind: ChangeClass, reason: str) -> Change:
        """A change that is only told, with the reason why it is not made."""
        return Change(id="", rule=rule, site=site, mechanism=mechanism, title=title, change_class=kind, reason=reason)


def share_of(record: WatchRecord, lost_ms: float) -> float:
    """The part of the watched time that was lost, between 0 and 1; 0 when the time is unknown."""
    total_ms = (record.watched_s or 0.0) * 1000 or sum(step.wall_ms for step in record.steps)
    return min(1.0, lost_ms / total_ms) if total_ms > 0 else 0.0


def place_of(site: str) -> tuple[str, int]:
    file, _, line = site.rpartition(":")
    return file, int(line) if line.isdigit() else 0
