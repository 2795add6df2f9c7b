"""The launch configuration of one machine, and the bash script that carries it.

Ranks are bound by bus address to the CPUs and memory of their GPU's NUMA node, and only where that node is known.
Where it is not, nothing is bound: a wrong binding costs more than none.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Because, Case, Change, Finding, Gpu, LaunchConfig, RankBinding
from gpudoctor.prescribe.placement import cpu_ranges, node_of, rank_cpus, unknown_because, usable_gpus, visible_gpus
from gpudoctor.prescribe.workers import usable_cpus

Form = Literal["auto", "torchrun", "plain"]

NUMA_BINDING = "--numa-binding=node"
_NUMA_BINDING_SINCE = (2, 9)  # the torch version in which torchrun got the option
_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LAUNCHERS = {
    "torchrun",
    "accelerate",
    "deepspeed",
    "srun",
    "mpirun",
    "mpiexec",
    "horovodrun",
    "composer",
    "colossalai",
}
_LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}


def launch_config(
    case: Case, command: Sequence[str], *, findings: Sequence[Finding] = (), nproc: int | None = None
) -> LaunchConfig:
    """How to start `command` on this machine; every line has its reason in `because`.

    nproc: ranks on this machine; None takes it from the command's own launcher, else from what was watched, else 1.
    GpudoctorError when there is no command that can be started, or there are fewer GPUs than `nproc`.
    """
    if not command or command[0].startswith("-") or any("\0" in part for part in command):
        raise GpudoctorError("no command to launch", "give it after --, such as: gpudoctor launch -- python train.py")
    usable = usable_gpus(case)
    if not usable:
        because = (Because(line="command", reason="no usable GPU is known, so nothing is set or bound"),)
        return LaunchConfig(command=tuple(command), because=because)
    chosen, note = visible_gpus(case)
    reasons = [Because(line="command", reason=note)] if note else []
    wanted = nproc or _own_ranks(command) or _watched_ranks(case) or 1
    if nproc is not None and chosen is not None and nproc > len(chosen):
        raise GpudoctorError(
            f"{nproc} ranks were asked for, but {len(chosen)} GPUs can be used", "use a smaller number"
        )
    gpus = _gpus_of_ranks(case, chosen, wanted, reasons)
    env: dict[str, str] = {}
    if chosen is not None:
        _visible_devices(case, gpus, usable, env, reasons)
    ranks = _bound(case, gpus, findings, reasons)
    _threads(case, len(ranks), env, reasons)
    _numa_binding(case, ranks, reasons)
    return LaunchConfig(command=tuple(command), env=env, ranks=tuple(ranks), because=tuple(reasons))


def with_settings(config: LaunchConfig, kept: Sequence[Change]) -> LaunchConfig:
    """The configuration with the environment of the changes that were kept: it was tried, and decides."""
    env, because = dict(config.env), list(config.because)
    for change in kept:
        for name, value in change.environment.items():
            env[name] = value
            because = [each for each in because if each.line != name]
            because.append(Because(line=name, reason=f"tried by tune ({change.rule}): {change.reason}"))
    return dataclasses.replace(config, env=env, because=tuple(because))


def render(config: LaunchConfig, form: Form = "auto") -> str:
    """A bash script that passes its own arguments on to the command; a comment above each line says why it is there.

    auto: a command with its own launcher keeps it and gets the environment; a plain command becomes torchrun when
    there are several ranks. torchrun and plain force the form of a command without its own launcher.
    """
    lines = ["#!/usr/bin/env bash", "# written by gpudoctor; a value that is set already is kept", "set -eu", ""]
    for name, value in config.env.items():
        if _NAME.fullmatch(name) and "\0" not in value:
            lines += _comments(config, name)
            lines.append(f'[ -n "${{{name}+x}}" ] || export {name}={shlex.quote(value)}')
    lines += _comments(config, "command")
    own = has_launcher(config.command)
    if not own and (form == "torchrun" or (form == "auto" and len(config.ranks) > 1)):
        lines += _torchrun(config)
    elif own:
        lines += [f"# {_clean(line)}" for line in _rank_notes(config)]
        lines.append(f'exec -- {_quoted(config.command)} "$@"')
    else:
        lines += _plain(config)
    return "\n".join(lines) + "\n"


def has_launcher(command: Sequence[str]) -> bool:
    """Whether the command starts its ranks itself (torchrun, accelerate launch, python -m torch.distributed.run...)."""
    name = PurePath(command[0]).name if command else ""
    if name in _LAUNCHERS:
        return True
    return any(first == "-m" and second in _LAUNCHER_MODULES for first, second in itertools.pairwise(command))


def _own_ranks(command: Sequence[str]) -> int | None:
    if not has_launcher(command):
        return None
    joined = "\0".join(command)
    found = re.search(r"(?:--nproc[_-]per[_-]node|--num[_-]processes|--num[_-]gpus)[=\0](\d{1,4})(?:\0|$)", joined)
    return int(found[1]) if found else None


def _watched_ranks(case: Case) -> int | None:
    ranks = {record.local_rank for record in case.watched.records if record.world_size} if case.watched else set()
    return len(ranks) or None


def _gpus_of_ranks(case: Case, chosen: Sequence[Gpu] | None, ranks: int, reasons: list[Because]) -> list[Gpu | None]:
    """The GPU of each rank; None where the process chooses itself."""
    if chosen is None or ranks > len(chosen):
        return [None] * ranks
    if ranks > 1 or len(chosen) == 1:
        return list(chosen[:ranks])
    devices = {record.device for record in case.watched.records} if case.watched else set()
    number = re.fullmatch(r"cuda:(\d{1,3})", devices.pop() or "") if len(devices) == 1 else None
    if number and int(number[1]) < len(chosen):
        return [chosen[int(number[1])]]
    reasons.append(Because(line="command", reason="one process and several GPUs: which of them it uses was not seen"))
    return [None]


def _visible_devices(
    case: Case, gpus: Sequence[Gpu | None], usable: Sequence[Gpu], env: dict[str, str], reasons: list[Because]
) -> None:
    """Name the GPUs of several ranks by UUID, in rank order; a lone process keeps the GPUs that it sees."""
    named = [gpu for gpu in gpus if gpu is not None]
    if len(named) < 2 or "CUDA_VISIBLE_DEVICES" in (case.software.environment or {}):
        return
    if any(gpu.mig for gpu in usable):
        reasons.append(Because(line="command", reason="a GPU is in MIG mode: choose the instances yourself"))
        return
    where = ", ".join(f"rank {rank} on {gpu.bdf or gpu.index}" for rank, gpu in enumerate(named))
    uuids = [gpu.uuid or "" for gpu in named]
    if all(_UUID.fullmatch(uuid) for uuid in uuids):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
        reasons.append(Because(line="CUDA_VISIBLE_DEVICES", reason=f"by UUID, so that no order can differ: {where}"))
        return
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in named)
    reasons.append(Because(line="CUDA_DEVICE_ORDER", reason="CUDA's own order is fastest first, not nvidia-smi's"))
    reasons.append(Because(line="CUDA_VISIBLE_DEVICES", reason=f"in bus order: {where}"))


def _bound(
    case: Case, gpus: Sequence[Gpu | None], findings: Sequence[Finding], reasons: list[Because]
) -> list[RankBinding]:
    why = unknown_because(case, findings)
    if why is not None:
        reasons.append(Because(line="command", reason=f"nothing is bound: {why}"))
    ranks = []
    for rank, gpu in enumerate(gpus):
        bdf = gpu.bdf if gpu is not None else None
        node = node_of(case, gpu) if gpu is not None and why is None else None
        cpus = rank_cpus(case, node) if node is not None else None
        if node is not None and not cpus:
            reasons.append(
                Because(line="command", reason=f"rank {rank} is not bound: no CPU of NUMA node {node} is allowed here")
            )
            node, cpus = None, None
        if node is not None and gpu is not None:
            reason = f"GPU {gpu.bdf or gpu.index} is attached to NUMA node {node}"
            reasons.append(Because(line=f"rank {rank}", reason=reason))
        ranks.append(RankBinding(rank=rank, gpu=bdf, cpus=cpus, numa_node=node))
    return ranks


def _threads(case: Case, ranks: int, env: dict[str, str], reasons: list[Because]) -> None:
    """OpenMP takes one thread for each CPU that it sees, and it does not see a cgroup quota."""
    quota, allowed = case.limits.cpu_quota, case.limits.allowed_cpus
    if "OMP_NUM_THREADS" in (case.software.environment or {}) or quota is None or allowed is None:
        return
    if quota < len(allowed):
        threads = max(1, math.floor(usable_cpus(case) / max(1, ranks)))
        env["OMP_NUM_THREADS"] = str(threads)
        shared = f" for {ranks} ranks" if ranks > 1 else ""
        reasons.append(
            Because(
                line="OMP_NUM_THREADS",
                reason=f"the CPU quota is {quota:g}{shared}, but {len(allowed)} CPUs can be seen (CTR007)",
            )
        )


def _numa_binding(case: Case, ranks: Sequence[RankBinding], reasons: list[Because]) -> None:
    """torchrun's own binding where the version has it; it binds CPUs by the bus address, and needs numactl."""
    version = re.match(r"(\d+)\.(\d+)", case.software.torch or "")
    known = len(ranks) > 1 and all(rank.numa_node is not None for rank in ranks)
    if known and version and (int(version[1]), int(version[2])) >= _NUMA_BINDING_SINCE:
        reasons.append(
            Because(line=NUMA_BINDING, reason=f"torch {version[0]} binds each rank to the CPUs of its GPU's NUMA node")
        )


