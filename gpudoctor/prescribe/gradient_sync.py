"""Accumulated gradients are exchanged in the backward pass before an optimizer step only: what ``no_sync()`` does.

The edit sets ``require_backward_grad_sync``, the attribute of DistributedDataParallel that ``no_sync()`` sets
(torch/nn/parallel/distributed.py): one line before the forward pass, where a ``with`` would indent all of it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpudoctor.prescribe.call_edit import find_calls
from gpudoctor.prescribe.tree import CannotEditError, Tree, method_calls, name_or_attribute

if TYPE_CHECKING:
    import libcst as cst

_DECIDED = re.compile(r"\bno_sync\b|\brequire_backward_grad_sync\b")
_OTHER_STEPS = re.compile(r"sched|warmup|ema|prof|env", re.IGNORECASE)  # receivers of a step() that is not meant


def gradient_sync(tree: Tree, line: int) -> str:
    """The text with the line put above the forward pass at `line`."""
    forward, model, test = find(tree)
    if tree.lines(forward)[0] != line:
        raise CannotEditError("the forward pass of the accumulated loss is not at this line")
    start = tree.line_start(tree.span(forward)[0])
    new = f"{tree.indentation(start)}{model}.require_backward_grad_sync = {test}{tree.newline()}"
    return tree.spliced([(start, start, new)])


def find(tree: Tree) -> tuple[cst.CSTNode, str, str]:
    """(statement of the forward pass, the model's name, the test that says whether an optimizer step follows it).

    CannotEditError says why it cannot be told. Every optimizer step of the file must follow the one backward pass:
    a second one, say for what is left after the loop, would use gradients that were never exchanged.
    """
    if _DECIDED.search(tree.text):
        raise CannotEditError("the script decides itself when gradients are exchanged")
    model = _model(tree)
    backward = tree.statement(_only(tree, "backward", "backward pass"))
    step = tree.statement(_only(tree, "step", "optimizer step"))
    block, last = tree.siblings(backward)
    first = next((number for number in range(last + 1) if _reads(tree, block[number], model)), None)
    if first is None:
        raise CannotEditError(f"{model} is not used in the block of the backward pass")
    test = _inner_loop(tree, backward, step) or _branch(tree, backward, step, first)
    return block[first], model, test


def _model(tree: Tree) -> str:
    import libcst as cst

    names = set()
    for call in find_calls(tree, "gradient_as_bucket_view"):
        assignment = tree.parents[call]
        if isinstance(assignment, cst.Assign):
            target = assignment.targets[0].target
            if len(assignment.targets) > 1 or not name_or_attribute(target):
                raise CannotEditError("the wrapped model has no name of its own")
            names.add(tree.code(target))
    if len(names) != 1:
        raise CannotEditError("not one model is wrapped in DistributedDataParallel and given a name")
    return names.pop()


def _only(tree: Tree, method: str, what: str) -> cst.Call:
    calls = [
        call
        for call, receiver in method_calls(tree, method)
        if not (method == "step" and _OTHER_STEPS.search(tree.code(receiver)))
    ]
    if len(calls) != 1:
        raise CannotEditError(f"there is not one {what} in the file")
    return calls[0]


def _reads(tree: Tree, node: cst.CSTNode, name: str) -> bool:
    import libcst as cst

    return any(isinstance(part, (cst.Name, cst.Attribute)) and tree.code(part) == name for part in tree.walk(node))


def _inner_loop(tree: Tree, backward: cst.CSTNode, step: cst.CSTNode) -> str | None:
    """``for micro in range(n)`` around the backward pass, with the step behind that loop: its last round."""
    import libcst as cst

    loop = next((up for up in tree.up(backward) if isinstance(up, (cst.For, cst.While))), None)
    if not isinstance(loop, cst.For) or not isinstance(loop.target, cst.Name) or loop in tree.up(step):
        return None
    block, position = tree.siblings(loop)
    if not any(step is node or node in tree.up(step) for node in block[position + 1 :]):
        return None
    counts = loop.iter
    if not isinstance(counts, cst.Call) or tree.code(counts.func) != "range" or len(counts.args) != 1:
        return None
    if tree.parents[backward] is not loop.body or _assigned(tree, loop.body, loop.target.value):
        return None
    end = counts.args[0].value
    if isinstance(end, cst.Integer):
        return f"{loop.target.value} == {int(end.value) - 1}"
    shown = tree.code(end) if name_or_attribute(end) else f"({tree.code(end)})"
    return f"{loop.target.value} == {shown} - 1"


def _branch(tree: Tree, backward: cst.CSTNode, step: cst.CSTNode, first: int) -> str:
    """``if count % n == 0`` behind the backward pass, with the step in it: its test, as it will be by then."""
    import libcst as cst

    block, last = tree.siblings(backward)
    around = {id(up) for up in tree.up(step)}
    position, branch = next(
        ((number, node) for number, node in enumerate(block) if number > last and id(node) in around), (0, None)
    )
    if not isinstance(branch, cst.If) or branch.orelse is not None or tree.parents[step] is not branch.body:
        raise CannotEditError("the optimizer step is not in a branch behind the backward pass")
    if not any(isinstance(part, cst.Modulo) for part in tree.walk(branch.test)):
        raise CannotEditError("the branch of the optimizer step does not count passes")
    for part in tree.walk(branch.test):
        if isinstance(part, (cst.NamedExpr, cst.Await, cst.Subscript)):
            raise CannotEditError("the test of the branch may do more than compare")
        if isinstance(part, cst.Call) and tree.code(part.func) != "len":
            raise CannotEditError(f"the test of the branch calls {tree.code(part.func)}")
    test = tree.code(branch.test)
    between = block[first:position]
    for name in sorted({part.value for part in tree.walk(branch.test) if isinstance(part, cst.Name)}):
        changes = [statement for statement in between if _assigned(tree, statement, name)]
        if len(changes) > 1:
            raise CannotEditError(f"{name} changes more than once between the forward pass and the optimizer step")
        for statement in changes:
            added = _added(statement)
            if added is None:
                raise CannotEditError(f"{name} changes between the forward pass and the optimizer step")
            test = re.sub(rf"(?<![\w.]){re.escape(name)}\b", f"({name} + {added})", test)
    return test


def _added(statement: cst.CSTNode) -> str | None:
    """The number of ``name += number``."""
    import libcst as cst

    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    small = statement.body[0]
    if not isinstance(small, cst.AugAssign) or not isinstance(small.operator, cst.AddAssign):
        return None
    if not isinstance(small.target, cst.Name) or not isinstance(small.value, cst.Integer):
        return None
    return small.value.value


def _assigned(tree: Tree, node: cst.CSTNode, name: str) -> bool:
    import libcst as cst

    targets = (
        part.target
        for part in tree.walk(node)
        if isinstance(part, (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr))
    )
    return any(isinstance(part, cst.Name) and part.value == name for target in targets for part in tree.walk(target))
