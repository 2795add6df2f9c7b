"""Changes that make a step faster and may change its results in the last digits: offered when numerics are allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gpudoctor.model import Change, Edit, EditKind
from gpudoctor.prescribe.call_edit import SETTINGS, find_calls, setting_line, written
from gpudoctor.prescribe.model_edit import find_forward, find_model
from gpudoctor.prescribe.proposal import Proposal
from gpudoctor.prescribe.tree import CannotEditError, Tree, last_name, parse

_FUSED_SINCE = {"Adam": (2, 0), "AdamW": (2, 0), "SGD": (2, 3)}
_CONVOLUTIONS = re.compile(
    r"\bConv(Transpose)?[123]d\b|torchvision|\btimm\b|resnet|unet|\bvgg|efficientnet", re.IGNORECASE
)
_AMPERE = 8.0  # compute capability; older GPUs have neither TF32 nor bfloat16


def step_changes(proposal: Proposal) -> Iterator[Change]:
    """Fused optimizer, TF32, convolution search, gradients set to None, memory format, autocast: each a change of its
    own, since one that fails must not take the others with it."""
    if not any(record.cuda and record.device != "cpu" for record in proposal.records):
        return
    trees = {}
    for file, text in proposal.texts.items():
        try:
            trees[file] = parse(text.removeprefix("\ufeff"))
        except CannotEditError:
            continue
    for file, tree in trees.items():
        yield from _fused(proposal, file, tree)
        yield from _gradients(proposal, file, tree)
        yield from _model(proposal, file, tree)
    main = _main_file(proposal, trees)
    if main is not None:
        yield from _settings(proposal, main, trees[main])


def _fused(proposal: Proposal, file: str, tree: Tree) -> Iterator[Change]:
    version = _version(proposal)
    edits = [
        Edit(
            kind="call-argument",
            site=f"{file}:{tree.lines(call)[0]}",
            name=last_name(call.func),
            arguments={"fused": True},
        )
        for call in find_calls(tree, "fused")
        if version >= _since(tree, call.func) and written(tree, call, "fused") is None
    ]
    if edits:
        change = proposal.change(
            rule="SYN009",
            mechanism="optimizer",
            title="fused optimizer step",
            kind="numerics",
            edits=edits,
            reason="one kernel updates many parameters; sums are rounded in another order",
        )
        yield from [change] if change.edits else []


def _since(tree: Tree, func: object) -> tuple[int, int]:
    names = tree.refers_to(func)  # type: ignore[arg-type]
    return max((_FUSED_SINCE.get(name.rsplit(".", 1)[-1], (2, 0)) for name in names), default=(2, 0))


def _gradients(proposal: Proposal, file: str, tree: Tree) -> Iterator[Change]:
    edits = [
        Edit(
            kind="call-argument",
            site=f"{file}:{tree.lines(call)[0]}",
            name="zero_grad",
            arguments={"set_to_none": None},
        )
        for call in find_calls(tree, "set_to_none")
        if written(tree, call, "set_to_none") == "False"
    ]
    if edits:
        yield proposal.change(
            rule="SYN009",
            mechanism="gradients",
            title="zero_grad() sets gradients to None",
            kind="numerics",
            edits=edits,
            reason="gradients need not be filled with zeros; a parameter without gradient is then skipped, not decayed",
        )


def _model(proposal: Proposal, file: str, tree: Tree) -> Iterator[Change]:
    """The memory format of a model with convolutions, and bfloat16 autocast, where the GPU has its matrix units."""
    if setting_line(tree) is None:  # torch is not known by its name
        return
    offered: list[tuple[EditKind, str, str, Callable[[], int]]] = []
    if _CONVOLUTIONS.search("\n".join(proposal.texts.values())):
        why = "convolutions read channels last without copying; sums are rounded in another order"
        offered.append(("channels-last", "memory format channels_last", why, lambda: tree.lines(find_model(tree))[0]))
    if _capability(proposal) >= _AMPERE:
        why = "matrix products and convolutions of the forward pass take bfloat16: about three digits"
        offered.append(("autocast", "bfloat16 autocast", why, lambda: tree.lines(find_forward(tree)[0])[0]))
    for kind, title, reason, find in offered:
        try:
            site = f"{file}:{find()}"
        except CannotEditError:
            continue
        change = proposal.change(
            rule="SYN009",
            mechanism=kind,
            title=title,
            kind="numerics",
            edits=[Edit(kind=kind, site=site)],
            reason=reason,
        )
        yield from [change] if change.edits else []


def _capability(proposal: Proposal) -> float:
    """The lowest compute capability of the GPUs; 0 where it is unknown."""
    known = [float(gpu.compute_capability) for gpu in proposal.case.gpus if gpu.compute_capability is not None]
    return min(known, default=0.0)


def _settings(proposal: Proposal, file: str, tree: Tree) -> Iterator[Change]:
    line = setting_line(tree)
    everything = "\n".join(proposal.texts.values())
    if line is None:
        return
    offered = []
    if _CONVOLUTIONS.search(everything):
        offered.append(("torch.backends.cudnn.benchmark", "convolution", "cuDNN searches the fastest convolution"))
    if _capability(proposal) >= _AMPERE:
        offered.append(("torch.set_float32_matmul_precision", "matmul", "matrix products of float32 run as TF32"))
    for name, mechanism, title in offered:
        statement, decided = SETTINGS[name]
        if re.search(decided, everything):
            continue
        yield proposal.change(
            rule="SYN009",
            mechanism=mechanism,
            title=title,
            kind="numerics",
            edits=[Edit(kind="setting", site=f"{file}:{line}", name=name)],
            reason=f"{statement}: results differ in the last digits",
        )


def _main_file(proposal: Proposal, trees: dict[str, Tree]) -> str | None:
    """The script that was started, else the only file."""
    for record in proposal.records:
        for argument in record.argv[:1]:
            for file in trees:
                if argument == file or argument.endswith("/" + file):
                    return file
    return next(iter(trees)) if len(trees) == 1 else None


def _version(proposal: Proposal) -> tuple[int, int]:
    """torch's version as the command saw it; (0, 0) when it is not known."""
    for record in proposal.records:
        found = re.match(r"(\d+)\.(\d+)", record.torch or "")
        if found:
            return int(found[1]), int(found[2])
    return 0, 0
