"""Loops that are left early, so that the code after them runs: each after a few steps or batches since it began.

The user's loops get one statement before them and one at the head of their body, in the syntax tree alone: line
numbers stay as they are.
"""

import ast
import builtins

from _gpudoctor_watch.state import W

_BEGIN, _ENOUGH = "__gpudoctor_begin__", "__gpudoctor_enough__"
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_begun: dict = {}  # number of a loop -> the counts when it began
_numbers: dict = {}  # (path, line) -> number


def mark(tree, path, lines):
    """Put both statements to every loop of the tree that begins at one of the lines."""
    setattr(builtins, _BEGIN, _begin)
    setattr(builtins, _ENOUGH, _enough)
    for node in list(ast.walk(tree)):
        for block in _statements(node):
            for loop in [item for item in block if isinstance(item, _LOOPS) and item.lineno in lines]:
                number = _numbers.setdefault((path, loop.lineno), len(_numbers))
                first = loop.body[0]
                loop.body.insert(0, _made(f"if {_ENOUGH}({number}):\n break", first))
                block.insert(block.index(loop), _made(f"{_BEGIN}({number})", loop))


def _statements(node):
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _made(text, beside):
    statement = ast.parse(text).body[0]
    for node in ast.walk(statement):
        if "lineno" in node._attributes:
            ast.copy_location(node, beside)
            node.end_lineno, node.end_col_offset = beside.lineno, beside.col_offset
    return statement


def _counts():
    return W.backwards, W.optimizer_steps_all, W.step_count, sum(info.batches for info in W.loaders)


def _begin(number):
    _begun[number] = _counts()


def _enough(number):
    """Whether the loop has gone on for long enough: by backward passes and optimizer steps, and by forward passes and
    batches only where there are none of those."""
    limit = W.plan["end_loop_after"]
    if not W.active or limit is None:
        return False
    since = [now - then for now, then in zip(_counts(), _begun[number])]
    return max(since[:2] if any(since[:2]) else since) >= limit
