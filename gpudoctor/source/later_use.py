"""Is a running sum still used safely once it is a 0-dim device tensor inside its loop? And a list of such values?

The rewrite (prescribe's device-accumulator) changes ``total += loss.item()`` into an addition on the device and
reads the sum back into a Python number right after the innermost loop. So the name is a tensor only inside that
loop, its ``else`` included, and everywhere in the function where a ``try`` around the loop may skip the reading.
What is computed from it there and kept under another name stays a tensor everywhere. Every such use must give
what the Python number gave.
"""

from __future__ import annotations

import ast
import re
import string
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_READERS = {"float", "int"}  # they wait for the device and give a Python number
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_SPEC = re.compile(r"%(?:\((?P<key>[^)]*)\))?[#0\- +]*(?P<star>\*)?\d*(?:\.(?:\d+|\*))?(?P<kind>[a-zA-Z%])")
_DEPTH = 5  # names computed from names computed from ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterUse:
    """`uses` are the lines that read or set the name while it is a tensor. With `safe` true, a `reason` says that the
    rewrite is correct but cannot pay: the value is read back at every step anyway."""

    safe: bool
    reason: str | None = None
    uses: tuple[int, ...] = ()


class UnsafeUseError(Exception):
    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line}: {why}")


def later_uses(text: str, name: str, line: int) -> LaterUse:
    """Judge every other use of `name` after the statement at `line` adds a device tensor to it, or appends one.

    text: source of the whole file; name: the running sum or the list; line: 1-based line of the addition.
    Never raises: a file that does not parse, or a statement that is not there, is unsafe with the reason.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own, such as invalid escapes
            tree = ast.parse(text.removeprefix("\ufeff"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return LaterUse(safe=False, reason=f"the file does not parse: {' '.join(str(error).split())}")
    try:
        return Scope(tree, name, line).judge()
    except UnsafeUseError as unsafe:
        return LaterUse(safe=False, reason=str(unsafe))
    except RecursionError:
        return LaterUse(safe=False, reason="the code is nested too deeply to follow")


class Scope:
    """The function (or module) that holds the addition, and what its names are used for."""

    def __init__(self, tree: ast.Module, name: str, line: int) -> None:
        self.tree, self.name, self.line = tree, name, line
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.statement = self._statement()
        self.scope = next((node for node in self.up(self.statement) if isinstance(node, (*_SCOPES, ast.Module))), tree)
        self.lines: set[int] = set()
        self.each_step: set[int] = set()

    def judge(self) -> LaterUse:
        if isinstance(self.scope, ast.ClassDef):
            raise UnsafeUseError(self.line, f"{self.name} is an attribute of a class")
        self.refuse_escapes(self.name)
        loop = self.loop()
        if isinstance(self.statement, ast.Expr):
            from gpudoctor.source.later_list import judge_list

            return LaterUse(safe=True, uses=judge_list(self, self.statement, loop))
        root: ast.AST = self.scope if self.may_be_left_by_exception(loop) else loop
        uses = self.names(root, self.name)
        self._judge_uses(self.name, uses, 0)
        reason = None
        if self.each_step:
            where = ", ".join(str(number) for number in sorted(self.each_step))
            reason = f"the value is read at every step (line {where}), so the wait would only move there"
        return LaterUse(safe=True, reason=reason, uses=tuple(sorted(self.lines)))

    # finding things

    def up(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def _statement(self) -> ast.AugAssign | ast.Assign | ast.Expr:
        for node in ast.walk(self.tree):
            if not isinstance(node, (ast.AugAssign, ast.Assign, ast.Expr)):
                continue
            if not node.lineno <= self.line <= (node.end_lineno or 0):
                continue
            target: ast.expr | None
            if isinstance(node, ast.Expr):
                target = appended_to(node)
                target = target.value if isinstance(target, ast.Subscript) else target
            else:
                target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == self.name:
                return node
        raise UnsafeUseError(self.line, f"no statement that adds to {self.name}")

    def loop(self) -> ast.For | ast.AsyncFor | ast.While:
        child: ast.AST = self.statement
        for node in self.up(self.statement):
            if node is self.scope:
                break
            if isinstance(node, _LOOPS) and child not in node.orelse:
                return node
            child = node
        raise UnsafeUseError(self.line, f"{self.name} is not summed in a loop of this function")

    def may_be_left_by_exception(self, loop: ast.AST) -> bool:
        """An exception that is caught around the loop skips the line that reads the sum back."""
        for node in self.up(loop):
            if node is self.scope:
                break
            if isinstance(node, (ast.Try, ast.TryStar)):
                return True
            if isinstance(node, (ast.With, ast.AsyncWith)) and any("suppress" in ast.unparse(i) for i in node.items):
                return True
        return False

    def _inner(self, root: ast.AST) -> Iterator[ast.AST]:
        """The nodes of one scope: nested functions and classes are left out, comprehensions are not."""
        yield root
        for child in ast.iter_child_nodes(root):
            if not isinstance(child, _SCOPES):
                yield from self._inner(child)

    def names(self, root: ast.AST, name: str) -> list[ast.Name]:
        return [node for node in self._inner(root) if isinstance(node, ast.Name) and node.id == name]

    def refuse_escapes(self, name: str) -> None:
        """A name that other scopes can see is used in ways that are not read here."""
        for node in self._inner(self.scope):
            if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
                raise UnsafeUseError(node.lineno, f"{name} is global or nonlocal")
            if isinstance(node, ast.Name) and node.id in {"locals", "globals", "vars", "eval", "exec"}:
                raise UnsafeUseError(node.lineno, f"{node.id} can see {name}")
        for outer in ast.walk(self.scope):
            if outer is self.scope or not isinstance(outer, _SCOPES):
                continue
            names = [node for node in ast.walk(outer) if isinstance(node, ast.Name) and node.id == name]
            arguments = [] if isinstance(outer, ast.ClassDef) else [a.arg for a in _all_arguments(outer.args)]
            declared = any(
                isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names for node in ast.walk(outer)
            )
            own = name in arguments or any(isinstance(node.ctx, ast.Store) for node in names)
            if names and (declared or not own):
                raise UnsafeUseError(names[0].lineno, f"{name} is used by a nested function or class")

    # judging

    def _judge_uses(self, name: str, uses: list[ast.Name], depth: int) -> None:
        if depth > _DEPTH:
            raise UnsafeUseError(self.line, f"too many values are computed from {self.name}")
        for use in uses:
            statement = next((node for node in [use, *self.up(use)] if isinstance(node, ast.stmt)), None)
            if statement is self.statement or self._is_read_back(statement, name):
                continue
            self.lines.add(use.lineno)
            if isinstance(use.ctx, ast.Del):
                raise UnsafeUseError(use.lineno, f"{name} is deleted")
            if isinstance(use.ctx, ast.Store):
                continue  # a new value; what it is made of is judged at the names on the right
            kept = self._judge_read(use, name)
            if kept is not None and kept != self.name:
                self.refuse_escapes(kept)
                self._judge_uses(kept, self.names(self.scope, kept), depth + 1)

    def _is_read_back(self, statement: ast.stmt | None, name: str) -> bool:
        """``total = float(total)`` behind the loop: there the rewrite itself puts it."""
        if name != self.name or not isinstance(statement, ast.Assign) or self.loop() in self.up(statement):
            return False
        return ast.unparse(statement) in {f"{name} = {reader}({name})" for reader in _READERS}

    def _judge_read(self, use: ast.Name, name: str) -> str | None:
        """Follow one read outwards to where its value ends. Returns the name that keeps a tensor, if one does."""
        node: ast.AST = use
        computed = compared = False
        for parent in self.up(use):
            if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mod) and _text(parent.left) is not None:
                self._percent(parent, node, use, name)
                return None
            if self._computes(parent, node, name):
                computed, compared = True, compared or isinstance(parent, ast.Compare)
            elif isinstance(parent, ast.FormattedValue) and parent.value is node:
                if parent.conversion != -1:
                    raise UnsafeUseError(use.lineno, f"{name} is shown by its repr or str, which differ for a tensor")
                self._reads(use)
                return None
            elif isinstance(parent, (ast.Call, ast.keyword)):
                self._call(parent, node, use, name)
                return None
            elif not (isinstance(parent, ast.Tuple) and isinstance(self.parents[parent], ast.BinOp)):
                kept = _kept_by(parent, node, computed=computed)
                if kept is None or compared:
                    break
                return kept
            node = parent
        raise UnsafeUseError(use.lineno, _why(self.parents.get(node), name))

    def _computes(self, parent: ast.AST, node: ast.AST, name: str) -> bool:
        """Arithmetic with numbers gives a new 0-dim tensor of the same value, a comparison one of True or False."""
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, _ARITHMETIC):
            self._refuse_operand(parent.right if parent.left is node else parent.left, name)
            return True
        if isinstance(parent, ast.UnaryOp):
            return isinstance(parent.op, ast.USub)  # +x of a tensor is the tensor itself
        if isinstance(parent, ast.Compare):
            return len(parent.ops) == 1 and isinstance(parent.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
        return False

    def _reads(self, use: ast.Name) -> None:
        """A read of the value waits for the device: does it stand under a condition, or run at every step?"""
        child: ast.AST = use
        for node in self.up(use):
            if isinstance(node, (ast.If, ast.IfExp, ast.ExceptHandler)) and child is not getattr(node, "test", None):
                return
            if isinstance(node, _LOOPS):
                if child in node.body and not _skipped(node.body[: node.body.index(child)]):
                    self.each_step.add(use.lineno)
                return
            if isinstance(node, (*_SCOPES, ast.Module)):
                return
            child = node

    def _refuse_operand(self, other: ast.expr, name: str) -> None:
        if isinstance(other, ast.Constant) and not isinstance(other.value, (int, float)):
            raise UnsafeUseError(other.lineno, f"{name} is joined with {type(other.value).__name__}")
        if isinstance(other, (ast.List, ast.Tuple, ast.JoinedStr, ast.Dict, ast.Set, ast.ListComp)):
            raise UnsafeUseError(other.lineno, f"{name} is combined with something that is no number")
        if isinstance(other, ast.Call):
            root = other.func
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in {"np", "numpy", "str"}:
                raise UnsafeUseError(other.lineno, f"{name} is combined with a value of {root.id}")

    def _percent(self, operation: ast.BinOp, node: ast.AST, use: ast.Name, name: str) -> None:
        """``"%.4f" % x`` asks the tensor for a float; %s and %r show the tensor itself, %d cuts."""
        specs = [match for match in _SPEC.finditer(_text(operation.left) or "") if match["kind"] != "%"]
        if any(match["key"] is not None or match["star"] for match in specs):
            raise UnsafeUseError(use.lineno, f"{name} is formatted with named or computed % fields")
        values = operation.right.elts if isinstance(operation.right, ast.Tuple) else [operation.right]
        if len(specs) != len(values):
            raise UnsafeUseError(use.lineno, f"the % fields of {name} cannot be matched")
        within = {id(node), *(id(parent) for parent in [use, *self.up(use)])}
        for spec, value in zip(specs, values, strict=True):
            if id(value) in within and spec["kind"] not in "eEfFgG":
                raise UnsafeUseError(
                    use.lineno, f"{name} is formatted with %{spec['kind']}, which differs for a tensor"
                )
        self._reads(use)

    def _call(self, parent: ast.AST, node: ast.AST, use: ast.Name, name: str) -> None:
        call = self.parents[parent] if isinstance(parent, ast.keyword) else parent
        assert isinstance(call, ast.Call)
        func = call.func
        if isinstance(func, ast.Name) and func.id in _READERS and call.args == [node]:
            self._reads(use)
            return
        if isinstance(func, ast.Attribute) and func.attr == "format" and (form := _text(func.value)) is not None:
            if not _plain_fields(form):
                raise UnsafeUseError(use.lineno, f"{name} is shown by its repr, or taken apart, in a format string")
            self._reads(use)
            return
        called = ast.unparse(func)
        called = called if len(called) <= 40 else "a function"
        if called == "print":
            raise UnsafeUseError(use.lineno, f"print({name}) without a format shows a tensor")
        raise UnsafeUseError(use.lineno, f"{name} is passed to {called}, which may keep it or need a number")


def appended_to(node: ast.Expr) -> ast.expr | None:
    """``losses`` of the statement ``losses.append(x)``, or None."""
    call = node.value
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
        return call.func.value
    return None


def _kept_by(parent: ast.AST, node: ast.AST, *, computed: bool) -> str | None:
    """The name under which a statement keeps the value, or None. A second name for the same tensor would see the
    additions in place that follow, so only a computed value may be kept."""
    if isinstance(parent, ast.AugAssign) and parent.value is node and isinstance(parent.op, _ARITHMETIC):
        return parent.target.id if isinstance(parent.target, ast.Name) else None
    if isinstance(parent, ast.Assign) and parent.value is node and computed and len(parent.targets) == 1:
        target = parent.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _skipped(before: list[ast.stmt]) -> bool:
    """Whether an earlier statement of the loop may go on to the next step (``if step % 100: continue``)."""
    return any(isinstance(node, ast.Continue) for statement in before for node in ast.walk(statement))


def _plain_fields(form: str) -> bool:
    """Whether a format string only formats its values: no ``!r``, no ``{0.real}``, no ``{0[1]}``."""
    try:
        fields = [(field or "", conversion) for _, field, _, conversion in string.Formatter().parse(form)]
    except ValueError:
        return False
    return all(conversion is None and not re.search(r"[.\[]", field) for field, conversion in fields)


def _all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    extra = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]


def _why(parent: ast.AST | None, name: str) -> str:
    """The reason for the commonest places that need a Python number."""
    reasons: list[tuple[type[ast.AST] | tuple[type[ast.AST], ...], str]] = [
        (
            (ast.If, ast.IfExp, ast.While, ast.Assert, ast.BoolOp, ast.UnaryOp),
            "decides a branch, which waits for the device",
        ),
        (ast.Return, "is returned from inside the loop"),
        ((ast.Yield, ast.YieldFrom), "is yielded"),
        (ast.Compare, "is compared by identity, equality or membership"),
        ((ast.Dict, ast.List, ast.Set, ast.Tuple, ast.Starred), "is stored in a container"),
        ((ast.Subscript, ast.Slice), "is used as an index"),
        (ast.Attribute, "has an attribute or a method read"),
        ((ast.Assign, ast.AnnAssign, ast.NamedExpr), "is stored under another name"),
        (ast.AugAssign, "changes another value"),
        (ast.BinOp, "stands in //, %, ** or a bit operation"),
    ]
    for kinds, reason in reasons:
        if isinstance(parent, kinds):
            return f"{name} {reason}"
    return f"{name} is used in a way that is not known to be safe ({type(parent).__name__})"
