"""Are the facts there that a rule needs? If not, the reason comes from the Gaps of the Case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpudoctor.model import Case, Gpu, Unchecked, gpu_path
from gpudoctor.rules.evidence import answering, subject

_EMPTY: tuple[object, ...] = (None, (), {})
_STUDIED = "no loader was studied (`gpudoctor tune-loader TARGET` does)"
_WATCHED = "no training command was watched (`gpudoctor profile -- COMMAND` or `gpudoctor tune` does)"
_TRACES = "no profiler trace was read (`gpudoctor read TRACE` does)"
_SOURCE = "no source was read (`gpudoctor sync PATH` does)"


def missing(case: Case, needs: Sequence[str]) -> list[str]:
    """One reason for each need that the Case does not hold; empty when the rule can be checked.

    A need is a fact path without keys: "gpus", "gpus.pcie.width" (any GPU has it), "limits.shm_bytes", "watched",
    "measurements.h2d". "watched|source" holds when either is there.
    """
    return [_reason(case, need) for need in needs if not _holds(case, need)]


def _holds(case: Case, need: str) -> bool:
    if "|" in need:
        return any(_holds(case, part) for part in need.split("|"))
    head, _, rest = need.partition(".")
    if head == "measurements":
        return any(not rest or measurement.metric == rest for measurement in case.measurements)
    value = answering(case) if head == "gpus" else getattr(case, head)
    if isinstance(value, tuple):
        return any(not rest or any(fact not in _EMPTY for fact in _values(item, rest)) for item in value)
    return any(fact not in _EMPTY for fact in _values(value, rest))


def _values(item: Any, path: str) -> Iterator[object]:
    for name in path.split(".") if path else ():
        if item is None:
            break
        item = getattr(item, name)
    yield item


def _reason(case: Case, need: str) -> str:
    if "|" in need:
        return " and ".join(_reason(case, part) for part in need.split("|"))
    head, _, rest = need.partition(".")
    if need == "watched":
        return _WATCHED
    if need == "loader":
        return _STUDIED
    if need == "source":
        return _SOURCE
    if head == "traces":
        return _trace(case, rest)
    if head == "measurements":
        return f"{rest} was not measured" if rest else "nothing was measured"
    if head == "gpus" and not answering(case):
        return _no_gpu(case)
    if head == "gpus":
        gaps = [case.gap(gpu_path(gpu, rest)) for gpu in answering(case)]
        reasons = sorted({str(gap.reason) for gap in gaps if gap is not None})
    else:
        gap = case.gap(need) or case.gap(head)
        reasons = [gap.reason + (f" ({' '.join(gap.detail.split())})" if gap.detail else "")] if gap else []
    return f"{need}: {' or '.join(reasons) or 'unknown'}"


def lost(case: Case, needs: Sequence[str]) -> list[Unchecked]:
    """The lost GPUs, when the rule is about GPUs: what they would say is unknown."""
    if not any(need.split(".")[0] == "gpus" for need in needs):
        return []
    return [Unchecked(reason=f"lost{_because(gpu)}", subject=subject(gpu)) for gpu in case.gpus if gpu.lost]


def _trace(case: Case, fact: str) -> str:
    if not case.traces:
        return _TRACES
    words = {
        "loader": "no DataLoader is recorded in the trace",
        "window_ms": "no GPU events are in the trace",
        "waits_for_peers_ms": "traces of several ranks that communicate are needed",
    }
    return words.get(fact, f"traces.{fact}: not in the trace")


def _no_gpu(case: Case) -> str:
    if case.gpus:
        return f"no GPU answers{_because(case.gpus[0])}"
    if case.host.gpus_on_bus == 0:
        return "there is no NVIDIA GPU on the PCI bus"
    gap = case.gap("gpus")
    return f"gpus: {gap.reason}" if gap else "no GPU is known"


def _because(gpu: Gpu) -> str:
    return f" ({' '.join(gpu.lost_reason.split())})" if gpu.lost_reason else ""
