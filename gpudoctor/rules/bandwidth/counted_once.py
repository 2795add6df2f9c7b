"""A copy inside the GPU counts its bytes once; a datasheet counts reads and writes.

What it means
    nvbandwidth's device_local_copy divides the bytes of the buffer by the time. Each of them was read and written, so
    that the memory moved twice as much. p2pBandwidthLatencyTest's diagonal and bandwidthTest count both.
Why it costs
    Nothing. Half of the datasheet's figure looks like half of a memory (https://github.com/NVIDIA/nvbandwidth/issues/48).
How we know
    The tool counts once, and the figure is between 30 and 55 % of the peak of this model's memory.
Fix
    Double it before comparing with the datasheet.
When to ignore
    Always.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Measurement, Remedy, Rule, Unchecked
from gpudoctor.profiles import memory_gb_s
from gpudoctor.rules import rates

RULE = Rule(code="BND006", name="one-way-copy-accounting", severity="info", needs=("measurements",), since="0.1")

_COUNTS_ONCE = ("nvbandwidth", "superbench-gpu-copy")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    items = [item for item in rates.of(case, "d2d") if rates.tool_of(item) in _COUNTS_ONCE]
    if not items:
        return
    peaks = [(item, memory_gb_s(gpu) if (gpu := rates.gpu_named(case, item.subject)) else None) for item in items]
    if all(peak is None for _, peak in peaks):
        yield Unchecked(reason="the peak of the GPUs' memory is unknown")
        return
    halves = [(item, peak) for item, peak in peaks if peak is not None and 0.3 < item.value / peak < 0.55]
    if halves:
        first, peak = halves[0]
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=first.subject if len(halves) == 1 else "host",
            message=f"the copy inside the GPU counts bytes once: {first.value:.0f} GB/s are {2 * first.value:.0f} read "
            f"and written, of {peak:.0f} GB/s by the datasheet",
            evidence=tuple(rates.shown(case, item, f"half of {most:.0f} GB/s at most") for item, most in halves),
            remedies=(Remedy(kind="config", text="double the figure before comparing it with a datasheet"),),
            confidence="certain",
        )


def _case(value: float, name: str | None = "NVIDIA H200", tool: str | None = "nvbandwidth") -> Case:
    item = Measurement(metric="d2d", subject="gpu:0", value=value, unit="GB/s", settings={"tool": tool})
    return Case(gpus=(Gpu(index=0, name=name),), measurements=(item,))


EXAMPLES = (
    Example(name="H200", kind="fires", case=_case(2092.0), subjects=("gpu:0",)),
    Example(name="really slow", kind="quiet", case=_case(900.0)),
    Example(name="our own", kind="quiet", case=_case(2092.0, tool=None)),
    Example(name="model unknown", kind="lacks", case=_case(2092.0, None)),
)
