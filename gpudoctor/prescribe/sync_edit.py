"""Edits that take host-device waits out of a loop: non_blocking copies, and calls that only wait."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpudoctor.prescribe.tree import CannotEditError, Splice, Tree, last_name

if TYPE_CHECKING:
    import libcst as cst

_DEVICE_NAME = re.compile(r"(^|_)(dev|device|cuda|gpu|rank)\d*($|_)|device$", re.IGNORECASE)
_MODULE_NAME = re.compile(r"(^|_)(model|net|network|module|criterion|loss_fn|encoder|decoder)\d*$", re.IGNORECASE)
_DROPPABLE = {"torch.cuda.empty_cache": "empty_cache", "torch.cuda.synchronize": "synchronize"}
_CLOCK = re.compile(
    r"\b(time\.time|time|perf_counter(_ns)?|monotonic(_ns)?|time_ns|default_timer|elapsed_time|\w+\.record|Timer)\s*\("
)
# Work on other streams, or copies to the host that nobody waits for, may rest on the synchronisation.
_ORDERED_BY_SYNC = re.compile(
    r"Stream\(|\.stream\(|\bEvent\(|copy_\([^)]*non_blocking\s*=\s*True"
    r"|\.(to|cpu)\(\s*(device\s*=\s*)?['\"]cpu['\"][^)]*non_blocking\s*=\s*True"
)


def non_blocking(tree: Tree, line: int) -> str:
    """The text with non_blocking=True in every ``.to(device)`` and ``.cuda()`` at `line`."""
    import libcst as cst

    splices: list[Splice] = []
    set_by_user = False
    for call in tree.at(cst.Call, line):
        if not isinstance(call.func, cst.Attribute) or not moves_to_device(tree, call):
            continue
        keywords = {argument.keyword.value for argument in call.args if argument.keyword is not None}
        positional = sum(argument.keyword is None for argument in call.args)
        if "non_blocking" in keywords or positional > (2 if call.func.attr.value == "to" else 1):
            set_by_user = True
            continue
        refuse_changed_source(tree, call)
        if call.args:
            end = tree.span(call.args[-1])[1]
            splices.append((end, end, ", non_blocking=True"))
        else:
            end = tree.span(call)[1] - 1
            splices.append((end, end, "non_blocking=True"))
    if not splices:
        raise CannotEditError(
            "non_blocking is set there already" if set_by_user else "no copy to a device that can be told from the line"
        )
    return tree.spliced(splices)


def moves_to_device(tree: Tree, call: cst.Call) -> bool:
    import libcst as cst

    assert isinstance(call.func, cst.Attribute)
    receiver = last_name(call.func.value)
    if any(argument.star for argument in call.args):
        return False
    if call.func.attr.value == "cuda":
        return not _MODULE_NAME.search(receiver)  # Module.cuda() takes no non_blocking
    if call.func.attr.value != "to" or not call.args:
        return False
    by_keyword = [
        argument for argument in call.args if argument.keyword is not None and argument.keyword.value == "device"
    ]
    first = (by_keyword or [call.args[0]])[0]
    if first.keyword is not None and not by_keyword:
        return False
    return _looks_like_device(tree, first.value, by_keyword=bool(by_keyword))


def _looks_like_device(tree: Tree, node: cst.BaseExpression, *, by_keyword: bool) -> bool:
    import libcst as cst

    text = tree.code(node)
    if "cpu" in text.lower():
        return False
    if by_keyword:
        return True
    if isinstance(node, (cst.SimpleString, cst.FormattedString)):
        return text.lstrip("fFrRbBuU").strip("'\"").startswith("cuda")
    if isinstance(node, cst.Call):
        return tree.refers_to(node.func) == {"torch.device"}
    return bool(_DEVICE_NAME.search(last_name(node)))


def refuse_changed_source(tree: Tree, call: cst.Call) -> None:
    """A host tensor that is written again while its copy runs would arrive changed."""
    import libcst as cst

    assert isinstance(call.func, cst.Attribute)
    source = call.func.value
    if not isinstance(source, cst.Name):
        return
    statement = next(
        (parent for parent in tree.up(call) if isinstance(parent, (cst.BaseSmallStatement, cst.BaseCompoundStatement))),
        call,
    )
    targets = {tree.code(node.target) for node in tree.walk(statement) if isinstance(node, cst.AssignTarget)}
    if any(source.value in re.findall(r"\w+", target) for target in targets):
        return  # the name is the copy from here on
    function = tree.function(call)
    for node in tree.walk(function):
        written: cst.CSTNode | None = None
        if isinstance(node, cst.AugAssign) or (isinstance(node, cst.AssignTarget) and _is_item(node.target)):
            written = node.target
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            written = node.func.value if re.search(r"[a-z]_$", node.func.attr.value) else None
        while isinstance(written, (cst.Subscript, cst.Attribute)):
            written = written.value
        if isinstance(written, cst.Name) and written.value == source.value:
            where = tree.lines(node)[0]
            raise CannotEditError(f"line {where} changes {source.value} in place while the copy may still run")


def _is_item(node: cst.CSTNode) -> bool:
    import libcst as cst

    return isinstance(node, cst.Subscript)


def drop_call(tree: Tree, line: int, name: str | None) -> str:
    """The text without a ``torch.cuda.empty_cache()`` or ``torch.cuda.synchronize()`` statement in a loop."""
    import libcst as cst

    wanted = (name or "").rsplit(".", 1)[-1]
    calls = []
    for call in tree.at(cst.Call, line):
        known = {_DROPPABLE[full] for full in tree.refers_to(call.func) if full in _DROPPABLE}
        if known and (not wanted or wanted in known):
            calls.append(call)
    if not calls:
        raise CannotEditError("no torch.cuda.empty_cache() or torch.cuda.synchronize() at this line")
    call = calls[0]
    expression = tree.parents[call]
    if not isinstance(expression, cst.Expr):
        raise CannotEditError("the call is part of a larger expression")
    _in_loop(tree, call)
    if "torch.cuda.synchronize" in tree.refers_to(call.func):
        _refuse_needed_sync(tree, call)
    statement = tree.statement(call)
    if not isinstance(statement, cst.SimpleStatementLine):
        return tree.spliced([(*tree.span(call), "pass")])
    siblings, _ = tree.siblings(statement)
    if len(statement.body) > 1:
        return tree.spliced([_small_statement(tree, statement, expression)])
    if len(siblings) > 1:
        return tree.spliced([_whole_lines(tree, statement)])
    guard = _bare_guard(tree, statement)
    if guard is not None:
        return tree.spliced([_whole_lines(tree, guard)])
    return tree.spliced([(*tree.span(call), "pass")])


def _in_loop(tree: Tree, call: cst.Call) -> cst.For | cst.While:
    import libcst as cst

    for parent in tree.up(call):
        if isinstance(parent, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
            break
        if isinstance(parent, (cst.For, cst.While)):
            return parent
    raise CannotEditError("the call stands in no loop of its function")


def _refuse_needed_sync(tree: Tree, call: cst.Call) -> None:
    import libcst as cst

    statement = tree.statement(call)
    around = [statement]
    for node in (statement, *(parent for parent in tree.up(statement) if isinstance(parent, cst.If))):
        try:
            siblings, position = tree.siblings(node)
        except CannotEditError:
            continue
        around += siblings[max(0, position - 1) : position + 2]
    if any(_CLOCK.search(tree.code(node)) for node in around):
        raise CannotEditError("it stands beside a clock: without it the time would be measured wrongly")
    function = tree.function(call)
    if _ORDERED_BY_SYNC.search(tree.code(function)):
        raise CannotEditError("streams, events or copies to the host in this function may rely on it")


def _small_statement(tree: Tree, statement: cst.SimpleStatementLine, gone: cst.CSTNode) -> Splice:
    """One of several statements of a line, with the semicolon that joins it."""
    position = [id(part) for part in statement.body].index(id(gone))
    start, end = tree.span(gone)
    if position + 1 < len(statement.body):
        return start, tree.span(statement.body[position + 1])[0], ""
    return tree.span(statement.body[position - 1])[1], end, ""


def _whole_lines(tree: Tree, statement: cst.CSTNode) -> Splice:
    """A statement with its lines; comments above it stay."""
    import libcst as cst

    start = tree.line_start(tree.span(statement)[0])
    last = statement
    if isinstance(statement, cst.If):
        assert isinstance(statement.body, cst.IndentedBlock)
        last = statement.body.body[-1]
    end = tree.line_end(tree.span(last)[1])
    following = next((offset for offset in tree.starts if offset > end), len(tree.text))
    if following == len(tree.text) and not tree.text.endswith(("\n", "\r")) and start > 0:
        before = len(tree.text[:start].rstrip("\r\n"))  # the last line goes with the break before it
        return before, following, ""
    return start, following, ""


def _bare_guard(tree: Tree, statement: cst.SimpleStatementLine) -> cst.If | None:
    """An ``if`` that holds nothing but the call and whose test does nothing, in a block with other statements."""
    import libcst as cst

    block = tree.parents[statement]
    guard = tree.parents[block]
    if not isinstance(guard, cst.If) or guard.orelse is not None or isinstance(tree.parents[guard], cst.If):
        return None
    for node in tree.walk(guard.test):
        if isinstance(node, (cst.NamedExpr, cst.Await, cst.Subscript)):
            return None
        if isinstance(node, cst.Call) and tree.refers_to(node.func) != {"torch.cuda.is_available"}:
            return None
    siblings, _ = tree.siblings(guard)
    comments = isinstance(block, cst.IndentedBlock) and (block.footer or statement.leading_lines)
    return guard if len(siblings) > 1 and not comments else None