def _torchrun(config: LaunchConfig) -> list[str]:
    count = max(1, len(config.ranks))
    python = PurePath(config.command[0]).name.startswith("python")
    start = f"{shlex.quote(config.command[0])} -m torch.distributed.run" if python else "torchrun"
    # "--" ends torchrun's own options: without it argparse refuses script options that start like several of its own.
    start += f" --standalone --nproc_per_node={count}"
    notes = [f"# {_clean(line)}" for line in _rank_notes(config)]
    command = _quoted(config.command)
    if any(because.line == NUMA_BINDING for because in config.because):
        return [
            *notes,
            *_comments(config, NUMA_BINDING),
            f"bind=({NUMA_BINDING})",
            "if ! command -v numactl >/dev/null 2>&1; then",
            '  echo "launch: numactl is not installed, so the ranks are not bound" >&2',
            "  bind=()",
            "fi",
            f'exec -- {start} ${{bind[@]+"${{bind[@]}}"}} --no-python -- {command} "$@"',
        ]
    bound = [rank for rank in config.ranks if rank.cpus and rank.numa_node is not None]
    if not bound:
        return [*notes, f'exec -- {start} --no-python -- {command} "$@"']
    cases = [f'  {rank.rank}) set -- {_numactl(rank)} -- "$@" ;;' for rank in bound]
    return [
        *notes,
        "# each rank finds its binding by its number; numactl is tried first, and left out where it may not bind",
        'per_rank=\'command=("$@")',
        'case "${LOCAL_RANK:-}" in',
        *cases,
        "esac",
        "if [ $# -gt ${#command[@]} ]; then",
        '  n=$(( $# - ${#command[@]} )); "${@:1:n}" true 2>/dev/null || set -- "${command[@]}"',
        "fi",
        'exec "$@"\'',
        f'exec -- {start} --no-python -- bash -c "$per_rank" rank {command} "$@"',
    ]


