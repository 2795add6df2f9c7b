"""Single arguments of known calls, and settings that are made once after the imports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gpudoctor.prescribe.loader_edit import additions, removals
from gpudoctor.prescribe.tree import CannotEditError, Splice, Tree, last_name

if TYPE_CHECKING:
    import libcst as cst

Value = int | bool | None
_OPTIMIZERS = r"torch\.optim\.(\w+\.)?(Adam|AdamW|SGD)"
_DDP = r"torch\.nn\.parallel\.(distributed\.)?DistributedDataParallel"
# Argument by argument: the calls that take it, and the arguments that exclude it.
_KNOWN: dict[str, tuple[str, frozenset[str]]] = {
    "fused": (_OPTIMIZERS, frozenset({"foreach", "differentiable"})),
    "find_unused_parameters": (_DDP, frozenset({"static_graph"})),
    "gradient_as_bucket_view": (_DDP, frozenset()),
    "set_to_none": (r"(.*\.)?zero_grad", frozenset()),
}
# Each setting with what says that the script has decided about it.
SETTINGS: dict[str, tuple[str, str]] = {
    "torch.backends.cudnn.benchmark": (
        "torch.backends.cudnn.benchmark = True",
        r"cudnn\.(benchmark|deterministic)|use_deterministic_algorithms",
    ),
    "torch.set_float32_matmul_precision": (
        'torch.set_float32_matmul_precision("high")',
        r"set_float32_matmul_precision|allow_tf32|fp32_precision",
    ),
}


def find_calls(tree: Tree, argument: str) -> Iterator[cst.Call]:
    """The calls of the file that take the argument."""
    import libcst as cst

    pattern = re.compile(_KNOWN[argument][0])
    for node in tree.walk():
        if not isinstance(node, cst.Call):
            continue
        names = tree.refers_to(node.func) or {last_name(node.func)}
        if any(pattern.fullmatch(name) for name in names):
            yield node


def written(tree: Tree, call: cst.Call, argument: str) -> str | None:
    """The value of an argument of a call as it is written, or None when it is absent."""
    found = [a.value for a in call.args if a.keyword is not None and a.keyword.value == argument]
    return tree.code(found[0]) if found else None


def set_call_arguments(tree: Tree, line: int, wanted: Mapping[str, Value]) -> str:
    """The text with arguments of the call at `line` set, or (None) removed."""
    splices: list[Splice] = []
    for name, value in wanted.items():
        if name not in _KNOWN:
            raise CannotEditError(f"{name} is not an argument that is edited")
        calls = [call for call in find_calls(tree, name) if tree.lines(call)[0] <= line <= tree.lines(call)[1]]
        if len(calls) != 1:
            raise CannotEditError(f"not one call that takes {name} at this line")
        splices += _one(tree, calls[0], name, value)
    return tree.spliced(splices)


def _one(tree: Tree, call: cst.Call, name: str, value: Value) -> list[Splice]:
    if any(argument.star for argument in call.args):
        raise CannotEditError("the call takes arguments whose names are not known")
    keywords = {argument.keyword.value: argument for argument in call.args if argument.keyword is not None}
    if found := sorted(_KNOWN[name][1] & keywords.keys()):
        raise CannotEditError(f"the call sets {found[0]}")
    present = keywords.get(name)
    if value is None:
        if present is None:
            raise CannotEditError(f"{name} is not set there")
        if len(call.args) == 1:
            return [(*tree.span(present), "")]
        return removals(tree, call, [present])
    if present is not None:
        if tree.code(present.value) == str(value):
            raise CannotEditError(f"{name} is set there already")
        return [(*tree.span(present.value), str(value))]
    return additions(tree, call, [], [f"{name}={value}"])


def setting_line(tree: Tree) -> int | None:
    """The last line of the imports at the head of the file, where torch is known by its name; else None."""
    import libcst as cst

    last, known = None, False
    for statement in tree.module.body:
        if isinstance(statement, cst.BaseCompoundStatement):
            break
        for small in statement.body:
            if isinstance(small, (cst.Import, cst.ImportFrom)):
                last = tree.lines(statement)[1]
            if isinstance(small, cst.Import):
                known = known or any(
                    alias.asname is None and re.match(r"torch(\.|$)", tree.code(alias.name)) for alias in small.names
                )
    return last if known else None


def add_setting(tree: Tree, line: int, name: str | None) -> str:
    """The text with a setting behind its imports, whose last line is `line`."""
    if name not in SETTINGS:
        raise CannotEditError(f"{name} is not a setting that is made")
    statement, decided = SETTINGS[name]
    if re.search(decided, tree.text):
        raise CannotEditError("the script sets it itself")
    if setting_line(tree) != line:
        raise CannotEditError("the imports do not end at this line")
    end = tree.line_end(tree.starts[line - 1])
    return tree.spliced([(end, end, f"{tree.newline()}{statement}")])
