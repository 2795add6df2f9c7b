"""Waits for modules to be imported, and supplies patched text in place of files.

Patched text must be used wherever the file would be: imported, run as `python train.py`, as `python -m train`, or
run again by multiprocessing's spawned children. For a main script the interpreter itself asks sys.path_hooks first
(a folder or zip file may be a main script too), and that is the door used here: everything else about the start and
the end of the interpreter stays its own.
"""

import ast
import builtins
import os
import sys

from _gpudoctor_watch.state import W

_HITS = "__gpudoctor_hits__"
_STEP = "__gpudoctor_step__"
_wanted: dict = {}  # module name -> functions
# real path -> (text or None for the file's own, changed lines, line that counts steps or None, loops to leave early)
_texts: dict = {}
_hits: list = []  # one slot a marker: has it been executed?
_markers: dict = {}  # shown path of the plan -> {line: slot, or None where nothing can be executed}


def after(name, function):
    """Calls function(module) once `name` has been imported (at once when it has been already)."""
    if name in sys.modules:
        _guarded(function, sys.modules[name])
        return
    _wanted.setdefault(name, []).append(function)


def _guarded(function, module):
    try:
        function(module)
    except Exception as error:
        W.failed(f"hook on {module.__name__}", error)


class _Finder:
    """Finds what the other finders find, and calls our functions when the module has been executed."""

    def __init__(self):
        self.busy = set()

    def find_spec(self, name, path=None, target=None):
        if name not in _wanted or name in self.busy:
            return None
        self.busy.add(name)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                if finder is self or find is None:
                    continue
                spec = find(name, path, target)
                if spec is not None:
                    self._hook(name, spec)
                    return spec
        finally:
            self.busy.discard(name)
        return None

    def _hook(self, name, spec):
        loader = spec.loader
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module):
            loader.__dict__.pop("exec_module", None)
            original(module)
            for function in _wanted.pop(name, ()):
                _guarded(function, module)

        try:
            loader.exec_module = exec_module  # on this instance only: the class stays what others compare with
        except Exception as error:
            W.failed(f"hook on {name}", error)


def install(plan):
    sys.meta_path.insert(0, _Finder())
    for patched in plan["patched"]:
        lines, loops = tuple(patched.get("lines") or ()), tuple(patched.get("end_loops") or ())
        _texts[os.path.realpath(patched["path"])] = (patched["text"], lines, None, loops)
    if plan["step_at"]:
        name, _, line = plan["step_at"].rpartition(":")
        path = os.path.realpath(os.path.join(W.cwd, name))
        text, lines, _, loops = _texts.get(path, (None, (), None, ()))
        _texts[path] = (text, lines, int(line), loops)
    if not _texts:
        return
    setattr(builtins, _HITS, _hits)
    setattr(builtins, _STEP, _step)
    _supply_to_imports()
    _supply_to_runpy()
    # Before the main script begins, argv[0] is its path, or -c, -m, or empty; a spawned child's is -c here, and is
    # made its parent's only later, when it runs the file again by other means.
    if sys.argv and os.path.realpath(sys.argv[0]) in _texts:
        sys.path_hooks.insert(0, _MainDoor)


def _step():
    from _gpudoctor_watch import steps

    steps.step_line()


def _known(path):
    return _texts.get(os.path.realpath(path)) if isinstance(path, str) else None


def _code(path):
    """The code object for a file in `_texts`: its patched text, with markers."""
    text, lines, step_line, loops = _texts[os.path.realpath(path)]
    if text is None:
        import tokenize

        with tokenize.open(path) as file:
            text = file.read()
    elif not text.startswith("\ufeff"):
        import linecache

        # tracebacks, inspect.getsource and torch.compile read the text of a file from here
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    tree = ast.parse(text, path)
    if lines and not _markers.get(os.path.realpath(path)):
        _markers[os.path.realpath(path)] = {}
    _mark(tree, os.path.realpath(path), lines, step_line)
    if loops:
        from _gpudoctor_watch import short

        short.mark(tree, os.path.realpath(path), loops)
    return compile(tree, path, "exec", dont_inherit=True)


