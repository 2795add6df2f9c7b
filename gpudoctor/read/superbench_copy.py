"""Lines of superbenchmark's ``gpu_copy``: one rate a line, named by direction, engine and NUMA node of the memory."""

from __future__ import annotations

import re

from gpudoctor.model import Case, Gpu, Measurement, Setting, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "superbench-gpu-copy"
_LINE = re.compile(
    r"\s*(?:(cpu)_to_gpu(\d{1,4})|gpu(\d{1,4})_to_(cpu)|gpu(\d{1,4})_to_gpu(\d{1,4})(?:_(read|write))?"
    r"|(?:cpu_and_gpu(\d{1,4})|gpu(\d{1,4})_and_cpu))"
    r"_by_(sm|dma)(?:_under_numa(\d{1,4}))?\s+(\d{1,12}(?:\.\d{1,12})?)\s*$"
)
_OURS = re.compile(r"\s*\w+_by_(?:sm|dma)\w*\s+\d{1,12}(?:\.\d{1,12})?\s*$")


def is_kind(text: str) -> bool:
    return any(_LINE.match(line) for line in text.splitlines())


def read_text(text: str, file: str) -> Parts:
    """Rates of the copy engine (dma) under our names; those of copy kernels with ``.sm`` behind them."""
    lines = text.splitlines()
    items: dict[tuple[str, str, int | None], Measurement] = {}
    sources = []
    gpus: set[int] = set()
    understood = 0
    for number, line in enumerate(lines, start=1):
        understood += _OURS.match(line) is not None or not line.strip()
        match = _LINE.match(line)
        if match is None:
            continue
        metric, subject, seen = _what(match)
        gpus |= seen
        node = int(match[11]) if match[11] else None
        settings: dict[str, Setting] = {"tool": KIND, "engine": "ce" if match[10] == "dma" else "sm", "file": file}
        suffix = "" if match[10] == "dma" else ".sm"
        item = Measurement(
            metric=metric + suffix, subject=subject, value=float(match[12]), unit="GB/s", settings=settings
        )
        if node is not None:
            placed = Measurement(
                metric=f"{metric}_node{suffix}",
                subject=subject,
                value=item.value,
                unit="GB/s",
                settings={**settings, "node": node},
            )
            items[placed.metric, subject, node] = placed
        best = items.get((item.metric, subject, None))
        if best is None or item.value > best.value:  # of the nodes, the nearest
            items[item.metric, subject, None] = item
            sources.append(Source(path=f"measurements.{item.metric}[{subject}]", origin=file, line=number))
    case = Case(
        gpus=tuple(Gpu(index=index) for index in sorted(gpus)),
        measurements=tuple(items.values()),
        sources=tuple({source.path: source for source in sources}.values()),
    )
    return Parts(
        parts=(Part(case=case, order="cuda"),) if gpus else (),
        lines=line_count(text),
        not_understood=len(lines) - understood,
    )


def _what(match: re.Match[str]) -> tuple[str, str, set[int]]:
    if match[1]:
        return "h2d", f"gpu:{match[2]}", {int(match[2])}
    if match[4]:
        return "d2h", f"gpu:{match[3]}", {int(match[3])}
    if match[8] or match[9]:  # both directions at once, summed
        gpu = int(match[8] or match[9])
        return "h2d_d2h_sum", f"gpu:{gpu}", {gpu}
    a, b = int(match[5]), int(match[6])
    if a == b:
        return "d2d", f"gpu:{a}", {a}
    if match[7] == "read":  # the GPU named first reads from the second
        return "p2p_read", f"gpu:{b}-gpu:{a}", {a, b}
    return "p2p_write", f"gpu:{a}-gpu:{b}", {a, b}
