"""Copies run on the computing stream, and the GPU computes nothing meanwhile.

What it means
    Work of one stream runs in order. A copy on the stream of the kernels holds them up, although the GPU has engines
    of its own for copies.
Why it costs
    At most the copies' share of the time
    (https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html).
How we know
    A profiler trace: copies from or to pinned host memory on the stream that computes most, during which nothing is
    computed, take more of the time than the limit below. Copies from pageable memory are CPY001.
Fix
    Load the next batch ahead on a stream of its own (pinned memory, non_blocking=True, wait_stream and record_stream),
    or let the framework's prefetcher do it.
When to ignore
    The copies are a part of the algorithm: the kernels that follow need their result at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, TraceCopies, TraceFacts, Unchecked
from gpudoctor.rules.traces import Share, bound, evidence, of_window, on_device, subject, worst

RULE = Rule(code="CPY010", name="copy-not-overlapped", severity="info", needs=("traces.window_ms",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    found = []
    for facts in on_device(case):
        exposed = sum(copies.exposed_ms for copies in facts.copies if _counts(copies))
        item = of_window(facts, exposed)
        if item.share >= case.threshold(RULE.code, "copy_share"):
            found.append(item)
    for item, others in worst(found):
        yield _finding(item, others)


def _counts(copies: TraceCopies) -> bool:
    return copies.kind in ("h2d", "d2h") and copies.memory == "pinned" and copies.with_compute * 2 > copies.calls


def _finding(item: Share, others: str) -> Finding:
    calls = sum(copies.calls for copies in item.facts.copies if _counts(copies))
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject=subject(item.facts),
        message=f"copies on the computing stream take {item.words()} in which nothing is computed{others}",
        evidence=(evidence(item.facts, "copies", f"{calls} calls, {item.part_ms:.3g} ms alone", "beside computing"),),
        remedies=(
            Remedy(
                kind="code",
                text="copy the next batch ahead on a stream of its own",
                risk="without wait_stream and record_stream the kernels read memory too early",
                undo="one stream",
            ),
        ),
        gain=bound(item, "copying"),
        confidence="likely",
    )


def _case(*, exposed_ms: float = 10.0, with_compute: int = 8, memory: str = "pinned", device: bool = True) -> Case:
    copies = TraceCopies(
        kind="h2d",
        memory="pinned" if memory == "pinned" else "pageable",
        calls=8,
        bytes=8 << 20,
        ms=exposed_ms,
        gb_s=20.0,
        exposed_ms=exposed_ms,
        with_compute=with_compute,
    )
    facts = TraceFacts(
        file="trace.json",
        format="kineto",
        rank=0,
        whole_steps=4,
        window_ms=100 if device else None,
        idle_pct=5 if device else None,
        copies=(copies,) if device else (),
    )
    return Case(traces=(facts,))


EXAMPLES = (
    Example(name="10 % of the time", kind="fires", case=_case(), subjects=("rank:0",)),
    Example(name="on a stream of its own", kind="quiet", case=_case(with_compute=0)),
    Example(name="below 2 %", kind="quiet", case=_case(exposed_ms=1)),
    Example(name="pageable is CPY001", kind="quiet", case=_case(memory="pageable")),
    Example(name="no GPU events", kind="lacks", case=_case(device=False)),
    Example(name="no trace", kind="lacks", case=Case()),
)