def _mark(tree, path, lines, step_line):
    for line in lines:
        place = _statement(tree, line)
        if place is None:
            _markers[path][line] = None  # a comment, a blank line, a docstring: nothing to execute
            continue
        slot = _markers[path].get(line)
        if slot is None:
            slot = _markers[path][line] = len(_hits)
            _hits.append(False)
        _insert(place, ast.parse(f"{_HITS}[{slot}] = True").body[0])
    if step_line is not None:
        place = _statement(tree, step_line)
        if place is None:
            W.note(f"step_at: line {step_line} of {path} holds no statement")
        else:
            _insert(place, ast.parse(f"{_STEP}()").body[0])


def _statement(tree, line):
    """(list of statements, statement) of the innermost statement that covers the line; None where none does, or
    where nothing may stand before it."""
    for block in _blocks(tree):
        for item in block:
            first = min([item.lineno, *(part.lineno for part in getattr(item, "decorator_list", ()))])
            if not first <= line <= (item.end_lineno or item.lineno):
                continue
            docstring = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
            future = isinstance(item, ast.ImportFrom) and item.module == "__future__"
            return None if docstring or future else _statement(item, line) or (block, item)
    return None


def _blocks(node):
    """The lists of statements right below a node."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for name in ("handlers", "cases"):
        for part in getattr(node, name, None) or ():
            yield part.body


def _insert(place, marker):
    block, item = place
    for node in ast.walk(marker):
        if "lineno" in node._attributes:
            ast.copy_location(node, item)
            node.end_lineno, node.end_col_offset = item.lineno, item.col_offset
    block.insert(next(number for number, other in enumerate(block) if other is item), marker)


def executed_lines():
    """(path -> executed changed lines, path -> changed lines that were not), both sorted."""
    done, missed = {}, {}
    for patched in W.plan["patched"]:
        marks = _markers.get(os.path.realpath(patched["path"]), {})
        for line in patched.get("lines") or ():
            slot = marks.get(line, -1)
            hit = slot is None or (slot >= 0 and _hits[slot])
            (done if hit else missed).setdefault(patched["path"], []).append(line)
    return done, missed


# --- imported modules, `python -m`, spawned children ------------------------------------------------------------


def _supply_to_imports():
    from importlib.machinery import SourceFileLoader

    original = SourceFileLoader.get_code

    def get_code(self, fullname):
        path = getattr(self, "path", None)
        if _known(path) is not None:
            return _code(path)
        return original(self, fullname)

    SourceFileLoader.get_code = get_code


def _supply_to_runpy():
    import runpy

    original = runpy._get_code_from_file

    def _get_code_from_file(*args):
        # (run_name, path) -> (code, path) up to 3.11 or so, later (path) -> code
        path = args[-1]
        if not _known(path):
            return original(*args)
        return (_code(path), path) if len(args) == 2 else _code(path)

    runpy._get_code_from_file = _get_code_from_file


# --- the main script --------------------------------------------------------------------------------------------


class _MainDoor:
    """A path hook that accepts the main script when it is one of ours, once, for the interpreter's own start."""

    opened = False

    def __init__(self, path):
        if _MainDoor.opened or _known(path) is None:
            raise ImportError(path)
        _MainDoor.opened = True
        self.path = path

    def find_spec(self, name, target=None):
        from importlib.machinery import ModuleSpec

        if name != "__main__":
            return None
        spec = ModuleSpec(name, self, origin=self.path)
        spec.has_location = True
        return spec

    def create_module(self, spec):
        return None

    def get_filename(self, name):
        return self.path

    def get_code(self, name):
        sys.path_importer_cache.pop(self.path, None)
        if _MainDoor in sys.path_hooks:
            sys.path_hooks.remove(_MainDoor)
        self._as_a_plain_script()
        builtins.__gpudoctor_main__ = self._run
        return compile("__gpudoctor_main__()", "<gpudoctor>", "exec")

    def exec_module(self, module):  # importlib wants it; runpy takes get_code
        exec(self.get_code("__main__"), module.__dict__)

    def _as_a_plain_script(self):
        """The interpreter put the file itself first on sys.path, as it does for a zip file."""
        if sys.path and sys.path[0] == self.path:
            del sys.path[0]
        if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
            sys.path.insert(0, os.path.dirname(os.path.realpath(self.path)))

    def _run(self):
        from importlib.machinery import SourceFileLoader

        del builtins.__gpudoctor_main__
        code = _code(self.path)
        main = sys.modules["__main__"].__dict__
        main.update(
            __name__="__main__",
            __file__=self.path,
            __cached__=None,
            __doc__=None,
            __loader__=SourceFileLoader("__main__", self.path),
            __package__=None,
            __spec__=None,
        )
        exec(code, main)
