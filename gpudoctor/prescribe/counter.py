"""Every N steps: the loop that a line stands in, its counter, and the test that lets the line run rarely."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpudoctor.prescribe.tree import CannotEditError, Splice, Tree, last_name, name_or_attribute, used_names

if TYPE_CHECKING:
    import libcst as cst

    Loop = cst.For | cst.While

_FRESH = ("step", "log_step", "loop_step")
_PROGRESS = {"tqdm", "trange", "track", "progress_bar"}
# A loop over these is a loop inside of a step.
_PARTS = {"parameters", "named_parameters", "modules", "named_modules", "children", "items", "keys", "values"}
_LIMITED = ("every", "interval", "freq")


@dataclass(frozen=True, slots=True)
class Guard:
    """`test` is true every N steps, and at the last one where that is cheap to say; `splices` give the loop a counter
    when it has none."""

    test: str
    splices: tuple[Splice, ...] = ()


@dataclass(frozen=True, slots=True)
class _Counter:
    name: str
    last: str | None = None  # what the counter is at the last step when the line runs


def loops_around(tree: Tree, node: cst.CSTNode) -> Iterator[Loop]:
    """The loops of the function whose body holds the node, the innermost first."""
    import libcst as cst

    child = node
    for parent in tree.up(node):
        if isinstance(parent, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            return
        if isinstance(parent, (cst.For, cst.While)) and parent.body is child:
            yield parent
        child = parent


def guard_for(tree: Tree, statement: cst.CSTNode, every: int) -> Guard:
    """The test for a statement in a loop; CannotEditError when the loop has no counter and can get none."""
    loop = next((loop for loop in loops_around(tree, statement) if not _inside_a_step(tree, loop, every)), None)
    if loop is None:
        raise CannotEditError("the line stands in no loop of its function")
    _refuse_limited(tree, statement, loop)
    found = list(_counters(tree, loop, statement))
    if not found:
        return _counted(tree, loop, every)
    words = re.findall(r"[\w.]+", tree.code(statement))
    named = [counter for counter in found if counter.name in words]
    counter = (named or found)[0]
    last = f" or {counter.name} == {counter.last}" if counter.last is not None else ""
    return Guard(test=f"{counter.name} % {every} == 0{last}")


def _inside_a_step(tree: Tree, loop: Loop, every: int) -> bool:
    """A short loop, or one over the parts of a model: it runs many times in one step."""
    import libcst as cst

    if not isinstance(loop, cst.For):
        return False
    if isinstance(loop.iter, (cst.Tuple, cst.List, cst.Dict, cst.Set)):
        return True
    iterated = _unwrapped(loop.iter)
    if not isinstance(iterated, cst.Call):
        return False
    if last_name(iterated.func) in _PARTS:
        return True
    bounds = [argument.value for argument in iterated.args]
    if last_name(iterated.func) != "range" or not all(isinstance(bound, cst.Integer) for bound in bounds):
        return False
    return len(range(*(int(tree.code(bound), 0) for bound in bounds))) <= every


def _unwrapped(node: cst.BaseExpression) -> cst.BaseExpression:
    """``range(n)`` of ``tqdm(range(n))``; ``trange(n)`` counts as it stands."""
    import libcst as cst

    while isinstance(node, cst.Call) and last_name(node.func) in _PROGRESS - {"trange"} and node.args:
        if node.args[0].keyword is not None or node.args[0].star:
            break
        node = node.args[0].value
    return node


def _refuse_limited(tree: Tree, statement: cst.CSTNode, loop: Loop) -> None:
    import libcst as cst

    for parent in (statement, *tree.up(statement)):
        if parent is loop:
            break
        if isinstance(parent, cst.If) and _limits(tree, parent.test):
            raise CannotEditError(f"line {tree.lines(parent)[0]} limits it already: raise the number there")
    block = loop.body.body if isinstance(loop.body, cst.IndentedBlock) else ()
    for earlier in block:
        if earlier is statement or statement in tree.walk(earlier):
            break
        skips = isinstance(earlier, cst.If) and any(isinstance(node, cst.Continue) for node in tree.walk(earlier))
        if isinstance(earlier, cst.If) and skips and _limits(tree, earlier.test):
            raise CannotEditError(f"line {tree.lines(earlier)[0]} limits it already: raise the number there")


def _limits(tree: Tree, test: cst.BaseExpression) -> bool:
    import libcst as cst

    return any(
        isinstance(node, cst.Modulo)
        or (isinstance(node, (cst.Name, cst.Attribute)) and any(word in last_name(node).lower() for word in _LIMITED))
        for node in tree.walk(test)
    )


def _counters(tree: Tree, loop: Loop, statement: cst.CSTNode) -> Iterator[_Counter]:
    """What the loop counts by ones: the target of range or enumerate, and names that its body increments."""
    import libcst as cst

    if isinstance(loop, cst.For) and (counter := _target(tree, loop)) is not None:
        yield counter
    block = loop.body.body if isinstance(loop.body, cst.IndentedBlock) else ()
    for part in block:
        for small in part.body if isinstance(part, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.AugAssign) and _increments(small) and name_or_attribute(small.target):
                name = tree.code(small.target)
                if _set_once(tree, loop, name):
                    yield _Counter(name, _last_increment(tree, loop, name, small, statement))


def _increments(node: cst.AugAssign) -> bool:
    import libcst as cst

    return isinstance(node.operator, cst.AddAssign) and isinstance(node.value, cst.Integer) and node.value.value == "1"


def _set_once(tree: Tree, loop: Loop, name: str) -> bool:
    """Whether the loop sets the name at one place only."""
    import libcst as cst

    places = 0
    for node in tree.walk(loop):
        target: cst.CSTNode | None = None
        if isinstance(
            node, (cst.AugAssign, cst.AnnAssign, cst.NamedExpr, cst.For, cst.Del, cst.AssignTarget, cst.CompFor)
        ):
            target = node.target
        elif isinstance(node, cst.AsName):
            target = node.name
        if target is not None and any(
            isinstance(part, (cst.Name, cst.Attribute)) and tree.code(part) == name for part in tree.walk(target)
        ):
            places += 1
    return places == 1


def _target(tree: Tree, loop: cst.For) -> _Counter | None:
    import libcst as cst

    iterated = _unwrapped(loop.iter)
    if not isinstance(iterated, cst.Call) or any(argument.star for argument in iterated.args):
        return None
    called, positional = last_name(iterated.func), [a.value for a in iterated.args if a.keyword is None]
    if called in {"range", "trange"} and isinstance(loop.target, cst.Name):
        if not 1 <= len(positional) <= 2 or not _set_once(tree, loop, loop.target.value):
            return None
        return _Counter(loop.target.value, _minus_one(tree, positional[-1]))
    if called != "enumerate" or not isinstance(loop.target, (cst.Tuple, cst.List)) or not loop.target.elements:
        return None
    first = loop.target.elements[0].value
    if not isinstance(first, cst.Name) or not _set_once(tree, loop, first.value):
        return None
    last = None
    if len(iterated.args) == 1 and isinstance(positional[0], cst.Name):
        length = f"len({positional[0].value})"
        last = f"{length} - 1" if length in tree.text else None  # the script asks for it, so it has one
    return _Counter(first.value, last)


def _minus_one(tree: Tree, bound: cst.BaseExpression) -> str | None:
    import libcst as cst

    if isinstance(bound, cst.Integer):
        return str(int(bound.value, 0) - 1)
    if name_or_attribute(bound) or (isinstance(bound, cst.Call) and last_name(bound.func) == "len"):
        return f"{tree.code(bound)} - 1"
    return None


def _last_increment(tree: Tree, loop: Loop, name: str, increment: cst.CSTNode, statement: cst.CSTNode) -> str | None:
    """The counter's value at the last step, from ``if step == n: break`` or ``while step < n``."""
    import libcst as cst

    before = tree.span(increment)[0] < tree.span(statement)[0]  # the line sees the number of this step already
    tests = [(loop.test, True)] if isinstance(loop, cst.While) else []
    for outer in loops_around(tree, loop):
        tests += [(outer.test, True)] if isinstance(outer, cst.While) else []
    block = loop.body.body if isinstance(loop.body, cst.IndentedBlock) else ()
    for part in block:
        ends = isinstance(part, cst.If) and any(isinstance(node, cst.Break) for node in tree.walk(part.body))
        if isinstance(part, cst.If) and ends and tree.span(part)[0] > tree.span(increment)[0]:
            tests.insert(0, (part.test, False))
    for test, stays in tests:
        if not isinstance(test, cst.Comparison) or len(test.comparisons) != 1 or tree.code(test.left) != name:
            continue
        operator, bound = test.comparisons[0].operator, test.comparisons[0].comparator
        if not isinstance(operator, (cst.LessThan,) if stays else (cst.Equal, cst.GreaterThanEqual)):
            continue
        if before and (isinstance(bound, cst.Integer) or name_or_attribute(bound)):
            return tree.code(bound)
        return _minus_one(tree, bound)
    return None


