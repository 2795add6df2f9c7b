"""Turns what was noted on a walk into sites: which lines are hot is known now."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, cast

from gpudoctor.model import SourceKind, SourceLoader, SourceSite
from gpudoctor.source import frames as heat
from gpudoctor.source import loaders
from gpudoctor.source.frames import Candidate, Frame, Heat
from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.later_use import later_uses
from gpudoctor.source.project import Module, dotted
from gpudoctor.source.values import BATCH, FRESH, MAYBE, Why

if TYPE_CHECKING:
    from gpudoctor.source.walk import Walked

# These are told wherever they stand; all others only in a step loop.
ANYWHERE = frozenset(
    [
        "anomaly-detection",
        "single-tensor-optimizer",
        "read-before-copy-done",
        "side-stream",
        "cuda-in-worker",
        "handle-before-fork",
        "iterable-not-split",
        "sampler-missing",
        "set-epoch-missing",
        "device-from-global-rank",
        "removed-interface",
        "find-unused-parameters",
        "data-parallel",
        "layers-by-hand",
        "fsdp-one-unit",
        "synchronize-one-device",
    ]
)
# A GPU must have been seen somewhere in the program.
NEEDS_GPU = frozenset(
    ["single-tensor-optimizer", "anomaly-detection", "checkpoint", "pinned-inline", "empty-cache", "synchronize"]
)


def conclude(it: Interpreter, result: Walked) -> None:
    decide = Heat(trains=it.trains)
    seen: set[tuple[str, int, str, str]] = set()
    edits: dict[int, dict[int, str]] = {}
    for candidate in it.candidates:
        for kind, operation in _names(candidate):
            frame = None
            if kind not in ANYWHERE:
                frame = decide.step_loop(candidate.frames, kind)
                if frame is None:
                    continue
                if _only_guessed(candidate, frame):
                    continue
            final = _kind(it, candidate, kind, frame)
            if final is None:
                continue
            key = (candidate.module.subject, candidate.line, final, operation)
            if key in seen:
                continue
            seen.add(key)
            site = _site(it, candidate, final, operation, frame, edits)
            result.sites.append((candidate.extra.get("standalone"), site))
    result.hot_loops += _hot_loops(it, decide)
    result.loaders += [pair for loader in it.loaders.values() if (pair := _loader(it, loader, decide)) is not None]


def _only_guessed(candidate: Candidate, frame: Frame) -> bool:
    """A function that nobody was seen to call, a loop that neither trains nor calls a model, and a device that is only
    a variable: too little to say anything."""
    value = candidate.value
    certain = frame.trains or frame.iterates_loader or frame.models or not frame.is_loop
    return candidate.extra.get("standalone") is not None and not certain and (value is None or value.device == MAYBE)


def _names(candidate: Candidate) -> list[tuple[str, str]]:
    """One line may be told by two rules: a value that is read to be printed, a range over a device value."""
    names = [(candidate.kind, candidate.operation)]
    if candidate.extra.get("printed"):
        names.append(("print", candidate.operation))
    if candidate.operation == "range":
        names.append(("branch", candidate.operation))
    if candidate.kind == "copy-to-host" and candidate.operation == "tolist":
        names.append(("host-read", candidate.operation))
    return names


def _kind(it: Interpreter, candidate: Candidate, kind: str, frame: Frame | None) -> str | None:
    extra = candidate.extra
    if kind in NEEDS_GPU and it.uses_gpu is None and not _on_gpu_by_loop(frame, kind) and not extra.get("framework"):
        return None
    if kind == "copy-to-device":
        return _copy_kind(candidate, extra, frame)
    if kind == "built-on-host" and frame is not None:
        return kind
    if kind == "pinned-inline" and frame is not None:
        # a buffer that is pinned once and used again stands outside of the loop
        return kind
    if kind == "anomaly-detection":
        guarded = any(f.kind in (heat.GUARD, heat.SOFT_GUARD) for f in candidate.frames)
        return kind if (it.trains or extra.get("framework")) and not guarded else None
    if kind == "synchronize":
        return kind
    return kind


def _on_gpu_by_loop(frame: Frame | None, kind: str) -> bool:
    """torch.cuda functions show by themselves that there is a GPU, once the loop around them trains."""
    if frame is None:
        return False
    return frame.kind == heat.HOOK or frame.work > 0 or (kind in ("empty-cache", "synchronize") and frame.trains)


def _copy_kind(candidate: Candidate, extra: dict[str, Any], frame: Frame | None) -> str | None:
    non_blocking, pinned = extra["non_blocking"], extra["pinned"]
    if extra.get("inline") and non_blocking is not False:
        return None  # told as pinned-inline
    if non_blocking is None or (non_blocking and pinned is not False):
        return None
    if frame is not None and extra["origin"] != BATCH and not _made_inside(candidate, extra["made_in"], frame):
        again = _assigned_again(candidate, frame)
        if again == "moved":
            return None
        return "copy-to-device" if again else "constant-to-device"
    if extra["origin"] == FRESH:
        return "built-on-host"
    return "copy-to-device"


def _made_inside(candidate: Candidate, made_in: Frame | None, frame: Frame) -> bool:
    """Whether a tensor was made in the hot loop or in a loop inside it."""
    if made_in is None:
        return False
    inside = candidate.frames[candidate.frames.index(frame) :]
    return made_in in inside or not any(made_in is f for f in candidate.frames)


def _assigned_again(candidate: Candidate, frame: Frame) -> str | None:
    """Whether what is copied gets another value on the way round ("new"), or only itself, moved ("moved": then the
    first round copies and no other)."""
    func = getattr(candidate.node, "func", None)
    name = dotted(func.value) if isinstance(func, ast.Attribute) else None
    if name is None:
        return None
    round_ = _around(candidate, frame)
    if round_ is None or ("." not in name and not isinstance(round_, (ast.For, ast.AsyncFor, ast.While))):
        return None  # a local name begins anew in each call
    values = [
        node.value
        for node in ast.walk(round_)
        if isinstance(node, ast.Assign) and any(dotted(target) == name for target in node.targets)
    ]
    if any(not _moves(value, name) for value in values):
        return "new"
    return "moved" if values else None


def _around(candidate: Candidate, frame: Frame) -> ast.AST | None:
    """The hot loop itself where the line stands in it, else the innermost function around the line."""
    found: ast.AST | None = None
    pending: list[ast.AST] = [candidate.module.tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            first = getattr(node, "lineno", None)  # a match_case has no line of its own, the statements in it do
            if first is not None and not first <= candidate.line <= (getattr(node, "end_lineno", None) or first):
                continue
            pending.append(node)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found = node
            loop = isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and frame.module is candidate.module
            if loop and frame.line == first:
                return node
    return found


def _moves(value: ast.expr, name: str) -> bool:
    """``x.to(device)`` of x itself."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and dotted(value.func.value) == name


