"""Changes of copies to the device: no copy at all, pinned sources, and copies that the loop need not wait for."""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Change, CopySite, Edit
from gpudoctor.prescribe.patch import apply_edits
from gpudoctor.prescribe.proposal import COPY_SHARE, Proposal, place_of


def copy_changes(proposal: Proposal, pinning: set[str]) -> Iterator[Change]:
    """Copies that stop waiting once their source is pinned; without a pinned source there is nothing to win."""
    pinned_by_loader = bool(pinning) or any(loader.pin_memory for _, loader in proposal.train_loaders())
    wanted = [
        copy
        for copy in proposal.copies_in_steps()
        if copy.function in {"to", "cuda"}
        and copy.non_blocking < copy.calls
        and (copy.pinned == copy.calls or (copy.from_loader and pinned_by_loader))
    ]
    share = sum(proposal.copy_share(copy) for copy in wanted)
    if not wanted or not (pinning or share >= COPY_SHARE or proposal.told(wanted)):
        return
    proposal.lose("loader", share)
    sites = sorted({copy.site for copy in wanted}, key=place_of)
    yield proposal.change(
        rule="CPY001",
        mechanism="loader",
        title=f"non_blocking=True at {', '.join(sites)}",
        kind="exact",
        edits=[Edit(kind="non-blocking", site=site) for site in sites],
        reason=f"each step waits for these copies, {share:.0%} of the time; from pinned memory it need not",
    )


def made_changes(proposal: Proposal, mechanism: str, *, draws: bool) -> Iterator[Change]:
    """Tensors made on the host in each step, and copied from memory that is not pinned: made on the device where that
    gives the same tensor, else pinned.

    mechanism: "sync" where other waits of the loop are taken out too: this copy would keep the whole stall. draws:
    random tensors may be drawn on the device.
    """
    wanted = [copy for copy in proposal.copies_in_steps() if _made_each_step(proposal, copy)]
    share = sum(proposal.copy_share(copy) for copy in wanted)
    if not wanted or not (mechanism == "sync" or share >= COPY_SHARE or proposal.told(wanted)):
        return
    proposal.lose(mechanism, share)
    for site in sorted({copy.site for copy in wanted}, key=place_of):
        made = _on_device(proposal, site, draws=draws)
        if made is not None:
            random = bool(made.arguments["random"])
            yield proposal.change(
                rule="CPY006",
                mechanism=mechanism,
                title=f"make what is copied at {site} on the device",
                kind="stochastic" if random else "exact",
                edits=[made],
                reason="each step makes it on the host, and waits for its copy and for all work queued before it"
                + ("; the device draws other random numbers" if random else ""),
            )
            continue
        yield proposal.change(
            rule="CPY001",
            mechanism=mechanism,
            title=f"pin what is copied at {site}",
            kind="exact",
            edits=[Edit(kind="pin-copy", site=site)],
            reason="each step waits for this copy and for all work queued before it; from pinned memory it need not",
        )


def _on_device(proposal: Proposal, site: str, *, draws: bool) -> Edit | None:
    """The edit that makes the tensors of a line on the device, where it can be made."""
    file, _ = place_of(site)
    for random in (False, True)[: 1 + draws]:
        edit = Edit(kind="make-on-device", site=site, arguments={"random": random})
        if not apply_edits(proposal.texts[file], [edit], file=file).refused:
            return edit
    return None


def _written(proposal: Proposal, copy: CopySite) -> bool:
    """Whether the line itself holds the call; else it is made inside of a library, and nothing here can be edited."""
    file, number = place_of(copy.site)
    lines = proposal.texts.get(file, "").split("\n")
    return 0 < number <= len(lines) and f".{copy.function}(" in lines[number - 1]


def _made_each_step(proposal: Proposal, copy: CopySite) -> bool:
    """Whether every call at the line copied to the device, none of it from pinned memory or from a loader."""
    same = [each for record in proposal.records for each in record.copies if each.site == copy.site]
    return (
        copy.function in {"to", "cuda"}
        and _written(proposal, copy)
        and all(each.kind == "h2d" or each.calls == 0 for each in same)
        and not any(each.pinned or each.from_loader for each in same)
    )
