"""The window to the memory of several GPUs is the small one, although the cards can do a full-size window.

What it means
    BAR1 is 256 MiB where the card supports Resizable BAR, a window as large as its memory. Peer access between cards
    goes through that window.
Why it costs
    Drivers that grant peer access on such cards need the large window; without it copies between GPUs are staged
    through host memory. A single GPU loses nothing.
How we know
    BAR1 is 256 MiB on cards of a generation with Resizable BAR, and there are two or more of them.
Fix
    Switch on Resizable BAR (and above 4G decoding) in the firmware.
When to ignore
    One GPU, or jobs whose GPUs do not talk to each other. In a virtual machine the size says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Host, Remedy, Rule, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence
from gpudoctor.rules.link import slot_hidden

RULE = Rule(code="PCI007", name="bar1-window-small", severity="info", needs=("gpus.bar1_bytes",), since="0.1")

_RESIZABLE = ("Ampere", "Ada", "Hopper", "Blackwell", "Rubin")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    gpus = answering(case)
    if len(gpus) < 2:
        return
    if any(slot_hidden(case, gpu) for gpu in gpus):
        yield Unchecked(reason="the size that a guest sees is no evidence")
        return
    small = [
        gpu
        for gpu in gpus
        if gpu.bar1_bytes == case.threshold(RULE.code, "small_window_bytes") and gpu.architecture in _RESIZABLE
    ]
    if small:
        names = ", ".join(f"gpu:{gpu.index}" for gpu in small)
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=f"gpu:{small[0].index}" if len(small) == 1 else "host",
            message=f"BAR1 of {names} is 256 MiB where these cards can map their whole memory",
            evidence=tuple(evidence(case, path(gpu, "bar1_bytes"), gpu.bar1_bytes, gpu.memory_bytes) for gpu in small),
            remedies=(Remedy(kind="bios", text="switch on Resizable BAR", undo="switch it off"),),
            confidence="certain",
        )


def _gpu(index: int, size: int | None, architecture: str = "Ada") -> Gpu:
    return Gpu(index=index, bar1_bytes=size, architecture=architecture, memory_bytes=24 << 30)


EXAMPLES = (
    Example(name="two", kind="fires", case=Case(gpus=(_gpu(0, 1 << 28), _gpu(1, 1 << 28))), subjects=("host",)),
    Example(name="one of two", kind="fires", case=Case(gpus=(_gpu(0, 1 << 35), _gpu(1, 1 << 28))), subjects=("gpu:1",)),
    Example(name="full size", kind="quiet", case=Case(gpus=(_gpu(0, 1 << 35), _gpu(1, 1 << 35)))),
    Example(name="one GPU", kind="quiet", case=Case(gpus=(_gpu(0, 1 << 28),))),
    Example(name="Turing has no other", kind="quiet", case=Case(gpus=(_gpu(0, 1 << 28, "Turing"),) * 2)),
    Example(name="unknown", kind="lacks", case=Case(gpus=(_gpu(0, None), _gpu(1, None)))),
    Example(
        name="guest",
        kind="lacks",
        case=Case(host=Host(virtualization="kvm"), gpus=(_gpu(0, 1 << 28), _gpu(1, 1 << 28))),
    ),
)
