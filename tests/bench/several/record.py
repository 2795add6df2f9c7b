"""Writes down this machine for tests/machines: tree.txt, nvml.json and the Case that collect made of both.

    python tests/bench/several/record.py FOLDER

Runs `collect` once. Files below /proc and /sys are written as collect read them (never an environment), NVML's answers
as the driver gave them. Look into the result before it is kept: serials, UUIDs and host names stand in it as they are.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_NEVER = re.compile(r"(^|/)environ$")
_MOST_CHARACTERS = 100_000


class Tree:
    """What was read below a root, as the lines of a tree.txt."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines: dict[str, str] = {}
        self.folders: set[str] = set()  # where a link led to: they must be there, whatever was read in them

    def see(self, path: str) -> str:
        """`path` with the links on its way written down and followed; only below sys, where links are the machine."""
        done: list[str] = []
        left = path.strip("/").split("/")
        for _ in range(400):  # as the kernel does: a loop of links ends somewhere
            if not left:
                break
            part = left.pop(0)
            if part == "..":
                done = done[:-1]
                continue
            here = "/".join([*done, part])
            real = self.root / here
            if path.startswith("sys/") and real.is_symlink():
                target = str(real.readlink())
                self.lines[here] = f"{here} -> {target}"
                if target.startswith("/"):
                    done = []
                left = [*(word for word in target.split("/") if word not in ("", ".")), *left]
            else:
                done.append(part)
        return "/".join(done)

    def read(self, path: str, text: str | None) -> None:
        path = path.strip("/")
        if text is None or _NEVER.search(path):
            return
        where = self.see(path)
        content = text[:_MOST_CHARACTERS].replace("\n", "\\n")
        self.lines[where] = f"{where} = {content}"

    def text(self) -> str:
        lines = dict(self.lines)
        for folder in self.folders:
            if not any(path.startswith(f"{folder}/") for path in self.lines):
                lines[f"{folder}/uevent"] = f"{folder}/uevent = "
        return "".join(f"{lines[path]}\n" for path in sorted(lines))


def watch_files(tree: Tree) -> None:
    """Let every reading of collect's Files leave its line in `tree`."""
    from gpudoctor.collect.files import Files

    read, listing, real = Files.read, Files.listing, Files.real

    def read_and_tell(self: Any, path: str) -> Any:
        result = read(self, path)
        tree.read(path, result.text)
        return result

    def list_and_tell(self: Any, path: str) -> Any:
        result = listing(self, path)
        if path.strip("/").startswith("sys/"):
            for name in result[0]:
                tree.see(f"{path.strip('/')}/{name}")
        return result

    def real_and_tell(self: Any, path: str) -> Any:
        result = real(self, path)
        where = tree.see(path.strip("/"))
        if result is not None and (tree.root / where).is_dir():
            tree.folders.add(where)
        return result

    # collect has no hook for a listener, and needs none but here: its reader is exchanged, in this process alone
    Files.read, Files.listing, Files.real = read_and_tell, list_and_tell, real_and_tell  # type: ignore[method-assign]


def nvml_json(lines: Iterable[str]) -> dict[str, Any]:
    """What record_nvml wrote, in the form that the fake NVML of the tests serves."""
    system: dict[str, Any] = {"driver_version": "", "nvml_version": "", "device_count": 0, "calls": {}}
    devices: dict[int, dict[str, Any]] = {}
    for line in lines:
        entry = json.loads(line)
        name, arguments = entry["call"], entry["args"]
        answer = {"value": entry["value"]} if "value" in entry else {"error": _error_name(entry["error"])}
        if name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex"):
            continue
        if name == "nvmlDeviceGetCount":
            system["device_count"] = entry.get("value", 0)
        elif name == "nvmlSystemGetDriverVersion":
            system["driver_version"] = entry.get("value", "")
        elif name == "nvmlSystemGetNVMLVersion":
            system["nvml_version"] = entry.get("value", "")
        elif arguments and isinstance(arguments[0], dict) and "device" in arguments[0]:
            device = devices.setdefault(arguments[0]["device"], {"calls": {}, "fields": {}})
            if name == "nvmlDeviceGetFieldValues":
                device["fields"] |= _fields(entry.get("value", ()))
                continue
            known = device["calls"].setdefault(name, [])
            _once(known, {"args": arguments[1:], **answer})
        else:
            _once(system["calls"].setdefault(name, []), {"args": arguments, **answer})
    return {"system": system, "devices": [devices[index] for index in sorted(devices)]}


def _once(known: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    """The last answer to a question counts."""
    known[:] = [other for other in known if other["args"] != entry["args"]]
    known.append(entry)


def _error_name(kind: str) -> str:
    return kind.removeprefix("NVMLError_")


def _fields(values: Iterable[dict[str, Any]]) -> dict[str, int]:
    return {
        f"{value['fieldId']}/{value.get('scopeId', 0)}": value["value"]["uiVal"]
        for value in values
        if value["nvmlReturn"] == 0
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "nvml.jsonl"
    lines.write_text("")
    os.environ["RECORD_NVML"] = str(lines)
    path = os.pathsep.join(filter(None, (str(HERE / "record_nvml"), os.environ.get("PYTHONPATH"))))
    os.environ["PYTHONPATH"] = path  # collect asks NVML in a child
    from gpudoctor import codec
    from gpudoctor.collect import collect_case

    tree = Tree(Path("/"))
    watch_files(tree)
    case = collect_case(timeout_s=20)
    (folder / "tree.txt").write_text(tree.text(), encoding="utf-8")
    (folder / "nvml.json").write_text(json.dumps(nvml_json(lines.read_text().splitlines()), indent=1) + "\n")
    (folder / "case.json").write_text(codec.encode(case) + "\n", encoding="utf-8")
    print(f"{len(case.gpus)} GPUs, {len(tree.lines)} files and links, {len(lines.read_text().splitlines())} NVML calls")


if __name__ == "__main__":
    main()
