"""What two real H200 on NVLink taught: NVML's numbers for NVLink versions, hidden switches, judged peers."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gpudoctor import codec, judge
from gpudoctor.model import Case, Measurement

MACHINE = Path(__file__).parent / "machines" / "h200-2gpu-nvlink-vm"


@pytest.fixture(scope="module")
def case() -> Case:
    return codec.decode_case((MACHINE / "case.json").read_text(), what="the machine")[0]


def test_nvml_calls_version_4_number_6(case: Case) -> None:
    """It once was told as NVLink 6, for which no profile is: copies between the GPUs got no verdict."""
    for gpu in case.gpus:
        assert [(link.active, link.version) for link in gpu.nvlinks] == [(True, 4)] * 18


def test_a_switch_that_the_machine_cannot_see_has_no_address(case: Case) -> None:
    links = [link for gpu in case.gpus for link in gpu.nvlinks]
    assert {(link.remote_type, link.remote_bdf) for link in links} == {("switch", None)}
    gaps = [gap for gap in case.gaps if gap.path.endswith("nvlinks[0].remote_bdf")]
    assert [gap.reason for gap in gaps] == ["not present"] * 2
    [pair] = [pair for pair in case.pairs if (pair.a, pair.b) == ("gpu:0", "gpu:1")]
    assert (pair.nvlinks, pair.p2p_read, pair.p2p_write) == (18, "OK", "OK")  # NV18 in topo.txt


@pytest.mark.parametrize(("metric", "measured"), [("p2p_write", 395.14), ("p2p_read", 390.18)])
def test_the_copies_measured_there_are_judged(case: Case, metric: str, measured: float) -> None:
    """nvbandwidth gave 396.45 and 393.91 GB/s in the same minute."""
    item = Measurement(metric=metric, subject="gpu:0-gpu:1", value=measured, unit="GB/s", settings={"path": "peer"})
    told = judge.judged(case, item)
    assert told.verdict == "ok"
    assert told.expected is not None
    assert told.expected.low <= measured <= (told.expected.high or 0) * 1.02


def test_nccl_sees_the_same_machine(case: Case) -> None:
    """Addresses, links and the missing NUMA node of the GPUs as NCCL dumped them; it took peer memory over NVLink."""
    system = ET.fromstring((MACHINE / "nccl-topology.xml").read_text())
    devices = {device.get("busid"): device for device in system.iter("pci")}
    assert sorted(devices) == sorted(f"0000:{gpu.bdf[-7:]}" for gpu in case.gpus)
    for gpu in case.gpus:
        (links,) = devices[f"0000:{gpu.bdf[-7:]}"].iter("nvlink")
        assert int(links.get("count") or 0) == sum(bool(link.active) for link in gpu.nvlinks)
    assert [cpu.get("numaid") for cpu in system.iter("cpu")] == ["-1"]
    log = (MACHINE / "nccl.log").read_text()
    assert "NCCL_NVLS_ENABLE set by environment to 0." in log
    assert set(re.findall(r"Channel \d+/0 : 0\[0\] -> 1\[1\] via (\S+)", log)) == {"P2P/CUMEM"}
