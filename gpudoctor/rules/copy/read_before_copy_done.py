"""A tensor is read while an asynchronous copy still fills it.

What it means
    t.to("cpu", non_blocking=True) and host.copy_(t, non_blocking=True) return before the data has arrived. Reading the
    CPU tensor then gives what was in the memory before: nothing raises an error.
Why it costs
    Wrong numbers, now and then (https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html).
How we know
    The source was read: the copy goes from a GPU to the host with non_blocking=True, and the result is used before any
    synchronize(), wait() or query() of a stream, an event or a device.
Fix
    event = torch.cuda.Event(); event.record() after the copy, and event.synchronize() before the read; or read it one
    step later, when the event is done. Or leave non_blocking out.
When to ignore
    Something else waits for the stream in between, in code that was not read.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="CPY008", name="host-read-before-copy-done", severity="error", needs=("source",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for group in sources.by_line(sources.sites(case, "read-before-copy-done")):
        site = group[0]
        yield sources.source_finding(
            RULE,
            site,
            f"this reads what the non_blocking copy at {site.detail} may not have written yet",
            (
                Remedy(kind="code", text="event.record() after the copy and event.synchronize() before the read"),
                Remedy(kind="code", text="or leave out non_blocking=True"),
            ),
            waits=False,
        )


EXAMPLES = (
    Example(
        name="read at once",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "read-before-copy-done", "non_blocking", "host.numpy()", hot=None, detail="train.py:20"
            )
        ),
        subjects=("train.py:21",),
    ),
    Example(name="behind an event", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
