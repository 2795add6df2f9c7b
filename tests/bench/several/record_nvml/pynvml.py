"""pynvml that writes down what the real one answered: one JSON line a call into the file RECORD_NVML.

Put this folder first on PYTHONPATH of a program that uses NVML; record.nvml_json makes of the lines what the fake NVML
of the tests serves. It only passes calls on: nothing is changed on the machine beyond what the caller asks for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
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
            sys.modules["real_pynvml"] = module
            spec.loader.exec_module(module)
            return module
    raise ImportError("the real pynvml is not installed")


_pynvml = _real()
_lock = threading.Lock()
_handles: dict[int, int] = {}  # address of a handle -> index


def _address(value: Any) -> int | None:
    if isinstance(value, ctypes._Pointer):
        return ctypes.cast(value, ctypes.c_void_p).value
    return None


def _plain(value: Any) -> Any:
    """A value of NVML as JSON: structures become objects, vectors lists, handles their device."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, ctypes.Structure):
        return {field[0]: _plain(getattr(value, field[0])) for field in value._fields_}
    if isinstance(value, ctypes.Union):
        return {field[0]: _plain(getattr(value, field[0])) for field in value._fields_}
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [_plain(item) for item in value]
    if isinstance(value, ctypes._SimpleCData):
        return _plain(value.value)
    if type(value).__name__ == "nvmlFriendlyObject":  # pynvml's copy of a structure
        return {name: _plain(item) for name, item in vars(value).items()}
    address = _address(value)
    if address is not None:
        return {"device": _handles[address]} if address in _handles else None
    return str(value)


def _write(entry: dict[str, Any]) -> None:
    with _lock, Path(os.environ["RECORD_NVML"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def _recorded(name: str, function: Any) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            value = function(*arguments, **named)
        except _pynvml.NVMLError as error:
            _write({"call": name, "args": _plain(arguments), "error": type(error).__name__})
            raise
        if name == "nvmlDeviceGetHandleByIndex":
            address = _address(value)
            if address is not None:
                _handles[address] = arguments[0]
        _write({"call": name, "args": _plain(arguments), "value": _plain(value)})
        return value

    return call


def __getattr__(name: str) -> Any:
    value = getattr(_pynvml, name)
    return _recorded(name, value) if name.startswith("nvml") and callable(value) else value


def __dir__() -> list[str]:
    return dir(_pynvml)
