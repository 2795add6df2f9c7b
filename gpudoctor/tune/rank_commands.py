"""The user's command with another number of ranks: torchrun put in front, or its own launcher's number replaced."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import PurePath

from gpudoctor.errors import GpudoctorError

_TORCHRUN_MODULES = {"torch.distributed.run", "torch.distributed.launch"}
_ACCELERATE_MODULES = {"accelerate.commands.launch"}
_PYTHON = re.compile(r"python[0-9.]*")
_PYTHON_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}
_NPROC = ("--nproc-per-node", "--nproc_per_node")
_PROCESSES = ("--num_processes", "--num-processes")
_MULTI_GPU = {"--multi_gpu", "--multi-gpu"}


def with_ranks(command: Sequence[str], ranks: int) -> list[str]:
    """`command` started with `ranks` processes on this machine.

    `python train.py ...` goes under torchrun (by that python, `--standalone`); torchrun and `accelerate launch` get
    their number replaced. GpudoctorError where the command shows no place for it, or runs on several machines.
    """
    words = list(command)
    name = PurePath(words[0]).name if words else ""
    if name == "torchrun":
        return _torchrun(words, 1, ranks)
    if name == "accelerate" and words[1:2] == ["launch"]:
        return _accelerate(words, 2, ranks)
    for at, (first, second) in enumerate(itertools.pairwise(words[:8])):
        if first == "-m" and second in _TORCHRUN_MODULES:
            return _torchrun(words, at + 2, ranks)
        if first == "-m" and second in _ACCELERATE_MODULES:
            return _accelerate(words, at + 2, ranks)
    if _PYTHON.fullmatch(name):
        start = _script_at(words)
        if start < len(words) and words[start] != "-c":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            return [*words[:start], *launcher, *words[start:]]
    raise GpudoctorError(
        f"--nproc: cannot tell how {words[0] if words else 'nothing'!r} starts its ranks",
        "give `python train.py ...`, `torchrun ...` or `accelerate launch ...`",
    )


def _script_at(words: Sequence[str]) -> int:
    """Where the script (or -m MODULE, or -c) stands behind python's own options."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c", "-"):
        at += 2 if words[at] in _PYTHON_WITH_VALUE else 1
    return at


def _torchrun(words: list[str], start: int, ranks: int) -> list[str]:
    for at in range(start, len(words)):
        option, equals, value = words[at].partition("=")
        if option in ("--nnodes", "--nodes"):
            nodes = value if equals else (words[at + 1] if at + 1 < len(words) else "")
            if nodes not in ("1", "1:1"):
                raise GpudoctorError(f"--nproc: the command runs on {nodes} nodes", "--nproc compares ranks of one")
    if any(option in word for word in words[start:] for option in ("--rdzv", "--standalone", "--master")):
        return _replaced(words, start, _NPROC, ranks)
    return _replaced([*words[:start], "--standalone", *words[start:]], start, _NPROC, ranks)


def _accelerate(words: list[str], start: int, ranks: int) -> list[str]:
    if ranks == 1:  # accelerate refuses --multi_gpu with one process
        words = [word for word in words if word not in _MULTI_GPU]
    return _replaced(words, start, _PROCESSES, ranks)


def _replaced(words: list[str], start: int, options: tuple[str, str], ranks: int) -> list[str]:
    """The value of the option replaced where it stands, else the option put first among the launcher's."""
    for at in range(start, len(words)):
        if words[at] in options and at + 1 < len(words):
            return [*words[: at + 1], str(ranks), *words[at + 2 :]]
        option, equals, _ = words[at].partition("=")
        if equals and option in options:
            return [*words[:at], f"{option}={ranks}", *words[at + 1 :]]
    return [*words[:start], options[0], str(ranks), *words[start:]]
