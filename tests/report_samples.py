"""Cases and envelopes for the tests of report, cli and checkup; and a generator of hostile ones."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

from gpudoctor.model import (
    Case,
    Change,
    Edit,
    Envelope,
    Evidence,
    Expected,
    Finding,
    Gain,
    Gpu,
    Host,
    LaunchConfig,
    Limits,
    Measurement,
    Nic,
    NotChecked,
    NumaNode,
    Pair,
    PathClass,
    PcieHop,
    PcieLink,
    Prescription,
    ProofResult,
    RankBinding,
    Remedy,
    Software,
    Step,
    SyncSite,
    Trial,
    Watched,
    WatchedLoader,
    WatchRecord,
)
from gpudoctor.model.watch import CopySite

# Newlines, quotes, terminal escapes, rich markup, HTML, Markdown, shell, XML-illegal and bidi characters.
HOSTILE = (
    "\n\x1b[31mred\x1b]0;title\x07\r'\"`|[bold]x[/bold]<script>&amp;]]>$(id);\u202eevil\u200b\x00\ud800#*_\ufffe\t"
)


def link(generation: int = 4, width: int = 16, **more: Any) -> PcieLink:
    values: dict[str, Any] = {"max_generation": 4, "max_width": 16, "port_max_generation": 4, "port_max_width": 16}
    return PcieLink(generation=generation, width=width, state="load", **{**values, **more})


def switch_machine(name: str = "NVIDIA A100-PCIE-40GB") -> Case:
    """Two sockets, on each two PCIe switches with two GPUs; a NIC on each socket. The pairs follow nvidia-smi's words
    for the machine of https://github.com/NVIDIA/nccl/issues/1439, the addresses are ours."""
    gpus, pairs = [], []
    for index in range(8):
        node, bus = index // 4, 0x18 + 0x10 * index
        bridge = f"pci0000:{'00' if node == 0 else '80'}"
        switch = f"0000:{0x10 + 0x20 * (index // 2):02x}:00.0"
        gpus.append(
            Gpu(
                index=index,
                name=name,
                bdf=f"0000:{bus:02x}:00.0",
                uuid=f"GPU-5a1f3c2e-1111-2222-3333-{index:012d}",
                memory_bytes=40 << 30,
                pcie=link(),
                root=bridge,
                pcie_path=(
                    PcieHop(bdf=f"0000:{bus:02x}:00.0", kind="endpoint", link=link()),
                    PcieHop(bdf=f"0000:{bus - 1:02x}:00.0", kind="switch-down"),
                    PcieHop(bdf=switch, kind="switch-up", link=link()),
                    PcieHop(bdf=f"0000:{'00' if node == 0 else '80'}:01.0", kind="root-port"),
                ),
                numa_node=node,
                numa_nodes=(node,),
                local_cpus=(*range(14 * node, 14 * node + 14), *range(28 + 14 * node, 42 + 14 * node)),
            )
        )
    for a in range(8):
        for b in range(a + 1, 8):
            path: PathClass = "PIX" if a // 2 == b // 2 else "PHB" if a // 4 == b // 4 else "SYS"
            pairs.append(Pair(a=f"gpu:{a}", b=f"gpu:{b}", path=path, p2p_read="OK"))
        for nic in range(2):
            near: PathClass = "PHB" if a // 4 == nic else "SYS"
            pairs.append(Pair(a=f"gpu:{a}", b=f"nic:mlx5_{nic}", path="PIX" if a == 4 * nic else near))
    return Case(
        host=Host(
            hostname="node-a", os="linux", cpu_count=56, memory_bytes=252 << 30, virtualization="none", gpus_on_bus=8
        ),
        gpus=tuple(gpus),
        pairs=tuple(pairs),
        numa_nodes=tuple(
            NumaNode(
                node=n, cpus=(*range(14 * n, 14 * n + 14), *range(28 + 14 * n, 42 + 14 * n)), memory_bytes=126 << 30
            )
            for n in range(2)
        ),
        nics=tuple(
            Nic(
                name=f"mlx5_{n}",
                kind="infiniband",
                bdf=f"0000:{0x1E + 0x80 * n:02x}:00.0",
                root=f"pci0000:{'00' if n == 0 else '80'}",
                numa_node=n,
                rate_gb_s=25.0,
                state="ACTIVE",
            )
            for n in range(2)
        ),
        software=Software(driver="570.86.10", cuda_driver="12.8", torch="2.13.0"),
        limits=Limits(allowed_cpus=tuple(range(56))),
    )