def _plain(config: LaunchConfig) -> list[str]:
    notes = [f"# {_clean(line)}" for line in _rank_notes(config)]
    nodes = {rank.numa_node for rank in config.ranks}
    bound = next((rank for rank in config.ranks if rank.cpus), None)
    command = _quoted(config.command)
    if len(nodes) != 1 or bound is None or bound.numa_node is None:
        return [*notes, f'exec -- {command} "$@"']
    return [
        *notes,
        f"bind=({_numactl(bound)} --)",
        'if ! "${bind[@]}" true 2>/dev/null; then',
        '  echo "launch: numactl is not installed, or may not bind here; starting unbound" >&2',
        "  bind=()",
        "fi",
        f'exec -- ${{bind[@]+"${{bind[@]}}"}} {command} "$@"',
    ]


def _numactl(rank: RankBinding) -> str:
    """Memory is preferred on the node, not confined to it: a full node must not kill the run."""
    assert rank.cpus is not None
    assert rank.numa_node is not None
    return f"numactl --physcpubind={cpu_ranges(rank.cpus)} --preferred={int(rank.numa_node)}"


def _rank_notes(config: LaunchConfig) -> list[str]:
    return [f"{each.line}: {each.reason}" for each in config.because if each.line.startswith("rank ")]


def _comments(config: LaunchConfig, line: str) -> list[str]:
    return [f"# {_clean(each.reason)}" for each in config.because if each.line == line]


def _clean(text: str) -> str:
    """One printable line, whatever came from outside."""
    return "".join(character for character in " ".join(text.split()) if character.isprintable())[:300]


def _quoted(command: Sequence[str]) -> str:
    return " ".join(shlex.quote(part) for part in command)
