"""A parsed source file: libcst nodes with their places in the text, parents and qualified names.

Edits are splices of the text at the places of nodes, so everything between them stays as it is, byte for byte.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import libcst as cst

    Node = TypeVar("Node", bound=cst.CSTNode)

LINE_LIMIT = 120  # a line that we write does not get longer than this
_NEWLINE = re.compile(r"\r\n?|\n")
Splice = tuple[int, int, str]  # start and end offset of what goes, and the text that takes its place


class CannotEditError(Exception):
    """Why an edit is refused; the text is shown to the user."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One version of the file. Edits return a new text, and the next edit parses that."""

    text: str
    module: cst.Module
    starts: tuple[int, ...]  # offset of the first character of every line
    ranges: Mapping[cst.CSTNode, tuple[tuple[int, int], tuple[int, int]]]  # (line, column) of start and end
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    below: Mapping[cst.CSTNode, Sequence[cst.CSTNode]]  # children in the order of the text
    names: Callable[[], Mapping[cst.CSTNode, Any]]  # libcst's qualified names: most of the cost, so made when asked for

    def walk(self, root: cst.CSTNode | None = None) -> Iterator[cst.CSTNode]:
        pending = [root or self.module]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(reversed(self.below.get(node, ())))

    def lines(self, node: cst.CSTNode) -> tuple[int, int]:
        """First and last line of a node, 1-based."""
        return self.ranges[node][0][0], self.ranges[node][1][0]

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Offsets of a node in the text. An expression's own brackets are outside of it, an argument's inside."""
        (line, column), (last, end) = self.ranges[node]
        return self.starts[line - 1] + column, self.starts[last - 1] + end

    def line_start(self, offset: int) -> int:
        return max(start for start in self.starts if start <= offset)

    def line_end(self, offset: int) -> int:
        """The offset of the line break (or the end of the text) at or after `offset`."""
        found = _NEWLINE.search(self.text, offset)
        return found.start() if found else len(self.text)

    def indentation(self, offset: int) -> str:
        """The white space that starts the line of `offset`."""
        line = self.text[self.line_start(offset) : self.line_end(offset)]
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def unit(self, statement: cst.CSTNode) -> str:
        """One step of indentation, as the block of the statement has it."""
        import libcst as cst

        own = self.indentation(self.span(statement)[0])
        for parent in self.up(statement):
            if isinstance(parent, cst.BaseCompoundStatement):
                outer = self.indentation(self.span(parent)[0])
                if own.startswith(outer) and len(own) > len(outer):
                    return own[len(outer) :]
        return self.module.default_indent

    def function(self, node: cst.CSTNode) -> cst.CSTNode:
        """The function that holds a node, else the module."""
        import libcst as cst

        return next((up for up in self.up(node) if isinstance(up, (cst.FunctionDef, cst.Module))), self.module)

    def newline(self) -> str:
        found = _NEWLINE.search(self.text)
        return found.group() if found else "\n"

    def at(self, kind: type[Node], line: int) -> list[Node]:
        """The nodes of `kind` that cover `line`, in the order of the text."""
        return [
            node
            for node in self.walk()
            if isinstance(node, kind) and node in self.ranges and self.lines(node)[0] <= line <= self.lines(node)[1]
        ]

    def up(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The parents of a node, the nearest first."""
        parent = self.parents.get(node)
        while parent is not None:
            yield parent
            parent = self.parents.get(parent)

    def refers_to(self, node: cst.CSTNode) -> frozenset[str]:
        """What a name or attribute may refer to, such as torch.utils.data.DataLoader; empty when unknown."""
        found = self.names().get(node)
        return frozenset(name.name for name in (found() if callable(found) else found) or ())

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node).strip()

    def spliced(self, splices: Sequence[Splice]) -> str:
        text = self.text
        for start, end, new in sorted(splices, key=lambda splice: splice[:2], reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement line, or the compound statement, that holds `node`."""
        import libcst as cst

        for parent in [node, *self.up(node)]:
            if isinstance(parent, (cst.SimpleStatementLine, cst.SimpleStatementSuite, cst.BaseCompoundStatement)):
                return parent
        raise CannotEditError("the code stands outside of a statement")

    def siblings(self, statement: cst.CSTNode) -> tuple[Sequence[cst.CSTNode], int]:
        """The statements of the block that holds a statement line, and its position among them."""
        import libcst as cst

        block = self.parents.get(statement)
        if not isinstance(block, (cst.Module, cst.IndentedBlock)):
            raise CannotEditError("the statement shares its line with the one that it belongs to")
        return block.body, [id(part) for part in block.body].index(id(statement))


@functools.lru_cache(maxsize=16)  # many edits are tried on one text
def parse(text: str) -> Tree:
    """CannotEditError says where the text does not parse."""
    import libcst as cst
    from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider, QualifiedNameProvider

    try:
        module = cst.parse_module(text)
        if module.code != text:
            raise CannotEditError("the file cannot be written back unchanged, so it is left alone")
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        found: dict[Any, Any] = dict(wrapper.resolve_many([PositionProvider, ParentNodeProvider]))
    except cst.ParserSyntaxError as error:
        raise CannotEditError(f"line {error.raw_line} does not parse") from None
    except (RecursionError, ValueError, UnicodeError) as error:
        raise CannotEditError(f"the file does not parse ({type(error).__name__})") from None
    below: dict[Any, list[Any]] = {}
    for node, parent in found[ParentNodeProvider].items():
        below.setdefault(parent, []).append(node)
    return Tree(
        text=text,
        module=wrapper.module,
        starts=(0, *(match.end() for match in _NEWLINE.finditer(text))),
        ranges={
            node: ((place.start.line, place.start.column), (place.end.line, place.end.column))
            for node, place in found[PositionProvider].items()
        },
        parents=found[ParentNodeProvider],
        below=below,
        names=functools.cache(lambda: wrapper.resolve(QualifiedNameProvider)),
    )


def name_or_attribute(node: cst.CSTNode) -> bool:
    """A plain name or a chain of attributes: writing it twice evaluates nothing twice."""
    import libcst as cst

    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def used_names(tree: Tree) -> set[str]:
    """Every identifier of the file but attributes and keywords, so that a new name can be chosen beside them."""
    import libcst as cst

    names = set()
    for node in tree.walk():
        if isinstance(node, cst.Name):
            parent = tree.parents[node]
            attribute = isinstance(parent, cst.Attribute) and parent.attr is node
            if not attribute and not (isinstance(parent, cst.Arg) and parent.keyword is node):
                names.add(node.value)
    return names


def method_calls(tree: Tree, method: str) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
    """The calls of a method of this name in the file, each with what it is called on."""
    import libcst as cst

    for node in tree.walk():
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == method:
            yield node, node.func.value


def after_brackets(tree: Tree, node: cst.BaseExpression) -> int:
    """The offset behind an expression and its own brackets."""
    end = tree.span(node)[1]
    for _ in node.rpar:
        end = tree.text.index(")", end) + 1
    return end


def last_name(node: cst.CSTNode) -> str:
    """``DataLoader`` of ``data.DataLoader``; an empty string for anything but names and attributes."""
    import libcst as cst

    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""