def faulty_machine() -> Case:
    """The machine above with GPU2 at x4, GPU5 lost, and GPU7 idle at generation 1."""
    case = switch_machine()
    gpus = list(case.gpus)
    slow = dataclasses.replace(gpus[2].pcie_path[0], link=link(width=4))
    gpus[2] = dataclasses.replace(gpus[2], pcie=link(width=4), pcie_path=(slow, *gpus[2].pcie_path[1:]))
    gpus[5] = dataclasses.replace(gpus[5], lost=True, lost_reason="GPU is lost", pcie=None, name=None)
    gpus[7] = dataclasses.replace(gpus[7], pcie=dataclasses.replace(link(generation=1), state="idle"))
    return dataclasses.replace(case, gpus=tuple(gpus))


def findings() -> tuple[Finding, ...]:
    """One of each severity."""
    return (
        Finding(
            rule="PCI001",
            name="link-width-below-max",
            severity="error",
            subject="gpu:2",
            message="the link runs at x4, card and slot allow x16",
            evidence=(Evidence(fact="gpus[0000:38:00.0].pcie.width", value="4", expected="16", source="sysfs"),),
            remedies=(
                Remedy(
                    kind="hardware", text="reseat the card or replace the riser", risk="the machine is off meanwhile"
                ),
                Remedy(kind="bios", text="check the slot bifurcation in the firmware", undo="set it back to x4x4x4x4"),
            ),
            gain=Gain(low=2.5, high=3.9, unit="x", basis="profile", source="profiles/gpus.toml"),
            confidence="certain",
        ),
        Finding(
            rule="SWV005",
            name="driver-not-loaded",
            severity="critical",
            subject="host",
            message="8 GPUs are on the bus and the driver answers for 7",
            symptoms=("gpu:5 is lost",),
            confidence="possible",
        ),
        Finding(
            rule="NUM001",
            name="gpus-span-numa-nodes",
            severity="info",
            subject="host",
            message="the GPUs sit on 2 NUMA nodes",
            remedies=(Remedy(kind="command", text="numactl --cpunodebind=1 --membind=1 python train.py"),),
        ),
        Finding(
            rule="P2P005",
            name="p2p-slower-than-staged",
            severity="warning",
            subject="gpu:0-gpu:4",
            message="P2P is slower than copies through the host",
        ),
        *(
            Finding(
                rule="PCI003",
                name="link-speed-unknown-at-idle",
                severity="unknown",
                subject=f"gpu:{index}",
                message="only an idle reading exists: PCIe 1.0",
                remedies=(Remedy(kind="measure", text="gpudoctor bench-pcie"),),
            )
            for index in (6, 7)
        ),
    )


def measurements() -> tuple[Measurement, ...]:
    expected = Expected(low=24.0, high=26.5, basis="published", source="profiles/gpus.toml")
    settings = {"bytes": 256 << 20}
    return tuple(
        Measurement(
            metric=metric,
            subject=f"gpu:{gpu}",
            value=value / (4 if gpu == 2 else 1),
            unit="GB/s",
            spread=(value / (4 if gpu == 2 else 1) - 0.1, value / (4 if gpu == 2 else 1) + 0.1),
            samples=24,
            settings={**settings, "pinned": "pageable" not in metric},
            expected=None if "pageable" in metric else expected,
            verdict=None if "pageable" in metric else "bad" if gpu == 2 else "ok",
            notes=("4 of 24 copies were slow: other load?",) if (gpu, metric) == (2, "d2h") else (),
        )
        for gpu in (0, 2)
        for metric, value in (("h2d", 24.9), ("d2h", 25.3), ("h2d_pageable", 9.8), ("d2h_pageable", 8.7))
    )


