"""pynvml for tests: answers from the JSON file in FAKE_NVML, with the constants and errors of the real module.

The file is what a recorder wrote on a real machine: ``devices[i].calls[function]`` is a list of ``{"args", "value"}``
or ``{"args", "error"}`` ("NotSupported" stands for NVMLError_NotSupported). Beyond that format: ``{"device": j}`` in
args is the handle of device j; ``"hang": true`` instead of a value never returns and ``"crash": true`` ends the
process; ``devices[i].handle_error`` fails the handle; ``devices[i].fields["164/0"]`` is field 164 of scope 0;
``system.init_error`` fails nvmlInit and ``system.init`` may hang or crash; ``system.calls`` holds calls without a
device. A call that the file does not list was not recorded: NVML_ERROR_NO_DATA.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def _real() -> Any:
    here = Path(__file__).resolve()
    for entry in sys.path:
        file = Path(entry or ".") / "pynvml.py"
        if file.is_file() and file.resolve() != here:
            spec = importlib.util.spec_from_file_location("real_pynvml", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["real_pynvml"] = module  # it looks itself up there
            spec.loader.exec_module(module)
            return module
    raise ImportError("the real pynvml is not installed")


_pynvml = _real()
globals().update(
    {
        name: value
        for name, value in vars(_pynvml).items()
        if not name.startswith(("__", "nvmlInit", "nvmlShutdown", "nvmlDevice", "nvmlSystem"))
    }
)
_machine = json.loads(Path(os.environ["FAKE_NVML"]).read_text(encoding="utf-8"))
_NO_DATA = _pynvml.NVML_ERROR_NO_DATA
_VECTORS = ("nvmlDeviceGetCpuAffinity", "nvmlDeviceGetCpuAffinityWithinScope", "nvmlDeviceGetMemoryAffinity")


class _Handle:
    def __init__(self, index: int) -> None:
        self.index = index


def _fail(name: str) -> None:
    raise getattr(_pynvml, f"NVMLError_{name}")


def nvmlInit() -> None:
    _one(_machine["system"].get("init", {"value": None}))
    if "init_error" in _machine["system"]:
        _fail(_machine["system"]["init_error"])


def nvmlShutdown() -> None:
    return None


def nvmlDeviceGetCount() -> int:
    return len(_machine["devices"])


def nvmlDeviceGetHandleByIndex(index: int) -> _Handle:
    if not 0 <= index < len(_machine["devices"]):
        _fail("InvalidArgument")
    if "handle_error" in _machine["devices"][index]:
        _fail(_machine["devices"][index]["handle_error"])
    return _Handle(index)


def nvmlSystemGetDriverVersion() -> str:
    return str(_machine["system"]["driver_version"])


def nvmlSystemGetNVMLVersion() -> str:
    return str(_machine["system"]["nvml_version"])


def nvmlDeviceGetFieldValues(handle: _Handle, fields: list[Any]) -> list[SimpleNamespace]:
    known = _machine["devices"][handle.index].get("fields", {})
    answers = []
    for field in fields:
        number, scope = field if isinstance(field, tuple) else (field, 0)
        value = known.get(f"{number}/{scope}")
        code = 0 if value is not None else _pynvml.NVML_ERROR_NOT_SUPPORTED
        answers.append(
            SimpleNamespace(fieldId=number, scopeId=scope, nvmlReturn=code, value=SimpleNamespace(uiVal=value or 0))
        )
    return answers


def _struct(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{key: _struct(item) for key, item in value.items()})
    return [_struct(item) for item in value] if isinstance(value, list) else value


def _one(entry: dict[str, Any]) -> Any:
    if entry.get("hang"):
        time.sleep(3600)
    if entry.get("crash"):
        os.abort()
    if "error" in entry:
        _fail(entry["error"])
    return _struct(entry["value"])


def _serve(name: str, arguments: tuple[Any, ...]) -> Any:
    calls = _machine["system"].get("calls", {})
    if arguments and isinstance(arguments[0], _Handle):
        calls = _machine["devices"][arguments[0].index]["calls"]
        arguments = arguments[1:]
    asked = [{"device": argument.index} if isinstance(argument, _Handle) else argument for argument in arguments]
    for entry in calls.get(name, ()):
        known = entry["args"]
        if known == asked:
            return _one(entry)
        if name in _VECTORS and len(known) == len(asked) and known[1:] == asked[1:]:
            value = _one(entry)  # recorded with another number of words
            return [*value, *[0] * asked[0]][: asked[0]]
    raise _pynvml.NVMLError(_NO_DATA)


def __getattr__(name: str) -> Any:
    if name.startswith(("nvmlDevice", "nvmlSystem")) and hasattr(_pynvml, name):
        return lambda *arguments: _serve(name, arguments)
    raise AttributeError(f"module 'pynvml' has no attribute {name!r}")
