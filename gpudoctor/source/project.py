"""The modules of the scanned project: parsed once and kept while there is room, found by their import names.

Nothing is imported or run. Only files near the scanned ones are read, never the search path of Python.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from gpudoctor.source.files import SourceText, UnreadableError, read_source, subject_of

_KEPT_BYTES = 3_200_000  # source text whose trees are kept: about 30 times as much memory
_MOST_FOLLOWED = 500_000  # bytes: a larger file is generated or data, and is only looked at where it is scanned itself
# What these do is known by their names, also where they are scanned themselves: following accelerate.Accelerator
# through its source tells less than the name does, and costs ten times as much.
_KNOWN_PACKAGES = frozenset(["torch", "numpy", "lightning", "accelerate", "transformers"])
_DEEPEST = 200  # levels of nesting that are followed
_BASES_OF_MODULES = {
    "Module",
    "LightningModule",
    "PreTrainedModel",
    "Sequential",
    "ModuleList",
    "ModuleDict",
    "Metric",
    "GenerationMixin",
}

# Large classes of frameworks: nothing of what is looked for stands in them, even where their own package is scanned.
FRAMEWORK_BASES = frozenset(
    [
        "Module",
        "LightningModule",
        "LightningDataModule",
        "PreTrainedModel",
        "GenerationMixin",
        "GradientCheckpointingLayer",
        "ModelOutput",
        "PreTrainedConfig",
        "PretrainedConfig",
        "Dataset",
        "Optimizer",
        "Enum",
        "ABC",
        "object",
    ]
)


class SyntaxProblemError(Exception):
    """Why a file does not parse: one line."""


@dataclass(slots=True, eq=False)
class Function:
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    module: Module
    name: str  # qualified: Trainer.fit
    cls: Class | None = None
    is_generator: bool | None = None


@dataclass(slots=True, eq=False)
class Class:
    node: ast.ClassDef
    module: Module
    name: str
    bases: tuple[str, ...] = ()  # dotted names as written
    methods: dict[str, Function] = field(default_factory=dict)

    def inherits(self, *names: str) -> bool:
        """Whether a base is written with one of these last names."""
        return any(base.rpartition(".")[2] in names for base in self.bases)


@dataclass(slots=True, eq=False)
class Module:
    source: SourceText
    tree: ast.Module
    lines: list[str]
    functions: list[Function] = field(default_factory=list)
    classes: list[Class] = field(default_factory=list)
    definitions: dict[int, Function | Class] = field(default_factory=dict)  # by id of the node
    loops: list[int] = field(default_factory=list)  # lines on which loops begin
    uses: int = 0  # how often it was asked for
    evidence: dict[int, bool] = field(default_factory=dict)  # by line of a class: it names a GPU somewhere

    def forget(self) -> None:
        """Break the cycle between a module and its functions; what still refers to one of them may use it."""
        for known in self.definitions.values():
            if isinstance(known, Class):
                known.methods = {}
        self.functions, self.classes, self.definitions = [], [], {}

    @property
    def subject(self) -> str:
        return self.source.subject

    @property
    def folder(self) -> str:
        return os.path.dirname(self.source.path)  # noqa: PTH120 - strings throughout

    def line_of(self, line: int) -> int:
        """The line of the file for a line of the text; they differ in notebooks."""
        places = self.source.places
        if places is None or not 0 < line <= len(places):
            return line
        return places[line - 1].line or line

    def text_of(self, node: ast.AST) -> str:
        """The source of an expression on one line, at most 100 characters."""
        first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", None) or 1
        begin, end = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", None) or 0
        if first == last:
            part = self.lines[first - 1].encode()[begin:end].decode(errors="replace")
        else:
            part = " ".join(line.strip() for line in self.lines[first - 1 : min(last, first + 4)])
        part = " ".join(part.split())
        return part if len(part) <= 100 else part[:97] + "..."


class Project:
    """Parses on demand. One per process."""

    def __init__(self, cwd: str, roots: Sequence[str] = ()) -> None:
        self.cwd = cwd
        self.roots = tuple(roots)  # folders that were given: their modules are the project's
        self._modules: OrderedDict[str, Module] = OrderedDict()
        self._bytes = 0
        self._leaving: list[Module] = []  # made room, but the walk that is under way may still use them
        self._packages: dict[str, tuple[str, str]] = {}
        self._found: dict[tuple[str, str], str | None] = {}

    def load(self, path: str) -> Module:
        """UnreadableError or SyntaxProblemError says in one line why a file cannot be had."""
        known = self._modules.get(path)
        if known is not None:
            known.uses += 1
            self._modules.move_to_end(path)
            return known
        source = read_source(path, subject_of(path, self.cwd))
        self._make_room(len(source.text))
        module = parse(source)
        self._modules[path] = module
        self._bytes += len(source.text)
        return module

    def _make_room(self, size: int) -> None:
        """Before the next tree is made: what many files import stays, of the others the oldest goes."""
        while self._modules and self._bytes + size > _KEPT_BYTES:
            last = len(self._modules) - (1 if len(self._modules) > 1 else 0)
            least = min(islice(self._modules, last), key=lambda name: self._modules[name].uses)
            old = self._modules.pop(least)
            self._bytes -= len(old.source.text)
            self._leaving.append(old)

    def settle(self) -> None:
        """After a walk: what made room is let go. Earlier, the walk would put its functions into it again."""
        for module in self._leaving:
            module.forget()
        self._leaving.clear()

    def clear(self) -> None:
        self.settle()
        for module in self._modules.values():
            module.forget()
        self._modules.clear()
        self._bytes = 0

    def find(self, importer: Module, name: str, level: int) -> Module | None:
        """The module of the project that an import names, or None: a package outside, or not to be read."""
        path = self.path(importer, name, level)
        if path is None or (path not in self._modules and size_of(path) > _MOST_FOLLOWED):
            return None
        try:
            return self.load(path)
        except (UnreadableError, SyntaxProblemError):
            return None  # it is reported where it is scanned itself

    def in_package(self, module: Module) -> bool:
        return bool(self._package(module.folder)[1])

    def path(self, importer: Module, name: str, level: int) -> str | None:
        """The file of the project that an import names, without reading it."""
        folder = importer.folder
        key = (folder + "\0" * level, name)
        if key not in self._found:
            self._found[key] = self._search(folder, name, level)
        return self._found[key]

    def _search(self, folder: str, name: str, level: int) -> str | None:
        if level:
            for _ in range(level - 1):
                folder = os.path.dirname(folder)  # noqa: PTH120
            return _module_file(folder, name)
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in _KNOWN_PACKAGES:
            return None
        base, own = self._package(folder)
        if own:  # inside a package only the package itself is near
            if own == top:
                return _module_file(base, name)
            near = [base] if "site-packages" not in base and "dist-packages" not in base else []
        else:
            near = [folder]
        for where in [*near, *self.roots, self.cwd]:
            if "site-packages" in where and where != folder:
                continue
            found = _module_file(where, name)
            if found is not None:
                return found
        return None

    def _package(self, folder: str) -> tuple[str, str]:
        """The folder that holds the outermost package of this folder, and the name of that package ("" for none)."""
        known = self._packages.get(folder)
        if known is None:
            where, own = folder, ""
            while Path(where, "__init__.py").is_file() and os.path.dirname(where) != where:  # noqa: PTH120
                where, own = os.path.split(where)
            known = self._packages[folder] = (where, own)
        return known


def size_of(path: str) -> int:
    """Bytes; 0 for what cannot be asked."""
    try:
        return os.path.getsize(path)  # noqa: PTH202 - one call for each of many thousand files
    except OSError:
        return 0


def _module_file(folder: str, name: str) -> str | None:
    path = os.path.join(folder or ".", *name.split(".")) if name else folder or "."  # noqa: PTH118
    for candidate in (f"{path}.py", os.path.join(path, "__init__.py")):  # noqa: PTH118
        if (name or candidate.endswith("__init__.py")) and os.path.isfile(candidate):  # noqa: PTH113
            return os.path.normpath(candidate)
    return None


def parse(source: SourceText) -> Module:
    """The tree of a file with its functions and classes; SyntaxProblemError in one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own, such as invalid escapes
            tree = ast.parse(source.text)
    except SyntaxError as error:
        raise SyntaxProblemError(_told(source, error)) from None
    except (ValueError, RecursionError, MemoryError) as error:
        why = " ".join(str(error).split()) or "nested too deeply"
        raise SyntaxProblemError(f"{source.subject}: it does not parse: {why}") from None
    module = Module(source=source, tree=tree, lines=source.text.split("\n"))
    _collect(module, tree.body, "", None, 0)
    return module


