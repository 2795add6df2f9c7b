"""``nvidia-smi nvlink -s``: the NVLinks of each GPU, active or not, with their signalling rate."""

from __future__ import annotations

import re
from dataclasses import replace

from gpudoctor.model import Case, Gap, Gpu, NvLink, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "nvidia-smi-nvlink"
_GPU = re.compile(r"\s*GPU (\d{1,3}): (.+?)(?: \(UUID: ([^)]*)\))?\s*$")
_LINK = re.compile(r"\s*Link (\d{1,2}): (?:<?(inactive)>?|(\d{1,12}(?:\.\d{1,12})?) GB/s)\s*$", re.IGNORECASE)
_NONE = re.compile(r"all links are inActive|does not have or support Nvlink|not supported", re.IGNORECASE)
_MIG = re.compile(r"MIG mode", re.IGNORECASE)
# nvidia-smi prints the signalling rate of a link; the generation follows from it (GB/s one way).
_VERSIONS = {20.0: 1, 19.531: 1, 25.781: 2, 25.0: 3, 14.062: 3, 26.562: 4, 53.125: 5}


def is_kind(text: str) -> bool:
    lines = text.splitlines()
    return any(_GPU.match(line) for line in lines) and (
        any(_LINK.match(line) for line in lines) or re.search(r"nvlink", text, re.IGNORECASE) is not None
    )


def read_text(text: str, file: str) -> Parts:
    """The GPUs that the text shows; a cut text may begin with any of them."""
    lines = text.splitlines()
    understood = 0
    gpus: list[Gpu] = []
    gaps: list[Gap] = []
    sources: list[Source] = []
    for number, line in enumerate(lines, start=1):
        if head := _GPU.match(line):
            understood += 1
            uuid = head[3] if head[3] and re.fullmatch(r"GPU-[0-9a-fA-F-]{8,}", head[3]) else None
            gpus.append(Gpu(index=int(head[1]), name=head[2], uuid=uuid))
            sources.append(Source(path=f"gpus[{uuid or head[1]}]", origin=file, line=number))
        elif (link := _LINK.match(line)) and gpus:
            understood += 1
            gpu = gpus[-1]
            rate = None if link[2] else float(link[3])
            version = None if rate is None else next((v for r, v in _VERSIONS.items() if abs(r - rate) < 0.01), None)
            found = NvLink(link=int(link[1]), active=rate is not None, version=version, speed_gb_s=rate)
            gpus[-1] = replace(gpu, nvlinks=(*gpu.nvlinks, found))
        elif gpus and (_MIG.search(line) or _NONE.search(line)):
            understood += 1
            reason = "not supported" if _MIG.search(line) or "support" in line.lower() else "not present"
            key = gpus[-1].uuid or str(gpus[-1].index)
            gaps.append(Gap(path=f"gpus[{key}].nvlinks", reason=reason, detail=line.strip()))  # type: ignore[arg-type]
            if _MIG.search(line):
                gpus[-1] = replace(gpus[-1], mig=True)
        elif not line.strip() or "nvidia-smi" in line:
            understood += 1
    distinct = len({gpu.index for gpu in gpus}) == len(gpus)
    first = not gpus or gpus[0].index == 0
    case = Case(gpus=tuple(gpus), gaps=tuple(gaps), sources=tuple(sources))
    return Parts(
        parts=(Part(case=case, complete=first and [gpu.index for gpu in gpus] == list(range(len(gpus)))),)
        if gpus and distinct
        else (),
        lines=line_count(text),
        not_understood=len(lines) - understood,
        truncated=not first,
    )
