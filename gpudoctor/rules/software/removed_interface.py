"""The script imports an interface that is gone or deprecated.

What it means
    The import fails, or works only with old versions: torch.distributed.pipeline.sync.Pipe, torch.cuda.stream as a
    module, torch._six, torch.distributed.launch, vllm.entrypoints.api_server.
Why it costs
    An ImportError at start, or a warning and a change that has to be made later
    (https://github.com/vllm-project/vllm/issues/1873).
How we know
    The source was read: the import names such a module, and the torch version that is assumed (installed, or given with
    --torch) does not have it any more. An unknown version counts as a current one.
Fix
    The current spelling, named with each finding.
When to ignore
    A version that still has it is pinned; give it with --torch. Imports that fall back when they fail.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules import sources

RULE = Rule(code="SWV009", name="removed-or-deprecated-interface", severity="info", needs=("source",), since="0.2")

# Name: (state, torch version from which on; None in any version, what to use).
_GONE: dict[str, tuple[str, tuple[int, int] | None, str]] = {
    # docs/2.3 has it, pytorch#127354 took it out
    "torch.distributed.pipeline": (
        "removed in torch 2.4",
        (2, 4),
        "torch.distributed.pipelining (PipelineStage, Schedule1F1B)",
    ),
    "torch.cuda.stream": (
        "a function, and no module: the import fails",
        None,
        "torch.cuda.stream(s), or torch.cuda.streams",
    ),
    "torch._six": ("removed in torch 2.0", (2, 0), "str, collections.abc and math.inf of Python"),
    "torch.distributed.launch": (
        "deprecated since torch 1.10",
        (1, 10),
        "torchrun, and LOCAL_RANK from the environment",
    ),
    "vllm.entrypoints.api_server": ("gone from current vLLM", None, "vllm serve MODEL"),
}


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for site in sources.sites(case, "removed-interface"):
        state, since, use = _GONE.get(site.operation, ("gone", None, "the current documentation"))
        if since is not None and not sources.in_versions(case, since, None):
            continue
        yield sources.source_finding(
            RULE,
            site,
            f"{site.operation} is {state}",
            (Remedy(kind="code", text=f"use {use}"),),
            waits=False,
            certain=True,
        )


EXAMPLES = (
    Example(
        name="Pipe and the old vLLM server",
        kind="fires",
        case=sources.example_case(
            sources.example_site(
                "removed-interface",
                "torch.distributed.pipeline",
                "from torch.distributed.pipeline.sync import Pipe",
                hot=None,
            ),
            sources.example_site(
                "removed-interface",
                "vllm.entrypoints.api_server",
                "import vllm.entrypoints.api_server",
                line=3,
                hot=None,
            ),
            torch="2.13.0",
        ),
        subjects=("train.py:21", "train.py:3"),
    ),
    Example(
        name="a version that has it",
        kind="quiet",
        case=sources.example_case(
            sources.example_site(
                "removed-interface", "torch.distributed.pipeline", "from torch.distributed.pipeline.sync import Pipe"
            ),
            torch="2.1.2",
        ),
    ),
    Example(name="no source read", kind="lacks", case=Case()),
)
