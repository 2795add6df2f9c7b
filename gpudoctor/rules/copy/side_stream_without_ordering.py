"""A tensor made on a side stream is used elsewhere without ordering the streams.

What it means
    Work on two CUDA streams runs in any order unless one waits for the other. And the memory of a tensor that was made
    on a side stream is handed out again as soon as Python drops it, although another stream may still read it.
Why it costs
    Wrong data, now and then (https://pytorch.org/docs/1.9.1/_sources/notes/cuda.rst.txt).
How we know
    The source was read: a `with torch.cuda.stream(...)` block makes a tensor that is used outside of it, and there is
    no wait_stream, wait_event or synchronize, or none of record_stream and a wait of the side stream for its consumer
    while the block runs again and again. Captures of CUDA graphs are left alone.
Fix
    Both: torch.cuda.current_stream().wait_stream(side) before the first use, and
    tensor.record_stream(torch.cuda.current_stream()).
When to ignore
    The ordering is made in code that was not read.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="CPY009", name="side-stream-without-ordering", severity="error", needs=("source",), since="0.2")

_WAIT = Remedy(kind="code", text="torch.cuda.current_stream().wait_stream(side) before the first use outside")
_RECORD = Remedy(kind="code", text="tensor.record_stream(torch.cuda.current_stream()) before it is used outside")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for site in sources.sites(case, "side-stream"):
        unordered = site.operation == "no wait_stream"
        lacking = (
            "nothing makes the other stream wait"
            if unordered
            else "its memory may be handed out again while it is read"
        )
        yield sources.source_finding(
            RULE, site, f"{site.detail}, and {lacking}", (_WAIT, _RECORD) if unordered else (_RECORD,), waits=False
        )


EXAMPLES = (
    Example(
        name="no wait, and no record_stream",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "side-stream", "no wait_stream", "with torch.cuda.stream(s):", hot=None, detail="x is made on s"
            ),
            sources.example_site(
                "side-stream", "no record_stream", "with torch.cuda.stream(s):", line=40, hot=None, detail="y"
            ),
        ),
        subjects=("train.py:21", "train.py:40"),
    ),
    Example(name="ordered", kind="quiet", case=sources.example_case()),
    Example(name="no source read", kind="lacks", case=Case()),
)