def _told(source: SourceText, error: SyntaxError) -> str:
    line, where = error.lineno or 1, ""
    if source.places is not None and 0 < line <= len(source.places):
        place = source.places[line - 1]
        line, where = place.line or place.cell_line, f" (cell {place.cell}, line {place.cell_line})"
    why = " ".join((error.msg or "invalid syntax").split())
    python2 = re.search(r"(?m)^\s*(print\s+[\"'\w]|except\s+[\w.]+\s*,\s*\w+\s*:|raise\s+\w+\s*,)", source.text)
    hint = "; it looks like Python 2" if python2 else ""
    return f"{source.subject}:{line}{where}: it does not parse: {why}{hint}"


def _collect(module: Module, body: Sequence[ast.stmt], prefix: str, cls: Class | None, depth: int) -> None:
    """Functions and classes at module and class level, in order; those inside functions are met when these run."""
    if depth > _DEEPEST:
        return
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = Function(node=node, module=module, name=prefix + node.name, cls=cls)
            module.definitions[id(node)] = function
            module.functions.append(function)
            if cls is not None:
                cls.methods[node.name] = function
        elif isinstance(node, ast.ClassDef):
            bases = tuple(text for text in map(dotted, node.bases) if text)
            found = Class(node=node, module=module, name=prefix + node.name, bases=bases)
            module.definitions[id(node)] = found
            module.classes.append(found)
            _collect(module, node.body, f"{prefix}{node.name}.", found, depth + 1)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                _collect(module, getattr(node, part, None) or (), prefix, cls, depth + 1)
            for handler in getattr(node, "handlers", ()):
                _collect(module, handler.body, prefix, cls, depth + 1)


def dotted(node: ast.AST) -> str | None:
    """a.b.c for a name or a chain of attributes, also below a subscript such as Generic[T]; None for anything else."""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def looks_like_module(cls: Class) -> bool:
    """Whether a class is an nn.Module by the name of a base."""
    return any(
        base.rpartition(".")[2] in _BASES_OF_MODULES or base.endswith(("Module", "PreTrainedModel"))
        for base in cls.bases
    )
