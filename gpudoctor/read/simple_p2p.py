"""``simpleP2P`` of the CUDA samples: is peer access granted, how fast is one copy, did the data arrive."""

from __future__ import annotations

import re

from gpudoctor.model import Case, Gpu, Measurement, Pair, Setting, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "simpleP2P"
_ACCESS = re.compile(r">\s*Peer access from (.+?) \(GPU(\d{1,12})\) -> (.+?) \(GPU(\d{1,12})\)\s*: (Yes|No)")
_RATE = re.compile(
    r"cudaMemcpyPeer / cudaMemcpy between GPU(\d{1,12}) and GPU(\d{1,12}): (\d{1,12}(?:\.\d{1,12})?)\s*GB/s"
)


def is_kind(text: str) -> bool:
    return _ACCESS.search(text) is not None


def read_text(text: str, file: str) -> Parts:
    lines = text.splitlines()
    gpus: dict[int, Gpu] = {}
    granted: dict[tuple[int, int], bool] = {}
    items, sources = [], []
    # A text that stops before its last line says neither.
    passed = True if "Test passed" in text else False if re.search(r"Verification error|Test failed", text) else None
    for number, line in enumerate(lines, start=1):
        settings: dict[str, Setting] = {"tool": KIND, "file": file, "path": "peer"}
        if access := _ACCESS.search(line):
            a, b = int(access[2]), int(access[4])
            gpus[a], gpus[b] = Gpu(index=a, name=access[1]), Gpu(index=b, name=access[3])
            key = (min(a, b), max(a, b))
            granted[key] = granted.get(key, True) and access[5] == "Yes"
            sources.append(Source(path=f"pairs[gpu:{key[0]},gpu:{key[1]}].p2p_read", origin=file, line=number))
        elif rate := _RATE.search(line):
            # Ping-pong between both, so that the way of the data is not one: the name of the average.
            subject = f"gpu:{rate[1]}-gpu:{rate[2]}"
            items.append(
                Measurement(metric="p2p_write", subject=subject, value=float(rate[3]), unit="GB/s", settings=settings)
            )
            sources.append(Source(path=f"measurements.p2p_write[{subject}]", origin=file, line=number))
            if passed is not None:
                items.append(
                    Measurement(
                        metric="p2p_check", subject=subject, value=float(passed), unit="passed", settings=settings
                    )
                )
    case = Case(
        gpus=tuple(gpus[index] for index in sorted(gpus)),
        pairs=tuple(
            Pair(a=f"gpu:{a}", b=f"gpu:{b}", p2p_read="OK" if yes else "NS") for (a, b), yes in sorted(granted.items())
        ),
        measurements=tuple(items),
        sources=tuple(sources),
    )
    return Parts(parts=(Part(case=case, order="cuda"),) if gpus else (), lines=line_count(text))