def _site(
    it: Interpreter,
    candidate: Candidate,
    kind: str,
    operation: str,
    frame: Frame | None,
    edits: dict[int, dict[int, str]],
) -> SourceSite:
    module, extra = candidate.module, candidate.extra
    value = candidate.value
    why: Why | None = extra.get("why") or (value.why if value is not None else None)
    if why is None and kind in NEEDS_GPU:
        why = it.uses_gpu
    line = candidate.line
    loader = extra.get("loader")
    first, last = candidate.statement
    places = module.source.places
    place = places[line - 1] if places is not None and 0 < line <= len(places) else None
    calls = candidate.calls[frame.calls :] if frame is not None else ()
    if frame is not None and frame.kind in (heat.HOOK, heat.ONE_STEP):
        calls = calls[1:]
    return SourceSite(
        site=f"{module.subject}:{module.line_of(line)}",
        kind=cast("SourceKind", kind),
        operation=operation,
        text=module.text_of(candidate.node),
        function=candidate.function,
        hot=_hot_text(frame) if frame is not None else None,
        hot_site=f"{frame.module.subject}:{frame.module.line_of(frame.line)}" if frame is not None else None,
        chain=tuple(f"{c.caller.subject}:{c.caller.line_of(c.line)} calls {c.function.name}()" for c in calls),
        device=why.text if why is not None else None,
        device_site=why.site if why is not None else None,
        sure=value is None or value.device != MAYBE,
        pinned=extra.get("pinned"),
        non_blocking=extra.get("non_blocking"),
        from_loader=loader.site if loader is not None and hasattr(loader, "site") else None,
        edit=_edit(candidate, kind, edits),
        detail=_detail(candidate),
        first_line=module.line_of(first),
        last_line=module.line_of(last),
        cell=place.cell if place is not None else None,
        cell_line=place.cell_line if place is not None else None,
    )


