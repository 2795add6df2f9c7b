"""Makes the loader that a `module:callable` or `file.py:callable` target gives, and begins to iterate it.

Run as `python -m _gpudoctor_watch.target TARGET ARGUMENTS`, with the loader's arguments as JSON for a target that
gives a Dataset. Spawned workers import this module again, so nothing happens at import.
"""

import importlib
import importlib.util
import json
import os
import sys


def load(target):
    """The callable that TARGET names; SystemExit with one line when it cannot be had."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        module = _from_file(os.path.abspath(place))
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(place)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise SystemExit(f"gpudoctor: {place} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise SystemExit(f"gpudoctor: {target} is not callable")
    return found


def _from_file(path):
    """Imported under its own name from its own folder, so that spawned workers can import it too."""
    folder, stem = os.path.split(path)[0], os.path.basename(path)[: -len(".py")]
    sys.path.insert(0, folder)
    if stem.isidentifier() and stem not in sys.modules:
        spec = importlib.util.find_spec(stem)
        if spec is not None and spec.origin and os.path.realpath(spec.origin) == os.path.realpath(path):
            return importlib.import_module(stem)
    name = f"gpudoctor_target_{stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"gpudoctor: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def make_loader(target, arguments):
    """The DataLoader of a target, or one made with `arguments` around the Dataset that it gives."""
    made = load(target)()
    data = importlib.import_module("torch.utils.data")  # by name: the injected code imports no torch of its own
    if isinstance(made, data.DataLoader):
        return made
    iterable = isinstance(made, data.IterableDataset)
    if not iterable and not (hasattr(made, "__getitem__") and hasattr(made, "__len__")):
        raise SystemExit(f"gpudoctor: {target} gave {type(made).__name__}, and a Dataset or a DataLoader is wanted")
    if iterable:
        arguments = {name: value for name, value in arguments.items() if name not in ("shuffle", "drop_last")}
    if not arguments.get("num_workers"):
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            arguments.pop(name, None)
    arguments = _named_functions(target, arguments)
    return data.DataLoader(made, **arguments)


def _named_functions(target, arguments):
    """collate_fn and worker_init_fn are given by their names in the target's module."""
    result = dict(arguments)
    for name in ("collate_fn", "worker_init_fn"):
        if isinstance(result.get(name), str):
            try:
                result[name] = load(target.rpartition(":")[0] + ":" + result[name])
            except SystemExit:
                del result[name]
    return result


def main(argv):
    loader = make_loader(argv[1], json.loads(argv[2]))
    from _gpudoctor_watch import candidates, loaders

    info = loaders.info_of(loader) or loaders._noted(loader, sys._getframe())
    candidates.take(loader, info)  # serves until it is told to end, and never returns for a target


if __name__ == "__main__":
    main(sys.argv)
