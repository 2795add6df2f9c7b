"""A rate was taken with copy kernels, and says nothing about the link.

What it means
    nvbandwidth's `_sm` testcases and superbenchmark's `by_sm` lines move data with a kernel on the multiprocessors. How
    fast that goes over PCIe depends on the kernel, on the platform and on the size; copies of a program use the copy
    engines.
Why it costs
    A published "device to host 6.27 GB/s" of an A100 is such a figure; its copy engine gives 26
    (https://github.com/Azure/AI-benchmarking-guide/blob/main/Azure_Results/ND_A100_v4_results.md).
How we know
    The rate of the kernel copy is far below that of the copy engine on the same GPU, or below what the link gives.
Fix
    Judge links by `_ce` or DMA rows with 64 to 512 MiB.
When to ignore
    Kernels of your own that read host memory directly run at that rate.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Measurement, Remedy, Rule, Unchecked
from gpudoctor.rules import rates

RULE = Rule(code="BND004", name="sm-copy-not-link-rate", severity="info", needs=("measurements",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    items = rates.of(case, *(f"{metric}.sm" for metric in rates.PINNED))
    if not items:
        return
    share = case.threshold(RULE.code, "share")
    beside = [(item, rates.value(case, item.metric.removesuffix(".sm"), item.subject)) for item in items]
    if all(engine is None for _, engine in beside):
        yield Unchecked(reason="copies of the copy engine were not measured beside those of kernels")
        return
    slow = [(item, engine) for item, engine in beside if engine is not None and item.value < share * engine]
    if not slow:
        return
    worst, engine = min(slow, key=lambda entry: entry[0].value)
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=worst.subject if len({item.subject for item, _ in slow}) == 1 else "host",
        message=f"{worst.metric.removesuffix('.sm')} {worst.value:.1f} GB/s was taken with copy kernels; the copy "
        f"engine gives {engine:.1f}: only the latter is the rate of the link",
        evidence=tuple(rates.shown(case, item, f"{rate:.4g} GB/s by the copy engine") for item, rate in slow),
        remedies=(Remedy(kind="measure", text="nvbandwidth -t host_to_device_memcpy_ce device_to_host_memcpy_ce"),),
        confidence="certain",
    )


def _case(kernel: float, engine: float | None) -> Case:
    figures = [("d2h.sm", kernel)] + ([("d2h", engine)] if engine else [])
    return Case(measurements=tuple(Measurement(metric=m, subject="gpu:0", value=v, unit="GB/s") for m, v in figures))


EXAMPLES = (
    Example(name="A100 in a virtual machine", kind="fires", case=_case(5.67, 25.9), subjects=("gpu:0",)),
    Example(name="kernel as fast", kind="quiet", case=_case(52.5, 55.3)),
    Example(
        name="no kernel copies",
        kind="quiet",
        case=Case(measurements=(Measurement(metric="d2h", subject="gpu:0", value=25.9, unit="GB/s"),)),
    ),
    Example(name="kernel only", kind="lacks", case=_case(5.67, None)),
)