def _detail(candidate: Candidate) -> str | None:
    extra = candidate.extra
    for key in ("detail", "updated", "copied"):
        if extra.get(key):
            return str(extra[key])
    return None


def _hot_text(frame: Frame) -> str:
    if frame.kind in (heat.HOOK, heat.ONE_STEP):
        return frame.text
    if frame.trains:
        what = "a training loop"
    elif frame.iterates_loader:
        what = "a loop over a DataLoader"
    else:
        what = "a loop that queues work on the GPU"
    return f"`{frame.text}` is {what}"


def _edit(candidate: Candidate, kind: str, edits: dict[int, dict[int, str]]) -> str | None:
    """The edit of prescribe that may be tried at this line."""
    if candidate.module.source.places is not None:
        return None
    if kind in ("synchronize", "empty-cache"):
        return "drop-call"
    if kind == "copy-to-device" and candidate.operation in ("to", "cuda"):
        return "non-blocking" if candidate.extra.get("non_blocking") is False else None
    if kind == "host-read" and candidate.operation in ("item", "float"):
        known = edits.get(id(candidate.module))
        if known is None:
            known = edits[id(candidate.module)] = _sums(candidate.module)
        name = known.get(candidate.line)
        if name is not None:
            judged = later_uses(candidate.module.source.text, name, candidate.line)
            if judged.safe and judged.reason is None:
                return "device-accumulator"
    return None


def _sums(module: Module) -> dict[int, str]:
    """Lines that add to a name: ``total += loss.item()``."""
    found: dict[int, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
            found[node.lineno] = node.target.id
    return found


def _hot_loops(it: Interpreter, decide: Heat) -> list[str]:
    hot = (frame for frame in it.all_frames if decide.is_hot(frame) and (frame.work or frame.kind == heat.HOOK))
    return list(dict.fromkeys(f"{frame.module.subject}:{frame.module.line_of(frame.line)}" for frame in hot))


def _loader(
    it: Interpreter, loader: loaders.Loader, decide: Heat
) -> tuple[tuple[str, str] | None, SourceLoader] | None:
    """A loader that feeds a hot loop of a program that uses a GPU."""
    chosen: tuple[Frame, ...] | None = None
    for frames in loader.loops:
        frame = decide.step_loop(frames, "loader")
        if frame is frames[-1] and (chosen is None or (frame.trains and not chosen[-1].trains)):
            chosen = frames
    if chosen is None:
        return None
    frame = chosen[-1]
    moved = next(((site, value) for site, value, frames in loader.moves if decide.step_loop(frames, "loader")), None)
    why = moved[1].why if moved is not None else it.uses_gpu
    if why is None or (moved is None and not frame.work):
        return None
    around = loaders.epochs_around(chosen)
    module, line = loader.module, loader.node.lineno
    places = module.source.places
    place = places[line - 1] if places is not None and 0 < line <= len(places) else None
    first, last = loader.statement
    return loader.standalone, SourceLoader(
        site=loader.site,
        text=module.text_of(loader.node),
        hot=_hot_text(frame),
        hot_site=f"{frame.module.subject}:{frame.module.line_of(frame.line)}",
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        dataset=loader.dataset.name or (loader.dataset.ref.name if loader.dataset.kind == "instance" else None),
        costly=loaders.costly(it, loader.dataset),
        epochs=around.text if around is not None else None,
        epochs_site=f"{around.module.subject}:{around.module.line_of(around.line)}" if around is not None else None,
        moved=moved[0] if moved is not None else None,
        device=why.text,
        device_site=why.site,
        trains=frame.trains,
        sure=moved is None or moved[1].device != MAYBE,
        first_line=module.line_of(min(first, line) or line),
        last_line=module.line_of(max(last, loader.node.end_lineno or line)),
        cell=place.cell if place is not None else None,
        cell_line=place.cell_line if place is not None else None,
    )
