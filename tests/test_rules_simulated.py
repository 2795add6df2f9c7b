"""Machines of eight GPUs that were never built: measurements made by a small model with 1 % noise, faults put in.

Each fault must be named, at the GPU that has it; the healthy machine must be silent for every seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from random import Random

import pytest

from gpudoctor import checkup
from gpudoctor.model import Case, Finding, Gpu, Host, Measurement, NumaNode, Pair, PcieHop, PcieLink, Setting

GPUS = 8
NOISE = 0.01
H2D, D2H, BOTH, LOCAL, PEER, STAGED = 25.6, 26.4, 22.0, 372.0, 26.4, 22.2  # GB/s of a healthy Gen4 x16 machine
X16 = PcieLink(
    generation=4, width=16, max_generation=4, max_width=16, port_max_generation=4, port_max_width=16, state="load"
)
X4 = dataclasses.replace(X16, width=4, max_width=4, port_max_width=4)
FAMILIES = ("PCI", "P2P", "BND", "NVL")


class Machine:
    """Two sockets with four GPUs each, every GPU at its own root port; faults are set before `case`."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.link = dict.fromkeys(range(GPUS), X16)  # as read under load
        self.uplinks: dict[int, str] = {}  # GPU -> the switch it hangs on
        self.chipset: set[int] = set()
        self.factor = dict.fromkeys(range(GPUS), 1.0)
        self.peer, self.far = PEER, 0.98
        self.hidden = False  # no way up is known

    def noisy(self, value: float) -> float:
        return value * self.random.gauss(1.0, NOISE)

    def figure(self, metric: str, subject: str, value: float, **settings: Setting) -> Measurement:
        samples = sorted(self.noisy(value) for _ in range(9))
        return Measurement(
            metric=metric,
            subject=subject,
            value=samples[4],
            unit="GB/s",
            spread=(samples[1], samples[7]),
            samples=9,
            settings=settings,
        )

    def gpu(self, index: int) -> Gpu:
        bdf = f"0000:{0x10 + index:02x}:00.0"
        hops = [PcieHop(bdf=bdf, kind="endpoint", link=self.link[index])]
        if index in self.uplinks or index in self.chipset:
            port = self.uplinks.get(index, "0000:02:00.0")
            hops.append(PcieHop(bdf=f"0000:05:{index:02x}.0", kind="switch-down", link=X16))
            hops.append(PcieHop(bdf=port, kind="switch-up", link=X4 if index in self.chipset else X16))
        hops.append(PcieHop(bdf=f"0000:00:{index:02x}.1", kind="root-port", link=hops[-1].link))
        return Gpu(
            index=index,
            name="NVIDIA L40S",
            bdf=bdf,
            pcie=self.link[index],
            pcie_path=() if self.hidden else tuple(hops),
            root=f"pci0000:0{index // 4}",
            numa_node=index // 4,
            local_cpus=tuple(range(32 * (index // 4), 32 * (index // 4) + 32)),
            pstate=0,
            bar1_bytes=64 << 30,
            architecture="Ada",
        )

    def alone(self, metric: str, index: int) -> float:
        return {"h2d": H2D, "d2h": D2H}[metric] * self.factor[index]

    def case(self) -> Case:
        items: list[Measurement] = []
        for index in range(GPUS):
            subject, factor = f"gpu:{index}", self.factor[index]
            items += [self.figure(metric, subject, self.alone(metric, index)) for metric in ("h2d", "d2h")]
            items += [self.figure(m, subject, BOTH * factor) for m in ("h2d_while_d2h", "d2h_while_h2d")]
            items.append(self.figure("d2d", subject, LOCAL))
            for node, metric in itertools.product((0, 1), ("h2d", "d2h")):
                near = node == index // 4
                rate = self.alone(metric, index) * (1.0 if near else self.far)
                items.append(self.figure(f"{metric}_node", subject, rate, node=node, near=near))
            items += [Measurement(metric="pcie_replays", subject=subject, value=0.0, unit="count")]
        items += self._together()
        items += self._peers()
        pairs = tuple(
            Pair(a=f"gpu:{a}", b=f"gpu:{b}", path=self._path(a, b), p2p_read="OK", p2p_write="OK")
            for a, b in itertools.combinations(range(GPUS), 2)
        )
        nodes = tuple(NumaNode(node=n, cpus=tuple(range(32 * n, 32 * n + 32))) for n in (0, 1))
        return Case(
            host=Host(os="linux", virtualization="none", iommu="identity", sockets=2, cpu_count=64),
            gpus=tuple(self.gpu(index) for index in range(GPUS)),
            pairs=pairs,
            numa_nodes=nodes,
            measurements=tuple(items),
        )

    def _path(self, a: int, b: int) -> str:
        if self.uplinks.get(a) is not None and self.uplinks.get(a) == self.uplinks.get(b):
            return "PIX"
        return "NODE" if a // 4 == b // 4 else "SYS"

    def _shares(self, a: int, b: int) -> bool:
        return self.uplinks.get(a) is not None and self.uplinks.get(a) == self.uplinks.get(b)

    def _together(self) -> list[Measurement]:
        items = []
        for metric in ("h2d", "d2h"):
            alone = {index: self.noisy(self.alone(metric, index)) for index in range(GPUS)}
            for index in range(GPUS):
                members = sum(1 for other in range(GPUS) if other == index or self._shares(index, other))
                items.append(
                    self.figure(
                        f"{metric}_all",
                        f"gpu:{index}",
                        self.alone(metric, index) / members,
                        gpus=GPUS,
                        alone=alone[index],
                    )
                )
            for a, b in itertools.combinations(range(GPUS), 2):
                total = self.alone(metric, a) + self.alone(metric, b)
                rate = total / 2 if self._shares(a, b) else total
                items.append(self.figure(f"{metric}_pair_sum", f"gpu:{a}-gpu:{b}", rate, alone=alone[a] + alone[b]))
        return items

    def _peers(self) -> list[Measurement]:
        items = []
        for a, b in itertools.permutations(range(GPUS), 2):
            subject, factor = f"gpu:{a}-gpu:{b}", min(self.factor[a], self.factor[b])
            items.append(self.figure("p2p_write", subject, min(self.peer, PEER * factor), path="peer"))
            items.append(self.figure("p2p_staged", subject, min(STAGED, STAGED * factor), path="staged"))
            items.append(Measurement(metric="p2p_check", subject=subject, value=1.0, unit="passed"))
        return items


def findings(machine: Machine) -> list[Finding]:
    envelope = checkup.examine(machine.case(), command="bench-pcie")
    assert envelope.errors == ()
    return list(envelope.findings)


def named(machine: Machine) -> dict[str, set[str]]:
    """Rule code -> subjects, of findings at warning or above."""
    found: dict[str, set[str]] = {}
    for finding in findings(machine):
        if finding.severity in ("warning", "error", "critical"):
            found.setdefault(finding.rule, set()).add(finding.subject)
    return found


def test_healthy_machines_are_silent_in_100_seeds() -> None:
    for seed in range(100):
        loud = [
            f for f in findings(Machine(seed)) if f.rule.startswith(FAMILIES) or f.severity not in ("info", "unknown")
        ]
        assert not loud, (seed, [(f.rule, f.subject, f.message) for f in loud])


@pytest.mark.parametrize("seed", range(5))
def test_shared_uplink_without_a_switch_in_sight(seed: int) -> None:
    machine = Machine(seed)
    machine.uplinks = {2: "0000:02:00.0", 3: "0000:02:00.0"}
    machine.hidden = True
    assert named(machine) == {"PCI008": {"gpu:2-gpu:3"}}


@pytest.mark.parametrize("seed", range(5))
def test_shared_uplink_of_a_switch_is_the_design(seed: int) -> None:
    machine = Machine(seed)
    machine.uplinks = {index: f"0000:0{index // 2}:00.0" for index in range(GPUS)}
    assert named(machine) == {}
    shared = [f for f in findings(machine) if f.rule == "PCI008"]
    assert {f.subject for f in shared} == {"gpu:0-gpu:1", "gpu:2-gpu:3", "gpu:4-gpu:5", "gpu:6-gpu:7"}
    assert {f.severity for f in shared} == {"info"}


@pytest.mark.parametrize("seed", range(5))
def test_chipset_slot(seed: int) -> None:
    machine = Machine(seed)
    machine.chipset, machine.factor[5] = {5}, 0.25
    found = named(machine)
    assert found["PCI004"] == {"gpu:5"}
    assert found.keys() <= {"PCI004", "BND003"}
    assert found.get("BND003", {"gpu:5"}) == {"gpu:5"}


@pytest.mark.parametrize("seed", range(5))
def test_chipset_slot_that_nothing_but_the_rate_shows(seed: int) -> None:
    machine = Machine(seed)
    machine.hidden, machine.factor[5] = True, 0.25
    found = named(machine)
    assert found["BND003"] == {"gpu:5"}
    assert "gpu:5" in found["BND002"]
    like = next(f.message for f in findings(machine) if f.rule == "BND002" and f.subject == "gpu:5")
    assert "Gen4 x4" in like


@pytest.mark.parametrize("seed", range(5))
def test_one_slow_link(seed: int) -> None:
    machine = Machine(seed)
    machine.link[3], machine.factor[3] = dataclasses.replace(X16, width=8), 0.5
    found = named(machine)
    assert found["PCI001"] == {"gpu:3"}
    assert found.keys() <= {"PCI001", "BND003"}


@pytest.mark.parametrize("seed", range(5))
def test_peer_copies_slower_than_staging(seed: int) -> None:
    machine = Machine(seed)
    machine.peer = 9.9
    found = named(machine)
    assert found["P2P005"] == {"host"}
    assert found.keys() == {"P2P005"}


@pytest.mark.parametrize("seed", range(5))
def test_loss_from_the_far_node(seed: int) -> None:
    machine = Machine(seed)
    machine.far = 0.45
    assert named(machine) == {"NUM010": {f"gpu:{index}" for index in range(GPUS)}}


@pytest.mark.parametrize("seed", range(5))
def test_one_gpu_that_lost_a_tenth(seed: int) -> None:
    machine = Machine(seed)
    machine.factor[6] = 0.88
    assert named(machine)["BND003"] == {"gpu:6"}