def watched() -> Watched:
    record = WatchRecord(
        pid=4711,
        device="cuda:0",
        cuda=True,
        step_source="optimizer",
        optimizer_steps=60,
        batches=60,
        backwards=60,
        steps=tuple(Step(wall_ms=200.0, loader_wait_ms=120.0, copy_wait_ms=10.0, sync_wait_ms=30.0) for _ in range(60)),
        watched_s=12.0,
        steps_per_s=5.0,
        loaders=(
            WatchedLoader(
                site="train.py:45",
                ordinal=0,
                role="train",
                loader_class="DataLoader",
                dataset_class="Images",
                iterable_dataset=False,
                batch_size=64,
                batches=60,
                batch_bytes=12 << 20,
                wait_ms=7200.0,
            ),
        ),
        copies=(
            CopySite(
                site="train.py:71",
                function="to",
                kind="h2d",
                calls=60,
                bytes=60 * (12 << 20),
                waited_ms=600.0,
                calls_in_steps=59,
            ),
        ),
        syncs=(
            SyncSite(site="train.py:88", function="item", calls=60, on_device=60, waited_ms=1800.0, calls_in_steps=59),
        ),
        notes=("torch.compile was not used",),
    )
    return Watched(
        command=("python", "train.py", "--steps", "60"), cwd="/home/user/run", records=(record,), stopped="steps"
    )


def prescription() -> Prescription:
    gain = Gain(low=1.7, high=1.9, unit="x", basis="measured", source="tune")
    return Prescription(
        launch=LaunchConfig(
            command=("python", "train.py"),
            ranks=(RankBinding(rank=0, gpu="0000:18:00.0", cpus=(0, 1, 2, 3), numa_node=0),),
        ),
        changes=(
            Change(
                id="C1",
                rule="LDR001",
                site="train.py:45",
                mechanism="loader",
                title="num_workers=4, pin_memory=True",
                change_class="exact",
                edits=(
                    Edit(kind="loader-arguments", site="train.py:45", arguments={"num_workers": 4, "pin_memory": True}),
                ),
                kept=True,
                gain=gain,
            ),
            Change(
                id="C2",
                rule="SYN001",
                site="train.py:88",
                mechanism="sync",
                title="sum the loss on the device",
                change_class="exact",
                edits=(Edit(kind="device-accumulator", site="train.py:88", name="loss"),),
                reason="adds 0.3 %, less than the noise",
            ),
            Change(
                id="C3",
                rule="CPY001",
                site="train.py:71",
                mechanism="sync",
                title="non_blocking=True",
                change_class="exact",
                reason="the source is not pinned",
            ),
        ),
        trials=(
            *(
                Trial(changes=(), purpose="confirm", rate=5.0 + 0.02 * n, median_step_ms=200.0, loader_wait_ms=120.0)
                for n in range(3)
            ),
            *(
                Trial(changes=("C1",), purpose="confirm", rate=14.6 + 0.02 * n, median_step_ms=68.0, loader_wait_ms=1.2)
                for n in range(3)
            ),
        ),
        proof=ProofResult(verdict="identical", compared=("parameters after 20 steps", "40 batches")),
        files={
            "launch": "gpudoctor-out/launch.sh",
            "patch": "gpudoctor-out/train.patch",
            "case": "gpudoctor-out/case.json",
        },
        verdict="2.92 times the rate with 1 change",
    )


def envelope(**more: Any) -> Envelope:
    """Something in every field."""
    values: dict[str, Any] = {
        "version": "0.1.0",
        "command": "checkup",
        "status": "findings",
        "exit_code": 1,
        "case": dataclasses.replace(faulty_machine(), watched=watched()),
        "measurements": (
            *measurements(),
            Measurement(
                metric="tune.speedup",
                subject="train.py",
                value=2.92,
                unit="x",
                spread=(2.85, 2.99),
                samples=6,
                verdict="ok",
            ),
        ),
        "findings": findings(),
        "not_checked": (
            NotChecked(rule="LDR001", reason="no training command was watched"),
            NotChecked(rule="SYN001", reason="no training command was watched"),
            NotChecked(rule="CTR001", reason="limits.shm_bytes: not probed"),
        ),
        "clean": ("PCI002", "HLT012"),
        "prescription": prescription(),
    }
    return Envelope(**{**values, **more})


def hostile(kind: Any, text: str = HOSTILE) -> Any:
    """An instance of a model class in which every string, also in keys, is `text`, and every collection has members."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return kind(**{name: hostile(hint, text) for name, hint in _hints(kind).items()})  # type: ignore[operator]
    if origin in (typing.Union, types.UnionType):
        return hostile(next(part for part in arguments if part is not type(None)), text)
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        parts = arguments[:1] * 2 if arguments[-1] is Ellipsis else arguments
        return tuple(hostile(part, text) for part in parts)
    if origin is dict:
        return {text: hostile(arguments[1], text)}
    return {str: text, int: 3, float: 1.5, bool: True}[kind]


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