def _counted(tree: Tree, loop: Loop, every: int) -> Guard:
    """``for x in loader`` becomes ``for step, x in enumerate(loader)`` with a name that the file does not use."""
    import libcst as cst

    if not isinstance(loop, cst.For) or loop.asynchronous is not None:
        raise CannotEditError("the loop counts its steps nowhere")
    used = used_names(tree)
    if "enumerate" in {tree.code(t.target) for t in tree.walk() if isinstance(t, cst.AssignTarget)}:
        raise CannotEditError("enumerate means something else in this file")
    name = next((name for name in _FRESH if name not in used), None)
    name = name or next(f"step_{number}" for number in range(2, 1000) if f"step_{number}" not in used)
    if isinstance(loop.iter, cst.Tuple) and not loop.iter.lpar:
        raise CannotEditError("the loop counts its steps nowhere")
    target, iterated = tree.module.code_for_node(loop.target), tree.module.code_for_node(loop.iter)
    start, end = _header(tree, loop, target, iterated)
    written = f"({target})" if isinstance(loop.target, cst.Tuple) and not loop.target.lpar else target
    return Guard(test=f"{name} % {every} == 0", splices=((start, end, f"{name}, {written} in enumerate({iterated})"),))


def _header(tree: Tree, loop: cst.For, target: str, iterated: str) -> tuple[int, int]:
    """The span of ``x in loader`` in a for statement, brackets included."""
    start = tree.span(loop)[0]
    pattern = rf"for\s*({re.escape(target)}\s*in\s*{re.escape(iterated)})\s*:"
    found: re.Match[str] | None = re.compile(pattern).match(tree.text, start)
    if found is None:
        raise CannotEditError("the loop counts its steps nowhere")
    return found.span(1)
