"""Where a loop reads a name: which reads are rare or shown, so that they may turn a device value into a number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpudoctor.prescribe.tree import Tree, last_name

if TYPE_CHECKING:
    import libcst as cst

    from gpudoctor.prescribe.counter import Loop


@dataclass(frozen=True, slots=True)
class Read:
    """One read of a name. `parents` lead from it to the loop; `statement` is None in the test of a branch or loop."""

    node: cst.Name
    parents: tuple[cst.CSTNode, ...]
    statement: cst.BaseSmallStatement | None

    @property
    def converted(self) -> bool:
        """Whether ``float(x)`` or ``int(x)`` stands around it already."""
        import libcst as cst

        call = self.parents[1] if len(self.parents) > 1 else None
        return (
            isinstance(self.parents[0], cst.Arg)
            and isinstance(call, cst.Call)
            and last_name(call.func) in {"float", "int"}
        )

    @property
    def formatted(self) -> bool:
        """Whether only arithmetic lies between it and an f-string's field, which takes a tensor as well."""
        import libcst as cst

        for parent in self.parents:
            if isinstance(parent, cst.FormattedStringExpression):
                return parent.conversion is None
            if not isinstance(parent, cst.BinaryOperation):
                return False
        return False

    @property
    def conditional(self) -> bool:
        """Whether it runs under a condition of the loop; the test of a branch does not."""
        import libcst as cst

        below = (cst.If, cst.Else, cst.ExceptHandler)
        child: cst.CSTNode = self.node
        for parent in self.parents:
            if isinstance(parent, below) or (isinstance(parent, cst.IfExp) and parent.test is not child):
                return self.statement is not None
            child = parent
        return False

    @property
    def rare(self) -> bool:
        """Whether it runs under a condition of the loop, or in a statement that only calls something."""
        import libcst as cst

        return self.conditional or isinstance(self.statement, cst.Expr)


def reads(tree: Tree, name: str, root: cst.CSTNode) -> Iterator[Read]:
    """Every read of the name below `root` in its own scope; what nested functions do is not seen."""
    import libcst as cst

    for node in tree.walk(root):
        if not isinstance(node, cst.Name) or node.value != name:
            continue
        parents: list[cst.CSTNode] = []
        for parent in tree.up(node):
            if parent is root:
                break
            parents.append(parent)
        if not parents or any(isinstance(p, (cst.FunctionDef, cst.Lambda, cst.ClassDef)) for p in parents):
            continue
        first = parents[0]
        if isinstance(first, (cst.Attribute, cst.Arg, cst.Param)) and node in (
            getattr(first, "attr", None),
            getattr(first, "keyword", None),
            getattr(first, "name", None),
        ):
            continue
        if _written(node, parents):
            continue
        statement = next((parent for parent in parents if isinstance(parent, cst.BaseSmallStatement)), None)
        yield Read(node, tuple(parents), statement)


def _written(node: cst.Name, parents: list[cst.CSTNode]) -> bool:
    import libcst as cst

    first = parents[0]
    if isinstance(first, (cst.AugAssign, cst.NamedExpr, cst.AnnAssign, cst.For, cst.CompFor)) and first.target is node:
        return True
    return any(isinstance(parent, (cst.AssignTarget, cst.Del)) for parent in parents)


def reads_to_convert(tree: Tree, name: str, loop: Loop, own: cst.CSTNode) -> list[cst.Name]:
    """Reads that happen rarely (under a condition of the loop) or are shown, where a tensor would not do as it is.

    own: the statement that sets the name; reads in statements that set it are left as they are too.
    """
    return [
        read.node
        for read in reads(tree, name, loop)
        if read.rare
        and not read.converted
        and not read.formatted
        and read.statement is not None
        and read.statement is not own
        and not sets(tree, read.statement, name)
    ]


def sets(tree: Tree, statement: cst.BaseSmallStatement, name: str) -> bool:
    """Whether the statement gives the name a new value."""
    import libcst as cst

    if isinstance(statement, (cst.AugAssign, cst.AnnAssign)):
        return tree.code(statement.target) == name
    return isinstance(statement, cst.Assign) and any(tree.code(t.target) == name for t in statement.targets)
