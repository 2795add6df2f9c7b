"""``lspci -tv``: which bridges lie above each GPU. It tells no links, no driver and no NUMA node.

The tree is drawn with columns: what stands further right on a later line hangs on the last token to the left of it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from gpudoctor.model import Case, Gpu, PcieHop, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "lspci-tree"
_TOKEN = re.compile(
    r"\[([0-9a-f]{4,8}):([0-9a-f]{2})\]|\[([0-9a-f]{2})(?:-[0-9a-f]{2})?\]"
    r"|(?<![\w.])([0-9a-f]{2})\.([0-7])(?![\w.])"
)
_ROOT = re.compile(r"[-\\+| ]*\[[0-9a-f]{4,8}:[0-9a-f]{2}\]-")
_BRANCH = re.compile(r"[-\\+| ]+(?:\[|[0-9a-f]{2}\.[0-7])")
_NAME = re.compile(r"  NVIDIA Corporation (.+)$")
_NO_GPU = re.compile(r"audio|usb|ucsi|serial bus|nvswitch|bridge|ethernet", re.IGNORECASE)
_MODEL = re.compile(r"\[([^\]]+)\]\s*$")


def is_kind(text: str) -> bool:
    """Roots with branches; a domain in brackets in front of a branch is printed by no other tool."""
    return any(_ROOT.match(line) and re.search(r"\]-[-+]", line) for line in text.splitlines())


def read_text(text: str, file: str) -> Parts:
    lines = text.splitlines()
    stack: list[tuple[int, str, str]] = []  # column, "bus" (domain:bus) or "device" (BDF), value
    gpus: list[Gpu] = []
    sources: list[Source] = []
    understood = 0
    for number, line in enumerate(lines, start=1):
        end = _end_of_drawing(line)
        if not (_ROOT.match(line) or _BRANCH.match(line)):
            understood += not line.strip() or "lspci" in line
            continue
        understood += 1
        for token in _TOKEN.finditer(line, 0, end):
            while stack and stack[-1][0] >= token.start():
                stack.pop()
            if token[1]:
                stack.append((token.start(), "bus", f"{token[1][-4:]}:{token[2]}"))
            elif token[3]:
                domain = next((value[:4] for _, kind, value in reversed(stack) if kind == "bus"), None)
                if domain is not None:
                    stack.append((token.start(), "bus", f"{domain}:{token[3]}"))
            else:
                bus = next((value for _, kind, value in reversed(stack) if kind == "bus"), None)
                if bus is not None:
                    stack.append((token.start(), "device", f"{bus}:{token[4]}.{token[5]}"))
        name = _NAME.search(line)
        if name and stack and stack[-1][1] == "device" and not _NO_GPU.search(name[1]):
            gpus.append(_gpu(stack, name[1]))
            sources.append(Source(path=f"gpus[{gpus[-1].bdf}].pcie_path", origin=file, line=number))
    ordered = sorted(gpus, key=lambda gpu: [int(part, 16) for part in re.split("[:.]", gpu.bdf or "0")])
    numbered = tuple(replace(gpu, index=index) for index, gpu in enumerate(ordered))
    return Parts(
        parts=(Part(case=Case(gpus=numbered, sources=tuple(sources)), order="bus"),) if numbered else (),
        lines=line_count(text),
        not_understood=len(lines) - understood,
    )


def _end_of_drawing(line: str) -> int:
    """Where the name of the device begins: behind two blanks after a function number."""
    match = re.search(r"[0-9a-f]{2}\.[0-7]  ", line)
    return match.end() if match else len(line)


def _gpu(stack: list[tuple[int, str, str]], name: str) -> Gpu:
    chain = [value for _, kind, value in stack if kind == "device"]
    model = _MODEL.search(name)
    return Gpu(
        index=0,
        bdf=chain[-1],
        name=model[1] if model else None,
        root=f"pci{next(value for _, kind, value in stack if kind == 'bus')}",
        pcie_path=tuple(PcieHop(bdf=bdf, kind=_kind(place, len(chain))) for place, bdf in enumerate(reversed(chain))),
    )


def _kind(place: int, count: int) -> Any:
    """Below the root port, upper and lower ports of switches take turns."""
    if place == 0:
        return "endpoint"
    from_root = count - 1 - place
    return "root-port" if from_root == 0 else "switch-up" if from_root % 2 else "switch-down"
