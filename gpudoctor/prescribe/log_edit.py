"""Console output, logger calls and NaN checks that read the device at every step run every N steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpudoctor.prescribe.counter import guard_for, loops_around
from gpudoctor.prescribe.tree import CannotEditError, Splice, Tree, last_name

if TYPE_CHECKING:
    import libcst as cst

EVERY = 20  # steps; a console line each 20 steps is what people set by hand, and its wait is a twentieth

_SHOWS = {
    "print", "info", "debug", "warning", "set_postfix", "set_postfix_str", "set_description", "set_description_str",
    "add_scalar", "add_scalars", "log_metric", "log_metrics", "log_scalar", "report_scalar", "track",
}  # fmt: skip
# log() and write() of anything else may be mathematics, a checkpoint or a file.
_LOGGERS = re.compile(
    r"(^|[._])(wandb|run|log|logger|logging|mlflow|experiment|tracker|accelerator|fabric|writer|console)s?$",
    re.IGNORECASE,
)
_CONSOLES = re.compile(r"(^|[._])(tqdm|pbar|bar|progress|stdout|stderr)$", re.IGNORECASE)
_STREAMS = {"sys.stdout", "sys.stderr"}
# Calls that only compute: running them more rarely changes nothing but what is shown.
_PURE = {
    "item", "float", "int", "bool", "str", "repr", "round", "len", "format", "abs", "min", "max", "sum", "mean", "std",
    "var", "norm", "detach", "cpu", "numpy", "tolist", "double", "half", "long", "argmax", "eq", "ne", "any", "all",
    "sqrt", "exp", "log", "log2", "log10", "pow", "size", "dim", "numel", "get_last_lr", "get_lr", "get_scale",
    "time", "perf_counter", "monotonic", "now", "strftime", "isoformat", "timedelta", "total_seconds",
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "join", "items", "keys",
    "values", "dict", "list", "tuple", "sorted", "zip", "range", "enumerate", "get", "rjust", "ljust", "center",
    "isnan", "isinf", "isfinite", "logical_or", "logical_and", "getLogger", "vector_norm", "data_ptr", "lower",
    "upper", "replace", "strip", "count_nonzero", "median", "clamp", "unsqueeze", "squeeze", "view", "reshape",
    "stack", "cat",
}  # fmt: skip
_CHECKS = {"isnan", "isinf", "isfinite"}
_ENDS = {"exit", "_exit", "abort"}


def log_every(tree: Tree, line: int, every: int) -> str:
    """The text where the output or the check at `line` runs every `every` steps."""
    import libcst as cst

    statement = find_rare(tree, line)
    guard = guard_for(tree, statement, every)
    if (
        isinstance(statement, cst.If)
        and isinstance(statement.body, cst.SimpleStatementSuite)
        and not _checks(tree, statement.test)
    ):
        return tree.spliced([*guard.splices, _joined(tree, statement, guard.test)])
    if isinstance(statement, cst.If):
        header = re.compile(r"if\s*").match(tree.text, tree.span(statement)[0])
        assert header is not None
        start = header.end()
        test = tree.module.code_for_node(statement.test)
        loose = isinstance(statement.test, (cst.BooleanOperation, cst.IfExp, cst.Lambda, cst.NamedExpr))
        loose = loose and not statement.test.lpar
        left = f"({guard.test})" if " or " in guard.test else guard.test
        space = "" if tree.text[start - 1].isspace() else " "
        new = f"{space}{left} and " + (f"({test})" if loose else test)
        return tree.spliced([*guard.splices, (start, start + len(test), new)])
    return tree.spliced([*guard.splices, *_wrapped(tree, statement, guard.test)])


def find_rare(tree: Tree, line: int) -> cst.SimpleStatementLine | cst.If:
    """The statement at `line` that may run more rarely; CannotEditError says why there is none."""
    import libcst as cst

    for simple in tree.at(cst.SimpleStatementLine, line):
        if len(simple.body) > 1 and any(_shows(tree, small) for small in simple.body):
            raise CannotEditError("the output shares its line with other statements")
        small = simple.body[0]
        if _shows(tree, small) or (isinstance(small, cst.Assert) and _checks(tree, small.test)):
            _refuse_effects(tree, small)
            siblings, _ = tree.siblings(simple)
            if _ends(siblings[-1]):
                raise CannotEditError("the loop ends behind the output, so it runs once")
            return simple
    for check in tree.at(cst.If, line):
        if tree.lines(check)[0] <= line <= tree.lines(check.test)[1] and _checks(tree, check.test):
            _refuse_check(tree, check)
            return check
    for suite in tree.at(cst.SimpleStatementSuite, line):
        owner = tree.parents[suite]
        if not any(_shows(tree, small) for small in suite.body):
            continue
        alone = len(suite.body) == 1 and isinstance(owner, cst.If) and owner.orelse is None
        if not isinstance(owner, cst.If) or not alone or isinstance(tree.parents[owner], cst.If):
            raise CannotEditError("the output shares its line with other statements")
        _refuse_effects(tree, suite.body[0])
        return owner
    raise CannotEditError("no console output, logger call or NaN check at this line")


def is_check(tree: Tree, statement: cst.SimpleStatementLine | cst.If) -> bool:
    """Whether what find_rare found is a NaN check."""
    import libcst as cst

    if isinstance(statement, cst.If):
        return _checks(tree, statement.test)
    return isinstance(statement.body[0], cst.Assert)


def showing(tree: Tree, line: int, name: str) -> Iterator[int]:
    """The first lines of the output statements of the loop around `line` that show `name`, or what was computed
    from it there."""
    import libcst as cst

    inside = next((small for small in tree.at(cst.SimpleStatementLine, line)), None)
    loop = next(loops_around(tree, inside), None) if inside is not None else None
    if loop is None:
        return
    derived = {name}
    for _ in range(3):
        for node in tree.walk(loop):
            if isinstance(node, cst.Assign) and _mentions(tree, node.value, derived):
                derived |= {t.target.value for t in node.targets if isinstance(t.target, cst.Name)}
    for statement in tree.walk(loop):
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
            continue
        if _shows(tree, statement.body[0]) and _mentions(tree, statement, derived):
            yield tree.lines(statement)[0]


def _mentions(tree: Tree, node: cst.CSTNode, names: set[str]) -> bool:
    import libcst as cst

    return any(isinstance(part, cst.Name) and part.value in names for part in tree.walk(node))


def _shows(tree: Tree, small: cst.CSTNode) -> bool:
    """Whether a statement is a call that only shows or records values."""
    import libcst as cst

    if not isinstance(small, cst.Expr) or not isinstance(small.value, cst.Call):
        return False
    func = small.value.func
    called = last_name(func)
    if isinstance(func, cst.Name):
        return called in {"print", "rprint"}
    if not isinstance(func, cst.Attribute):
        return False
    receiver = tree.code(func.value)
    if called == "log":
        return _LOGGERS.search(receiver) is not None
    if called == "write":
        return _CONSOLES.search(receiver) is not None
    return called in _SHOWS


def _checks(tree: Tree, test: cst.BaseExpression) -> bool:
    import libcst as cst

    for node in tree.walk(test):
        if isinstance(node, cst.Call) and last_name(node.func) in _CHECKS:
            return True
        if isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
            compared = node.comparisons[0]
            if isinstance(compared.operator, cst.NotEqual) and tree.code(compared.comparator) == tree.code(node.left):
                return isinstance(node.left, cst.Name)  # x != x
    return False


def _refuse_check(tree: Tree, check: cst.If) -> None:
    """Only a check that ends the run may come later; one that skips the step or repairs it may not."""
    import libcst as cst

    if isinstance(tree.parents[check], cst.If) or check.orelse is not None:
        raise CannotEditError("the check has other branches, which would run as well")
    _refuse_effects(tree, check.test)
    if not _ends(check.body, run=True):
        raise CannotEditError("what follows from the check has to happen in the same step")


def _ends(block: cst.CSTNode, *, run: bool = False) -> bool:
    """Whether a block or statement ends the loop (with `run`: the whole run) when it is reached."""
    import libcst as cst

    last: cst.CSTNode = block
    while isinstance(last, (cst.IndentedBlock, cst.SimpleStatementLine, cst.SimpleStatementSuite)):
        last = last.body[-1]
    if isinstance(last, cst.Expr) and isinstance(last.value, cst.Call):
        return last_name(last.value.func) in _ENDS
    return isinstance(last, cst.Raise) or (not run and isinstance(last, (cst.Return, cst.Break)))


def _refuse_effects(tree: Tree, node: cst.CSTNode) -> None:
    """Nothing but showing may hang on the statement."""
    import libcst as cst

    outer = node.value if isinstance(node, cst.Expr) else None
    for part in tree.walk(node):
        if isinstance(part, (cst.NamedExpr, cst.Await, cst.Yield)):
            raise CannotEditError("the output does more than show values")
        if isinstance(part, cst.Call) and part is not outer and last_name(part.func) not in _PURE:
            raised = isinstance(node, cst.Assert)
            called = tree.code(part.func)
            called = called if len(called) <= 40 and "\n" not in called else "a function"
            raise CannotEditError(f"the {'check' if raised else 'output'} calls {called}, which may do more than show")
        to_file = isinstance(part, cst.Arg) and part.keyword is not None and part.keyword.value == "file"
        if isinstance(part, cst.Arg) and to_file and tree.code(part.value) not in _STREAMS:
            raise CannotEditError("the output goes to a file")


def _joined(tree: Tree, owner: cst.If, test: str) -> Splice:
    """``if main: print(x)`` on one line: the test is joined to the one that is there."""
    import libcst as cst

    header = re.compile(r"if\s*").match(tree.text, tree.span(owner)[0])
    assert header is not None
    code = tree.module.code_for_node(owner.test)
    loose = isinstance(owner.test, (cst.BooleanOperation, cst.IfExp, cst.Lambda, cst.NamedExpr)) and not owner.test.lpar
    left = f"({code})" if loose else code
    right = f"({test})" if " or " in test else test
    return header.end(), header.end() + len(code), f"{left} and {right}"


def _wrapped(tree: Tree, statement: cst.SimpleStatementLine, test: str) -> list[Splice]:
    """``if test:`` above the statement, whose lines are indented; joined with an equal ``if`` right behind it."""
    import libcst as cst

    start, last = tree.line_start(tree.span(statement)[0]), tree.span(statement)[1]
    end = tree.line_end(last)
    indentation, unit, newline = tree.indentation(start), tree.unit(statement), tree.newline()
    siblings, position = tree.siblings(statement)
    behind = siblings[position + 1] if position + 1 < len(siblings) else None
    if (
        isinstance(behind, cst.If)
        and behind.orelse is None
        and isinstance(behind.body, cst.IndentedBlock)
        and tree.code(behind.test) == test
        and tree.lines(behind)[0] == tree.lines(statement)[1] + 1
    ):
        header = tree.line_start(tree.span(behind)[0])
        header_end = tree.line_end(header)
        unit = tree.indentation(tree.span(behind.body.body[0])[0])[len(indentation) :]
        moved = _indented(tree, statement, start, end, unit)
        return [(start, header_end, tree.text[header:header_end] + newline + moved)]
    return [(start, end, f"{indentation}if {test}:{newline}" + _indented(tree, statement, start, end, unit))]


def _indented(tree: Tree, statement: cst.CSTNode, start: int, end: int, unit: str) -> str:
    """The lines of a statement, each indented once more unless it begins inside of a string."""
    import libcst as cst

    strings = [
        tree.span(node)
        for node in tree.walk(statement)
        if isinstance(node, (cst.SimpleString, cst.FormattedString)) and node in tree.ranges
    ]
    text, cursor = "", start
    for offset in [each for each in tree.starts if start <= each <= end]:
        inside = any(first < offset < stop for first, stop in strings)
        blank = not tree.text[offset : tree.line_end(offset)].strip()
        text += tree.text[cursor:offset] + ("" if inside or blank else unit)
        cursor = offset
    return text + tree.text[cursor:end]
