"""The GPU idles between short kernels because the CPU launches them too slowly.

What it means
    Each operator costs the host some microseconds, whatever its size. Many small kernels finish faster than the host
    can launch the next ones, and the device runs empty between them.
Why it costs
    The device's idle time is lost, and a faster GPU changes nothing
    (https://github.com/lnccbrown/LANfactory/pull/120, where a predicted 85 % was 4 %: what can be won is also no more
    than the smaller of host and device time).
How we know
    A profiler trace: the device idles for at least the share below because the next kernel had not been launched, with
    waits for the loader and for the device left out, while the kernels are many and short.
Fix
    torch.compile (mode="reduce-overhead" replays CUDA graphs), a larger batch, fused or foreach optimizers; fewer,
    larger operations in the model's own code.
When to ignore
    Recording itself slows the host, by some microseconds an operator and by much more with stacks or shapes: where the
    share is near the limit, time a run without the profiler.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, TraceFacts, TraceIdle, Unchecked
from gpudoctor.rules.traces import Share, bound, evidence, idle, of_window, on_device, subject, worst

RULE = Rule(code="SYN011", name="launch-bound-step", severity="warning", needs=("traces.window_ms",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    found = []
    for facts in on_device(case):
        kernels, length = facts.kernels_per_step, facts.median_kernel_us
        if kernels is None or length is None:
            continue
        many = kernels >= case.threshold(RULE.code, "kernels_per_step")
        short = length <= case.threshold(RULE.code, "median_kernel_us")
        item = of_window(facts, idle(facts).host_ms + idle(facts).launch_ms)
        if many and short and item.share >= case.threshold(RULE.code, "idle_share"):
            found.append(item)
    for item, others in worst(found):
        yield _finding(item, others)


def _finding(item: Share, others: str) -> Finding:
    facts = item.facts
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject(facts),
        message=(
            f"the device idles {item.words()} for kernels that the host has not launched yet:"
            f" {facts.kernels_per_step:.0f} kernels a step, half of them below {facts.median_kernel_us:.3g} us{others}"
        ),
        evidence=(
            evidence(facts, "idle.host_ms", f"{idle(facts).host_ms:.4g} ms"),
            evidence(facts, "idle.launch_ms", f"{idle(facts).launch_ms:.4g} ms"),
            evidence(facts, "kernels_per_step", f"{facts.kernels_per_step:.0f}"),
        ),
        remedies=(
            Remedy(
                kind="code",
                text='torch.compile(model, mode="reduce-overhead"), or CUDA graphs',
                risk="results may differ in the last bits; the first steps take minutes; shapes must stay the same",
                undo="the plain model",
            ),
            Remedy(kind="config", text="a larger batch", risk="changes the training: learning rate and epochs with it"),
            Remedy(kind="measure", text="time the steps without the profiler: recording slows the host too"),
        ),
        gain=bound(item, "idling for launches"),
        confidence="likely",
    )


def _case(
    *, host_ms: float = 40.0, kernels: float | None = 900.0, length_us: float = 8.0, device: bool = True, rank: int = 0
) -> Case:
    facts = TraceFacts(
        file="trace.json",
        format="kineto",
        rank=rank,
        whole_steps=4,
        window_ms=100 if device else None,
        idle_pct=45 if device else None,
        idle=TraceIdle(host_ms=host_ms, launch_ms=2.0, sync_ms=1.0) if device else None,
        kernels_per_step=kernels,
        median_kernel_us=length_us,
    )
    return Case(traces=(facts,))


EXAMPLES = (
    Example(name="900 kernels of 8 us, idle 42 %", kind="fires", case=_case(), subjects=("rank:0",)),
    Example(name="long kernels", kind="quiet", case=_case(length_us=200)),
    Example(name="few kernels", kind="quiet", case=_case(kernels=20)),
    Example(name="no steps", kind="quiet", case=_case(kernels=None)),
    Example(name="busy", kind="quiet", case=_case(host_ms=5)),
    Example(name="no GPU events", kind="lacks", case=_case(device=False)),
    Example(name="no trace", kind="lacks", case=Case()),
)
