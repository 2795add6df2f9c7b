"""Changes of how ranks work together: read from the source of a command that was watched with several ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpudoctor.model import Change, Edit
from gpudoctor.prescribe import gradient_sync
from gpudoctor.prescribe.call_edit import find_calls, written
from gpudoctor.prescribe.proposal import Proposal
from gpudoctor.prescribe.tree import CannotEditError, Tree, parse

_SAMPLER = re.compile(r"\bDistributedSampler\s*\(")
_GLOBAL_RANK = re.compile(r"(set_device|torch\.device|\.to|\.cuda)\(\s*(f?['\"]cuda:\{)?\s*(dist\.get_rank\(\)|rank)\b")


def rank_changes(proposal: Proposal) -> Iterator[Change]:
    """DistributedDataParallel's arguments as changes, the rest as advice. Nothing for a command of one rank."""
    if not any((record.world_size or 1) > 1 for record in proposal.records):
        return
    everything = "\n".join(proposal.texts.values())
    accumulates = any(record.backwards >= 2 * record.optimizer_steps > 0 for record in proposal.records)
    for file, text in proposal.texts.items():
        try:
            tree = parse(text.removeprefix("\ufeff"))
        except CannotEditError:
            continue
        calls = [(call, f"{file}:{tree.lines(call)[0]}") for call in find_calls(tree, "gradient_as_bucket_view")]
        for call, site in calls:
            yield from _arguments(proposal, tree, call, site)
        if calls and accumulates and "no_sync" not in everything:
            yield _accumulation(proposal, tree, file, calls[0][1])
        yield from _advice(proposal, file, text, everything)


def _arguments(proposal: Proposal, tree: Tree, call: object, site: str) -> Iterator[Change]:
    import libcst as cst

    assert isinstance(call, cst.Call)
    if written(tree, call, "find_unused_parameters") == "True":
        yield proposal.change(
            rule="PLN014",
            mechanism="ddp",
            title="drop find_unused_parameters",
            kind="exact",
            edits=[Edit(kind="call-argument", site=site, name="DDP", arguments={"find_unused_parameters": None})],
            reason="the graph is searched after each forward pass; DDP fails if a parameter is unused after all",
        )
    if written(tree, call, "gradient_as_bucket_view") is None:
        yield proposal.change(
            rule="PLN013",
            mechanism="ddp",
            title="gradient_as_bucket_view=True",
            kind="exact",
            edits=[Edit(kind="call-argument", site=site, name="DDP", arguments={"gradient_as_bucket_view": True})],
            reason="gradients need not be copied into the buckets that are exchanged",
        )


def _accumulation(proposal: Proposal, tree: Tree, file: str, site: str) -> Change:
    """Sums of other groupings of the same numbers: equal but for their last digits."""
    title, why = (
        "gradients exchanged once a step",
        "each backward pass exchanges them, only the last before a step has to",
    )
    try:
        forward, _, _ = gradient_sync.find(tree)
    except CannotEditError as error:
        return proposal.advice(
            "PLN013", site, "ddp", "no_sync() while gradients accumulate", "numerics", f"{why}; {error}"
        )
    edit = Edit(kind="gradient-sync", site=f"{file}:{tree.lines(forward)[0]}", name="DDP")
    return proposal.change(rule="PLN013", mechanism="ddp", title=title, kind="numerics", edits=[edit], reason=why)


def _advice(proposal: Proposal, file: str, text: str, everything: str) -> Iterator[Change]:
    sampler = _SAMPLER.search(text)
    if sampler and "set_epoch" not in everything:
        yield proposal.advice(
            "LDR022", f"{file}:{_line(text, sampler.start())}", "ddp", "sampler.set_epoch(epoch) before each epoch",
            "stochastic", "set_epoch is never called, so every epoch has the same order of rows",
        )  # fmt: skip
    rank = _GLOBAL_RANK.search(text)
    if rank and "LOCAL_RANK" not in everything and "local_rank" not in everything:
        yield proposal.advice(
            "LCH017", f"{file}:{_line(text, rank.start())}", "ddp", "the device from LOCAL_RANK", "exact",
            "the device is chosen by the global rank, which fails on a second node",
        )  # fmt: skip


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1
