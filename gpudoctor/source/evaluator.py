"""One entry for all expressions; `expressions` fills the table. Apart, so that the modules may call each other."""

from __future__ import annotations

import ast
from collections.abc import Callable

from gpudoctor.source.interpreter import Interpreter
from gpudoctor.source.values import ANY, Value

STEPS: dict[type[ast.expr], Callable[[Interpreter, ast.expr], Value]] = {}


def evaluate(it: Interpreter, node: ast.expr) -> Value:
    """The Value of an expression; ANY for what is not known."""
    step = STEPS.get(type(node))
    return ANY if step is None else step(it, node)
