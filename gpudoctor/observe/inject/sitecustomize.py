"""Put first on PYTHONPATH by `gpudoctor.observe.watch`: starts the watcher, then runs the sitecustomize it hides.

Without GPUDOCTOR_WATCH_PLAN in the environment nothing is started. Nothing here may raise because of us: the
interpreter would print it into the user's stderr.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start():
    plan = os.environ.get("GPUDOCTOR_WATCH_PLAN")
    if not plan:
        return
    try:
        import _gpudoctor_watch

        _gpudoctor_watch.start(plan)
    except Exception as error:
        if os.environ.get("GPUDOCTOR_WATCH_DEBUG"):
            raise
        sys.stderr.write(f"gpudoctor: watching did not start: {type(error).__name__}: {error}\n")


def _chain():
    """Runs the sitecustomize that would have run without us, under its own name."""
    from importlib.machinery import PathFinder

    sys.path[:] = [entry for entry in sys.path if entry != _HERE]  # children get it again from PYTHONPATH
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = type(sys)("sitecustomize")
    module.__spec__ = spec
    module.__file__ = spec.origin
    module.__loader__ = spec.loader
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_start()
_chain()
