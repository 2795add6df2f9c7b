"""Lines that move data to a GPU inside code that loader workers run: fetching, iterating, collating."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

_METHODS = {"__getitem__", "__getitems__", "__iter__", "__next__", "__call__"}
_DEPTH = 3  # functions of the same file that are called from there


def device_lines(cwd: Path, file: str, names: Collection[str]) -> tuple[str, ...]:
    """Sites ``FILE:LINE`` in `file` (relative to cwd) reached from the classes and functions in `names`."""
    try:
        text = (cwd / file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(f"{file}:{line}" for line in device_lines_of(text, names))


def device_lines_of(text: str, names: Collection[str]) -> tuple[int, ...]:
    """Line numbers in `text`; () when it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    functions = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    pending = [functions[name] for name in names if name in functions]
    methods: dict[str, ast.FunctionDef] = {}
    for name in names:
        for node in _family(name, classes):
            methods |= {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    pending += [node for name, node in methods.items() if name in _METHODS]
    devices = _device_attributes(methods)
    seen: set[int] = set()
    lines: set[int] = set()
    for _ in range(_DEPTH):
        following = []
        for function in pending:
            if id(function) in seen:
                continue
            seen.add(id(function))
            lines.update(_moves(function, devices))
            for call in _calls(function):
                target = _callee(call, functions, methods)
                following += [target] if target is not None else []
        pending = following
    return tuple(sorted(lines))


def _family(name: str, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """The class and those of its bases that stand in the same file, the outermost base first."""
    if name not in classes:
        return []
    node = classes.pop(name)  # popped, so that a class that names itself as its base ends here
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    found = [each for base in bases for each in _family(base, classes)]
    classes[name] = node
    return [*found, node]


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (item for item in ast.walk(node) if isinstance(item, ast.Call))


def _callee(
    call: ast.Call, functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef], methods: dict[str, ast.FunctionDef]
) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    if isinstance(call.func, ast.Name):
        return functions.get(call.func.id)
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "self":
        return methods.get(call.func.attr)
    return None


def _device_attributes(methods: dict[str, ast.FunctionDef]) -> set[str]:
    """Attributes of self that hold a GPU device."""
    found = set()
    for method in methods.values():
        for node in ast.walk(method):
            if isinstance(node, ast.Assign) and _names_device(node.value, set()):
                found |= {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
    return found


def _moves(function: ast.AST, devices: set[str]) -> Iterator[int]:
    for call in _calls(function):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg in ("device", None))]
        if (
            (name == "cuda" and not (isinstance(owner, ast.Name) and owner.id == "torch"))
            or (name == "to" and any(_names_device(value, devices) for value in values))
            or any(keyword.arg == "device" and _names_device(keyword.value, devices) for keyword in call.keywords)
        ):
            yield call.lineno


def _names_device(value: ast.expr, devices: set[str]) -> bool:
    """Whether an expression may be a GPU: a literal that says so, or an attribute that was set to one."""
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = node.value.split(":")[0]
            if kind == "cuda":
                return True
        elif isinstance(node, ast.Attribute) and node.attr in devices:
            return True
    return False
