"""Arguments at a DataLoader call: set, replaced, removed, in the style in which the call is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpudoctor.prescribe.tree import LINE_LIMIT, CannotEditError, Splice, Tree, last_name

if TYPE_CHECKING:
    import libcst as cst

Value = int | bool | None

# The positional order of torch.utils.data.DataLoader; a test holds it against the installed torch.
POSITIONAL = (
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)
_DEFAULTS: dict[str, Value] = {
    "num_workers": 0,
    "pin_memory": False,
    "persistent_workers": False,
    "prefetch_factor": 2,
    "in_order": True,
}
_NEEDS_WORKERS = ("prefetch_factor", "persistent_workers")  # DataLoader raises ValueError for them without workers
_KNOWN = re.compile(
    r"(torch\.utils\.data\.(.*\.)?DataLoader|torchdata\.stateful_dataloader\.(.*\.)?StatefulDataLoader)$"
)


def find_loader(tree: Tree, line: int) -> cst.Call:
    """The one DataLoader call that covers `line`."""
    import libcst as cst

    star = any(isinstance(node, cst.ImportStar) for node in tree.walk())
    known, other = [], []
    for call in tree.at(cst.Call, line):
        last, names = last_name(call.func), tree.refers_to(call.func)
        if any(_KNOWN.match(name) for name in names) or (
            last == "DataLoader" and star and names <= {"builtins.DataLoader"}
        ):
            known.append(call)
        elif last.endswith("Loader"):
            other.append(last)
    if len(known) > 1:
        raise CannotEditError("several DataLoader calls stand in these lines")
    if known:
        return known[0]
    if other:
        raise CannotEditError(f"{other[0]} is not torch's DataLoader, so its arguments are not known")
    raise CannotEditError("no DataLoader call at this line")


def bound_arguments(call: cst.Call) -> dict[str, cst.Arg]:
    """Arguments by parameter name; those given by position are matched with DataLoader's signature."""
    bound: dict[str, cst.Arg] = {}
    for position, argument in enumerate(call.args):
        if argument.star:
            raise CannotEditError(f"the call takes {argument.star}arguments, whose contents are not known")
        if argument.keyword is not None:
            bound[argument.keyword.value] = argument
        elif position < len(POSITIONAL):
            bound[POSITIONAL[position]] = argument
        else:
            raise CannotEditError("the call has more positional arguments than DataLoader takes")
    return bound


def set_arguments(tree: Tree, line: int, wanted: Mapping[str, Value]) -> str:
    """The text with loader arguments set, replaced or (None) removed."""
    call = find_loader(tree, line)
    bound = bound_arguments(call)
    wanted = _sensible(tree, bound, wanted)
    if not wanted:
        raise CannotEditError("the loader has these settings already")
    splices: list[Splice] = []
    gone = [bound[name] for name, value in wanted.items() if value is None]
    for name, value in wanted.items():
        if name in bound and value is not None:
            splices.append((*tree.span(bound[name].value), str(value)))
    if any(argument.keyword is None for argument in gone):
        raise CannotEditError("an argument given by position cannot be removed")
    added = [f"{name}={value}" for name, value in wanted.items() if name not in bound]
    return tree.spliced(splices + removals(tree, call, gone) + additions(tree, call, gone, added))


def _sensible(tree: Tree, bound: Mapping[str, cst.Arg], wanted: Mapping[str, Value]) -> dict[str, Value]:
    """Leave out what changes nothing or would raise: defaults, equal values, worker settings without workers."""
    result = dict(wanted)
    workers = str(result.get("num_workers", tree.code(bound["num_workers"].value) if "num_workers" in bound else 0))
    if workers in {"0", "None"}:
        result.update(dict.fromkeys(_NEEDS_WORKERS))
    for name, value in list(result.items()):
        if name not in bound:
            if value is None or (name in _DEFAULTS and value == _DEFAULTS[name]):
                del result[name]
        elif value is not None and tree.code(bound[name].value) == str(value):
            del result[name]
        elif name == "prefetch_factor" and value == _DEFAULTS[name]:
            result[name] = None  # back to the default
    return result


def removals(tree: Tree, call: cst.Call, gone: Sequence[cst.Arg]) -> list[Splice]:
    """Take arguments out: whole lines where they stand alone, else with the comma that joins them."""
    splices: list[Splice] = []
    gone_ids = {id(argument) for argument in gone}
    kept_end = None  # end of the last argument that stays
    arguments = list(call.args)
    for position, argument in enumerate(arguments):
        start, end = tree.span(argument)
        if id(argument) not in gone_ids:
            kept_end = end
            continue
        tail = all(id(later) in gone_ids for later in arguments[position:])
        if (lines := _alone(tree, argument)) is not None:
            splices.append((*lines, ""))
        elif not tail:
            splices.append((start, tree.span(arguments[position + 1])[0], ""))
        elif kept_end is not None:
            splices.append((kept_end, end, ""))
            kept_end = end
        else:
            raise CannotEditError("nothing would be left in the call")
    return splices


def _alone(tree: Tree, argument: cst.Arg) -> tuple[int, int] | None:
    """The span of the whole lines of an argument that shares them with nothing but its comma (and its comment)."""
    start, end = tree.span(argument)
    first, last = tree.line_start(start), tree.line_end(end)
    after = tree.text[end:last].strip()
    if tree.text[first:start].strip() or not re.fullmatch(r",\s*(#.*)?", after):
        return None
    return first, next((offset for offset in tree.starts if offset > last), last)


def additions(tree: Tree, call: cst.Call, gone: Sequence[cst.Arg], added: Sequence[str]) -> list[Splice]:
    """Append arguments: on lines of their own where the call has one a line, else behind the last one."""
    if not added:
        return []
    gone_ids = {id(argument) for argument in gone}
    kept = [argument for argument in call.args if id(argument) not in gone_ids]
    if not kept:
        raise CannotEditError("the call has no arguments")
    last = kept[-1]
    end = tree.span(last)[1]
    own_lines = all(not tree.text[tree.line_start(s) : s].strip() for s, _ in map(tree.span, call.args))
    closing = tree.span(call)[1] - 1
    if own_lines and tree.lines(call)[1] > tree.lines(last)[1]:
        trailing = "," in tree.text[end:closing].split("#")[0]
        indentation, newline = tree.indentation(tree.span(last)[0]), tree.newline()
        comma = "" if trailing else ","
        lines = f",{newline}{indentation}".join(added) + ("," if trailing else "")
        line_end = tree.line_end(end)
        return [(end, end, comma), (line_end, line_end, f"{newline}{indentation}{lines}")]
    joined = ", ".join(added)
    start_of_line, end_of_line = tree.line_start(end), tree.line_end(end)
    removed = sum(stop - start for start, stop, _ in removals(tree, call, gone) if start_of_line <= start < end_of_line)
    if end_of_line - start_of_line - removed + len(joined) + 2 <= LINE_LIMIT:
        return [(end, end, ", " + joined)]
    return [(end, end, f",{tree.newline()}{_column_of_arguments(tree, call)}{joined}")]


def _column_of_arguments(tree: Tree, call: cst.Call) -> str:
    """White space up to the first argument, so that a wrapped line stands below it."""
    start = tree.span(call.args[0])[0]
    before = tree.text[tree.line_start(start) : start]
    return "".join("\t" if character == "\t" else " " for character in before)
