"""Evidence with its source, and the names of subjects; shared by the rules."""

from __future__ import annotations

import re

from gpudoctor.model import Case, Evidence, Gpu, gpu_key


def evidence(case: Case, path: str, value: object, expected: object = None) -> Evidence:
    """The fact at `path` as Evidence; its source is the probe or FILE:LINE that the Case names for it."""
    return Evidence(
        fact=path,
        value=str(value),
        expected=None if expected is None else str(expected),
        source=source(case, path),
    )


def source(case: Case, path: str) -> str | None:
    """Where the fact at `path`, or the part of the Case that holds it, was read; None when the Case does not say."""
    holding = [s for s in case.sources if path == s.path or path.startswith((s.path + ".", s.path + "["))]
    if not holding:
        return None
    best = max(holding, key=lambda source: len(source.path))
    return best.origin if best.line is None else f"{best.origin}:{best.line}"


def answering(case: Case) -> tuple[Gpu, ...]:
    """The GPUs that are not lost: a lost one has no readings to judge."""
    return tuple(gpu for gpu in case.gpus if not gpu.lost)


def subject(gpu: Gpu) -> str:
    return f"gpu:{gpu.index}"


def subject_of_path(case: Case, path: str) -> str:
    """The subject that a fact path is about: gpu:0, gpu:0-gpu:1, nic:mlx5_0, or host."""
    match = re.match(r"(gpus|pairs|nics)\[([^\]]*)\]", path)
    if match is None:
        return "host"
    kind, key = match[1], match[2]
    if kind == "pairs":
        return key.replace(",", "-")
    if kind == "nics":
        return f"nic:{key}"
    return next((subject(gpu) for gpu in case.gpus if gpu_key(gpu) == key), f"gpu:{key}")


def cpu_list(cpus: tuple[int, ...]) -> str:
    """CPU numbers as the kernel writes them: 0-3,8."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
