"""Definitions and imports: the names of a module, and what an imported name stands for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from gpudoctor.source import calls, statements
from gpudoctor.source.interpreter import Interpreter, Scope
from gpudoctor.source.project import Class, Function, Module, dotted
from gpudoctor.source.values import ANY, CLASS, FUNCTION, LAZY, PROJECT, Value, host, named

_MOST_STARS = 8
_DEEPEST_IMPORT = 10


def _function(it: Interpreter, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    known = it.module.definitions.get(id(node))
    if known is None:
        prefix = f"{it.function}.<locals>." if it.function else ""
        known = Function(node=node, module=it.module, name=prefix + node.name)
        it.module.definitions[id(node)] = known
        it.module.functions.append(known)
    value = Value(FUNCTION, name=node.name)
    value.ref = (known, it.scope, None)
    it.scope.names[node.name] = calls.decorated(it, node, value)


def _class(it: Interpreter, node: ast.ClassDef) -> None:
    known = it.module.definitions.get(id(node))
    if known is None:
        bases = tuple(text for text in map(dotted, node.bases) if text)
        known = Class(node=node, module=it.module, name=node.name, bases=bases)
        it.module.definitions[id(node)] = known
        for child in node.body:
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                method = Function(node=child, module=it.module, name=f"{node.name}.{child.name}", cls=known)
                it.module.definitions[id(child)] = method
                it.module.functions.append(method)
                known.methods[child.name] = method
    value = Value(CLASS, name=node.name)
    value.ref = (known, it.scope)
    it.scope.names[node.name] = value


def _import(it: Interpreter, node: ast.Import) -> None:
    for alias in node.names:
        if alias.asname:
            it.scope.names[alias.asname] = _imported(it, alias.name, 0)
        else:
            top = alias.name.partition(".")[0]
            it.scope.names[top] = _imported(it, top, 0)


def _import_from(it: Interpreter, node: ast.ImportFrom) -> None:
    base = node.module or ""
    for alias in node.names:
        if alias.name == "*":
            it.scope.stars.append((base, node.level))
            continue
        value = _imported(it, base, node.level)
        value.tag = alias.name
        it.scope.names[alias.asname or alias.name] = value


def _imported(it: Interpreter, name: str, level: int) -> Value:
    """Resolved when it is used: most imports never are."""
    value = Value(PROJECT, name=name)
    value.ref = (it.module, level)
    return value


def resolve(it: Interpreter, value: Value, depth: int = 0) -> Value:
    """What an import stands for: a module or a definition of the project, or a name of a package outside."""
    if depth > _DEEPEST_IMPORT:  # modules that import the name from each other
        return ANY
    if value.kind == LAZY:
        return _late(it, value)
    if value.kind != PROJECT or value.ref is None or isinstance(value.ref, Scope):
        return value
    importer, level = value.ref
    name, wanted = value.name or "", value.tag
    if len(it.scopes) >= it.most_modules:
        path = it.project.path(importer, name, level)
        if path is None:
            return named(f"{name}.{wanted}" if wanted else name)
        if path not in it.scopes:
            return ANY
    if wanted is not None:
        inner = it.project.find(importer, f"{name}.{wanted}" if name else wanted, level)
        module = it.project.find(importer, name, level)
        if module is not None:
            scope = module_scope(it, module)
            found = scope.names.get(wanted) or starred(it, scope, wanted)
            if found is not None:
                return resolve(it, found, depth + 1)
        if inner is not None:
            return module_value(it, inner)
        if module is not None:
            return ANY
        return named(f"{name}.{wanted}" if name else wanted)
    module = it.project.find(importer, name, level)
    return module_value(it, module) if module is not None else named(name)


def _late(it: Interpreter, value: Value) -> Value:
    """The value of an assignment at the top of an imported module, evaluated when it is first used."""
    node, scope = value.ref
    if value.tag == "open":  # it needs itself
        return ANY
    value.tag = "open"
    saved = (it.module, it.scope, it.frames, it.calls, it.function, it.statement, it.no_grad)
    it.module, it.scope, it.frames, it.calls, it.function, it.no_grad = scope.module, scope, [], [], None, 0
    try:
        statements.run(it, [node])
    finally:
        it.module, it.scope, it.frames, it.calls, it.function, it.statement, it.no_grad = saved
    found = scope.names.get(value.name or "")
    return resolve(it, found) if found is not None and found is not value else ANY


def starred(it: Interpreter, scope: Scope, name: str, depth: int = 0) -> Value | None:
    """A name that came with ``from module import *``; packages that collect everything that way are not searched."""
    if depth > 1 or len(scope.stars) > _MOST_STARS:
        return None
    for base, level in scope.stars:
        module = it.project.find(scope.module, base, level) if len(it.scopes) < it.most_modules else None
        if module is not None and module is not scope.module:
            inner = module_scope(it, module)
            found = inner.names.get(name) or (starred(it, inner, name, depth + 1) if inner.stars else None)
            if found is not None:
                return found
    return None


def module_value(it: Interpreter, module: Module) -> Value:
    value = Value(PROJECT, name=module.subject)
    value.ref = module_scope(it, module)
    return value


def module_scope(it: Interpreter, module: Module) -> Scope:
    """The names of a module after its own code ran."""
    path = module.source.path
    known = it.scopes.get(path)
    if known is not None:
        return known
    scope = it.scopes[path] = Scope(module)
    if len(it.scopes) > 1:
        _define(it, module, scope)
        return scope
    scope.names["__name__"] = host("__main__")
    saved = (it.module, it.scope, it.frames, it.calls, it.function, it.statement, it.no_grad)
    it.module, it.scope, it.frames, it.calls, it.function, it.no_grad = module, scope, [], [], None, 0
    try:
        statements.run(it, module.tree.body)
    finally:
        it.module, it.scope, it.frames, it.calls, it.function, it.statement, it.no_grad = saved
    return scope


def define_only(it: Interpreter, module: Module, wanted: Callable[[ast.stmt], bool]) -> None:
    """A module that does nothing but define: its assignments are evaluated when used, the wanted ones at once."""
    scope = it.scopes[module.source.path] = Scope(module)
    _define(it, module, scope)
    for statement in module.tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and wanted(statement):
            it.scope = scope
            statements.run(it, [statement])


def _define(it: Interpreter, module: Module, scope: Scope) -> None:
    """The definitions and imports of an imported module; what its top assigns is evaluated when it is used."""
    scope.names["__name__"] = host(module.subject)
    saved = (it.module, it.scope, it.frames, it.calls, it.function, it.statement, it.no_grad)
    it.module, it.scope, it.frames, it.calls, it.function, it.no_grad = module, scope, [], [], None, 0
    try:
        _define_block(it, module.tree.body, scope)
    finally:
        it.module, it.scope, it.frames, it.calls, it.function, it.statement, it.no_grad = saved


def _define_block(it: Interpreter, body: Sequence[ast.stmt], scope: Scope) -> None:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.decorator_list:
            late = Value(LAZY, name=statement.name)  # decorators of the project may do anything
            late.ref = (statement, scope)
            scope.names[statement.name] = late
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
            _STEPS[type(statement)](it, statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    late = Value(LAZY, name=target.id)
                    late.ref = (statement, scope)
                    scope.names[target.id] = late
        elif isinstance(statement, ast.If):
            if not (isinstance(statement.test, ast.Compare) and dotted(statement.test.left) == "__name__"):
                _define_block(it, statement.body, scope)
                _define_block(it, statement.orelse, scope)
        elif isinstance(statement, ast.Try):
            _define_block(it, [*statement.body, *statement.orelse], scope)


def definition(it: Interpreter, node: ast.stmt) -> None:
    """A function, a class or an import."""
    _STEPS[type(node)](it, node)


_STEPS: dict[type[ast.stmt], Callable[[Interpreter, ast.stmt], None]] = {
    ast.FunctionDef: _function,  # type: ignore[dict-item]
    ast.AsyncFunctionDef: _function,  # type: ignore[dict-item]
    ast.ClassDef: _class,  # type: ignore[dict-item]
    ast.Import: _import,  # type: ignore[dict-item]
    ast.ImportFrom: _import_from,  # type: ignore[dict-item]
}
