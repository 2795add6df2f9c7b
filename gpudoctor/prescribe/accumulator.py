"""``total += loss.item()`` becomes a sum on the device that is read back once, after the loop.

Python sums floats in double precision, and integers without limit. So the device sums a float in float64, which
makes every printed digit equal, and a count in int64 (or in float64, exact up to 2**53, where the loop shows a
quotient of it: torch divides integers in float32). Behind the loop the name is a Python number again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpudoctor.prescribe.counter import loops_around
from gpudoctor.prescribe.reads import reads_to_convert
from gpudoctor.prescribe.tree import CannotEditError, Splice, Tree, last_name

if TYPE_CHECKING:
    import libcst as cst

    from gpudoctor.prescribe.counter import Loop

Kind = Literal["float", "int"]
_COUNTS = {"sum", "count_nonzero", "numel"}
_COMPARISONS = {"eq", "ne", "gt", "ge", "lt", "le", "eq_", "isclose", "logical_and", "logical_or", "isnan", "isinf"}
_READ_BACK = re.compile(r"(\w+) = (float|int)\(\1\)|(.+)\[:\] = \[(float|int)\(value\) for value in \3\]")
_FLOAT_METHODS = {
    "mean",
    "float",
    "double",
    "half",
    "bfloat16",
    "sqrt",
    "exp",
    "log",
    "norm",
    "std",
    "var",
    "softmax",
    "clip_grad_norm_",
    "vector_norm",
}
# A captured graph writes its results into the same memory each time, so a value kept for later would change.
CUDA_GRAPHS = re.compile(
    r"cuda\.graphs?\b|CUDAGraph|make_graphed_callables|cudagraph_mark_step_begin|reduce-overhead|max-autotune(?!-no-cud)"
)
_LOSS = re.compile(r"(^|_)loss(es)?\d*($|_)|loss$|(^|_)(nll|kld?|mse|bce)($|_)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Accumulation:
    """One addition of a value read from the device. `name` is the sum, `read` the expression that waits, `value`
    the tensor that it reads."""

    name: str
    statement: cst.BaseSmallStatement
    read: cst.BaseExpression
    value: cst.BaseExpression


def find_accumulation(tree: Tree, line: int) -> Accumulation:
    """The sum at `line`; CannotEditError when the statement has another form."""
    import libcst as cst

    for statement in tree.walk():
        if not isinstance(statement, (cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            continue
        first, last = tree.lines(statement)
        for small in statement.body if first <= line <= last else ():
            parts = sum_parts(tree, small)
            if parts is None:
                continue
            name, added = parts
            reads = {id(node): node for node in tree.walk(added) if value_read(tree, node) is not None}
            outer = [node for node in reads.values() if not any(id(parent) in reads for parent in tree.up(node))]
            if len(outer) != 1:
                raise CannotEditError(f"what is added to {name} is not one value read from the device")
            refuse_factors(tree, added, outer[0], name)
            read = outer[0]
            value = value_read(tree, read)
            assert isinstance(read, cst.BaseExpression)
            assert value is not None
            return Accumulation(name=name, statement=small, read=read, value=value)
    raise CannotEditError("no sum of the form name += value.item() at this line")


def device_accumulator(tree: Tree, line: int, name: str | None, *, convert: bool = False) -> str:
    """The text with the sum kept on the device inside its loop, and read back behind it.

    convert: reads of the sum under a condition, and in console output, get a Python number, as before.
    """
    found = find_accumulation(tree, line)
    if name is not None and name != found.name:
        raise CannotEditError(f"the sum at this line is {found.name}, not {name}")
    refuse_cuda_graphs(tree.text)
    loop = innermost_loop(tree, found.statement)
    kind = kind_of(tree, found.value, found.statement)
    converted = reads_to_convert(tree, found.name, loop, found.statement) if convert else []
    conversion = _conversion(tree, found, loop, kind, {id(node) for node in converted})
    start, end = tree.span(found.read)
    splices: list[Splice] = [(start, end, as_operand(tree, found.value) + conversion)]
    splices += [(*tree.span(node), f"{kind}({found.name})") for node in converted]
    splices += read_back(tree, loop, f"{found.name} = {kind}({found.name})")
    return tree.spliced(splices)


def refuse_cuda_graphs(text: str) -> None:
    if CUDA_GRAPHS.search(text):
        raise CannotEditError("the file uses CUDA graphs, which write their results into the same memory again")


def as_operand(tree: Tree, value: cst.BaseExpression) -> str:
    """The code of an expression, such that a method can be called on it."""
    import libcst as cst

    code = tree.code(value)
    binds = bool(value.lpar) or isinstance(value, (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
    return code if binds else f"({code})"


def read_back(tree: Tree, loop: Loop, line: str) -> list[Splice]:
    """The line behind the loop that makes Python numbers again, unless it stands there already."""
    siblings, position = tree.siblings(loop)
    for behind in siblings[position + 1 :]:
        first = _first_line(tree, behind)
        if first == line:
            return []
        if not _READ_BACK.fullmatch(first):
            break
    return [_after(tree, loop, line)]


def sum_parts(tree: Tree, small: cst.BaseSmallStatement) -> tuple[str, cst.BaseExpression] | None:
    """The name and what is added, for ``name += x``, ``name = name + x`` and ``name = x + name``."""
    import libcst as cst

    if isinstance(small, cst.AugAssign) and isinstance(small.operator, cst.AddAssign):
        if isinstance(small.target, cst.Name):
            return small.target.value, small.value
        if any(value_read(tree, node) for node in tree.walk(small.value)):
            raise CannotEditError(f"{tree.code(small.target)} is no plain name, so other code may read it")
    if isinstance(small, cst.Assign) and len(small.targets) == 1 and isinstance(small.value, cst.BinaryOperation):
        target = small.targets[0].target
        if isinstance(target, cst.Name) and isinstance(small.value.operator, cst.Add):
            left, right = small.value.left, small.value.right
            if isinstance(left, cst.Name) and left.value == target.value:
                return target.value, right
            if isinstance(right, cst.Name) and right.value == target.value:
                return target.value, left
    return None


def value_read(tree: Tree, node: cst.CSTNode) -> cst.BaseExpression | None:
    """The tensor that ``x.item()``, ``float(x)`` or ``x.detach().cpu().item()`` reads; None for anything else."""
    import libcst as cst

    if not isinstance(node, cst.Call):
        return None
    value: cst.BaseExpression
    if isinstance(node.func, cst.Attribute) and node.func.attr.value == "item" and not node.args:
        value = node.func.value
    elif tree.refers_to(node.func) == {"builtins.float"} and len(node.args) == 1 and node.args[0].keyword is None:
        value = node.args[0].value
        if isinstance(value, (cst.SimpleString, cst.Integer, cst.Float)):
            return None
        if (inner := value_read(tree, value)) is not None:
            return inner
    else:
        return None
    while True:
        if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and not value.args:
            if value.func.attr.value not in {"cpu", "detach"}:
                return value
            value = value.func.value
        elif isinstance(value, cst.Attribute) and value.attr.value == "data":
            value = value.value
        else:
            return value


def refuse_factors(tree: Tree, added: cst.BaseExpression, read: cst.CSTNode, name: str) -> None:
    """Around the value read stand only factors and divisors that are numbers and do not hold the sum itself."""
    import libcst as cst

    node: cst.CSTNode = read
    while node is not added:
        parent = tree.parents[node]
        if not isinstance(parent, cst.BinaryOperation) or not isinstance(parent.operator, (cst.Multiply, cst.Divide)):
            raise CannotEditError(f"what is added to {name} does more than scale the value read")
        other = parent.right if parent.left is node else parent.left
        if isinstance(parent.operator, cst.Divide) and parent.right is node:
            raise CannotEditError(f"what is added to {name} divides by the value read")
        for part in tree.walk(other):
            if isinstance(part, cst.Call) and not _is_size(part):
                raise CannotEditError(f"what is added to {name} calls {tree.code(part.func)}, which may wait as well")
            if isinstance(part, cst.Name) and part.value == name:
                raise CannotEditError(f"what is added to {name} depends on {name}")
            if isinstance(part, cst.Name) and tree.refers_to(part) & {"numpy", "np"}:
                raise CannotEditError(f"what is added to {name} is scaled by a numpy value")
        node = parent


def _is_size(call: cst.Call) -> bool:
    return last_name(call.func) in {"len", "size", "dim", "numel"}


def innermost_loop(tree: Tree, statement: cst.CSTNode) -> Loop:
    loop = next(loops_around(tree, statement), None)
    if loop is None:
        raise CannotEditError("the line stands in no loop of its function")
    return loop


def kind_of(tree: Tree, value: cst.BaseExpression, statement: cst.CSTNode) -> Kind:
    """Whether the value read is a float or an integer, from how it was made. Unknown is refused."""
    kind = _kind_of(tree, value, statement, 0)
    if kind is None:
        raise CannotEditError(f"it cannot be told whether {tree.code(value)} is a float or an integer")
    return kind


def _kind_of(tree: Tree, node: cst.BaseExpression, statement: cst.CSTNode, depth: int) -> Kind | None:
    import libcst as cst

    if isinstance(node, cst.Call):
        called = last_name(node.func)
        if called in _FLOAT_METHODS or _LOSS.search(called) or called in {"criterion", "loss_fn", "cross_entropy"}:
            return "float"
        if called in {"type", "to"} and node.args:
            return "float" if "float" in tree.code(node.args[0].value) else None
        if called in _COUNTS and isinstance(node.func, cst.Attribute):
            counted = node.func.value
            if last_name(counted) == "torch" and node.args:
                counted = node.args[0].value
            if called != "sum" or _is_comparison(tree, counted, statement, depth):
                return "int"
            return _kind_of(tree, counted, statement, depth)
        return None
    if isinstance(node, cst.BinaryOperation):
        kinds = {_kind_of(tree, part, statement, depth) for part in (node.left, node.right)}
        return "float" if isinstance(node.operator, cst.Divide) or "float" in kinds else None
    if isinstance(node, cst.Attribute):
        return "float" if _LOSS.search(node.attr.value) else None
    if isinstance(node, cst.Subscript) or not isinstance(node, cst.Name):
        return None
    if depth < 3 and (made := _made_from(tree, node.value, statement)) is not None:
        known = _kind_of(tree, made, statement, depth + 1)
        if known is not None:
            return known
    return "float" if _LOSS.search(node.value) or _has_backward(tree, node.value) else None


def _is_comparison(tree: Tree, node: cst.BaseExpression, statement: cst.CSTNode, depth: int) -> bool:
    import libcst as cst

    if isinstance(node, cst.Comparison):
        return True
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.BitAnd, cst.BitOr)):
        return all(_is_comparison(tree, part, statement, depth) for part in (node.left, node.right))
    if isinstance(node, cst.Call):
        called = last_name(node.func)
        if called in {"view", "flatten", "reshape", "squeeze", "detach", "cpu"} and isinstance(
            node.func, cst.Attribute
        ):
            return _is_comparison(tree, node.func.value, statement, depth)
        return called in _COMPARISONS or called in {"int", "long", "bool"}
    if isinstance(node, cst.Name) and depth < 3:
        made = _made_from(tree, node.value, statement)
        return made is not None and _is_comparison(tree, made, statement, depth + 1)
    return False


def _made_from(tree: Tree, name: str, statement: cst.CSTNode) -> cst.BaseExpression | None:
    """The value of the only plain assignment to a name in the function, or None."""
    import libcst as cst

    values = []
    for node in tree.walk(tree.function(statement)):
        if isinstance(node, cst.Assign):
            targets = [target.target for target in node.targets]
            if any(isinstance(target, cst.Name) and target.value == name for target in targets):
                values.append(node.value)
    return values[0] if len(values) == 1 else None


def _has_backward(tree: Tree, name: str) -> bool:
    import libcst as cst

    return any(
        isinstance(node, cst.Attribute)
        and node.attr.value == "backward"
        and isinstance(node.value, cst.Name)
        and node.value.value == name
        for node in tree.walk()
    )


def _conversion(tree: Tree, found: Accumulation, loop: Loop, kind: Kind, converted: set[int]) -> str:
    """What is called on the tensor in place of the read."""
    import libcst as cst

    if kind == "float":
        return ".detach().double()"
    shown = []
    for node in tree.walk(loop):
        if isinstance(node, cst.Name) and node.value == found.name and id(node) not in converted:
            parents = list(tree.up(node))
            if found.statement in parents or any(isinstance(parent, cst.AssignTarget) for parent in parents[:1]):
                continue
            shown.append(
                any(isinstance(p, cst.BinaryOperation) and isinstance(p.operator, cst.Divide) for p in parents)
            )
    if all(shown) and shown:
        return ".double()"
    if not any(shown):
        return ""
    raise CannotEditError(f"the loop shows {found.name} both as an integer and as a quotient")


def _first_line(tree: Tree, node: cst.CSTNode) -> str:
    start = tree.span(node)[0]
    return tree.text[start : tree.line_end(start)].strip()


def _after(tree: Tree, loop: Loop, line: str) -> Splice:
    """A line behind a loop, before the comments and blank lines that follow its last statement."""
    import libcst as cst

    node: cst.CSTNode = loop
    while True:  # down to the last statement of the loop, or of its else
        if isinstance(node, (cst.For, cst.While, cst.If)) and node.orelse is not None:
            node = node.orelse
        elif isinstance(node, cst.Try):
            node = node.finalbody or node.orelse or node.handlers[-1]
        elif isinstance(node, (cst.BaseCompoundStatement, cst.Else, cst.Finally, cst.ExceptHandler)):
            node = node.body
        elif isinstance(node, cst.IndentedBlock):
            node = node.body[-1]
        else:
            break
    end = tree.line_end(tree.span(node)[1])
    depth = len(tree.indentation(tree.span(loop)[0]))
    for start in (offset for offset in tree.starts if offset > end):  # comments that still belong to the loop
        text = tree.text[start : tree.line_end(start)]
        if not text.lstrip().startswith("#") or len(tree.indentation(start)) <= depth:
            break
        end = tree.line_end(start)
    indentation = tree.indentation(tree.span(loop)[0])
    return end, end, f"{tree.newline()}{indentation}{line}"
