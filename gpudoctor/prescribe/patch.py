"""Source edits as a patch: apply_edits gives the new text, unified_diff the patch, apply_to_disk writes it."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import CodeType

from gpudoctor.model import Edit, EditKind
from gpudoctor.prescribe.accumulator import device_accumulator
from gpudoctor.prescribe.call_edit import add_setting, set_call_arguments
from gpudoctor.prescribe.collect import collect_device
from gpudoctor.prescribe.defer import defer_read
from gpudoctor.prescribe.disk import apply_to_disk, encoding_of, revert, unified_diff
from gpudoctor.prescribe.gradient_sync import gradient_sync
from gpudoctor.prescribe.imports import Imports, add_imports
from gpudoctor.prescribe.loader_edit import set_arguments
from gpudoctor.prescribe.log_edit import EVERY, log_every
from gpudoctor.prescribe.model_edit import autocast, channels_last
from gpudoctor.prescribe.on_device import make_on_device
from gpudoctor.prescribe.pin_edit import pin_copy
from gpudoctor.prescribe.sync_edit import drop_call, non_blocking
from gpudoctor.prescribe.tree import CannotEditError, Tree, parse, used_names
from gpudoctor.prescribe.whole_batch import whole_batch

__all__ = ["Patched", "apply_edits", "apply_to_disk", "encoding_of", "revert", "unified_diff"]

# At one line the shape of the call is changed before its settings, which are then wrapped to fit it.
_ORDER = (
    "whole-batch",
    "loader-arguments",
    "non-blocking",
    "make-on-device",
    "pin-copy",
    "drop-call",
    "device-accumulator",
    "collect-device",
    "defer-read",
    "call-argument",
    "gradient-sync",
    "channels-last",
    "log-every",
    "autocast",
    "setting",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patched:
    """`lines` are the changed lines of the new text that hold code, 1-based; where a call was dropped, the line of
    the statement before it, which runs whenever the call would have run."""

    text: str
    applied: tuple[Edit, ...] = ()
    refused: tuple[tuple[Edit, str], ...] = ()
    lines: tuple[int, ...] = ()


def apply_edits(text: str, edits: Sequence[Edit], *, file: str) -> Patched:
    """Apply what can be applied; every other edit is refused with the reason, and the rest of the text stays as it is.

    text: the source; edits: sites are ``file:LINE`` of this text. Never raises for bad source or a wrong site.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    current = text.removeprefix("\ufeff")
    applied: list[Edit] = []
    refused: list[tuple[Edit, str]] = []
    imports: list[Imports] = []
    moved: dict[int, int] = {}  # lines that an edit put above its own line
    taken = _identifiers(current) if any(edit.kind == "whole-batch" for edit in edits) else set()
    # From the bottom up, so that the lines of the sites above stay right.
    ordered = sorted(edits, key=lambda edit: (-(_line(edit.site, file) or 0), _ORDER.index(edit.kind)))
    for edit in ordered:
        line = _line(edit.site, file)
        if line is None:
            refused.append((edit, f"{edit.site!r} is not a line of {file!r}"))
            continue
        try:
            changed, needed, above = _one(current, edit, line + moved.get(line, 0), taken)
            _compiled(changed)
        except CannotEditError as error:
            refused.append((edit, str(error)))
        except (SyntaxError, ValueError, RecursionError):
            refused.append((edit, "the edit does not fit the way in which this line is written"))
        else:
            current = changed
            applied.append(edit)
            imports += [needed] if needed is not None else []
            moved[line] = moved.get(line, 0) + above
    for needed in imports:
        current = add_imports(current, needed)
    new = mark + current
    positions = {id(edit): number for number, edit in enumerate(edits)}
    return Patched(
        text=new,
        applied=tuple(sorted(applied, key=lambda edit: positions[id(edit)])),
        refused=tuple(sorted(refused, key=lambda pair: positions[id(pair[0])])),
        lines=_changed_lines(text, new),
    )


def _line(site: str, file: str) -> int | None:
    head, _, tail = site.rpartition(":")
    return int(tail) if head == file and re.fullmatch(r"[0-9]{1,9}", tail) and int(tail) > 0 else None


_AT: dict[EditKind, Callable[[Tree, int], str]] = {
    "non-blocking": non_blocking,
    "gradient-sync": gradient_sync,
    "channels-last": channels_last,
    "autocast": autocast,
}
_NAMED: dict[EditKind, Callable[[Tree, int, str | None], str]] = {
    "drop-call": drop_call,
    "collect-device": collect_device,
    "defer-read": defer_read,
    "setting": add_setting,
}
_FULL: dict[EditKind, Callable[[Tree, int, Edit], str]] = {
    "loader-arguments": lambda tree, line, edit: set_arguments(tree, line, edit.arguments),
    "make-on-device": lambda tree, line, edit: make_on_device(tree, line, random=bool(edit.arguments.get("random"))),
    "device-accumulator": lambda tree, line, edit: device_accumulator(
        tree, line, edit.name, convert=bool(edit.arguments.get("convert"))
    ),
    "call-argument": lambda tree, line, edit: set_call_arguments(tree, line, edit.arguments),
    "log-every": lambda tree, line, edit: log_every(tree, line, int(edit.arguments.get("every") or EVERY)),
}
_ONE_ABOVE = {"log-every", "gradient-sync", "autocast"}  # they put a line above their own


def _one(text: str, edit: Edit, line: int, taken: Collection[str]) -> tuple[str, Imports | None, int]:
    """The new text, the imports that it needs, and the number of lines put above the edit's own."""
    tree = parse(text)
    if edit.kind == "whole-batch":
        return whole_batch(tree, line, taken)
    if edit.kind == "pin-copy":
        new, above = pin_copy(tree, line)
        return new, None, above
    if edit.kind in _AT:
        new = _AT[edit.kind](tree, line)
    elif edit.kind in _NAMED:
        new = _NAMED[edit.kind](tree, line, edit.name)
    else:
        new = _FULL[edit.kind](tree, line, edit)
    return new, None, int(edit.kind in _ONE_ABOVE)


def _identifiers(text: str) -> set[str]:
    try:
        return used_names(parse(text))
    except CannotEditError:
        return set()  # every edit will be refused with the reason


def _changed_lines(old: str, new: str) -> tuple[int, ...]:
    if old == new:
        return ()
    code = _code_lines(new)
    changed: set[int] = set()
    old_lines, new_lines = (re.split(r"\r\n?|\n", text) for text in (old, new))
    for kind, _, _, start, end in difflib.SequenceMatcher(None, old_lines, new_lines, autojunk=False).get_opcodes():
        if kind in {"insert", "replace"}:
            changed.update(number for number in range(start + 1, end + 1) if number in code)
        elif kind == "delete":
            before = max((number for number in code if number <= start), default=None)
            changed.update([before] if before is not None else [])
    return tuple(sorted(changed))


def _compiled(text: str) -> CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's own, such as invalid escapes
        return compile(text.removeprefix("\ufeff"), "<patched>", "exec", dont_inherit=True)


def _code_lines(text: str) -> set[int]:
    """Lines that have bytecode, so that running them can be observed."""
    lines: set[int] = set()
    pending = [_compiled(text)]
    while pending:
        code = pending.pop()
        lines.update(number for _, _, number in code.co_lines() if number is not None)
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return lines
