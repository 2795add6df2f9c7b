"""NVMe drives and ACS controls out of /sys."""

from __future__ import annotations

import struct
from pathlib import Path

from gpudoctor.collect import bridges
from gpudoctor.collect.files import Files, Notebook
from gpudoctor.model import Gpu, PcieHop


def space(control: int, *, first: int = 0x1) -> bytes:
    """Configuration space with two extended capabilities, ACS the second."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, first | 1 << 16 | 0x150 << 20)
    struct.pack_into("<I", config, 0x150, 0x000D | 1 << 16)
    struct.pack_into("<HH", config, 0x154, 0xFFFF, control)  # the capability says everything could be
    return bytes(config)


def gpu() -> Gpu:
    return Gpu(
        index=0,
        pcie_path=(
            PcieHop(bdf="0000:03:00.0", kind="endpoint"),
            PcieHop(bdf="0000:02:00.0", kind="switch-down"),
            PcieHop(bdf="0000:00:01.0", kind="root-port"),
        ),
    )


def port(root: Path, bdf: str, config: bytes) -> None:
    folder = root / "sys/bus/pci/devices" / bdf
    folder.mkdir(parents=True)
    (folder / "config").write_bytes(config)


def test_controls_that_are_on(tmp_path: Path) -> None:
    port(tmp_path, "0000:02:00.0", space(0b0011101))
    port(tmp_path, "0000:00:01.0", space(0))
    notebook = Notebook()
    found = bridges.acs(Files(tmp_path), notebook, (gpu(),))
    assert {acs.bdf: acs.on for acs in found} == {
        "0000:02:00.0": ("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"),
        "0000:00:01.0": (),
    }
    assert notebook.gaps == []


def test_without_root_it_is_unknown_and_not_off(tmp_path: Path) -> None:
    port(tmp_path, "0000:02:00.0", space(0)[:64])
    notebook = Notebook()
    assert bridges.acs(Files(tmp_path), notebook, (gpu(),)) == ()
    assert [(gap.path, gap.reason) for gap in notebook.gaps] == [("acs", "no permission")]


def test_damaged_space(tmp_path: Path) -> None:
    loop = bytearray(4096)
    struct.pack_into("<I", loop, 0x100, 0x1 | 1 << 16 | 0x100 << 20)  # points at itself
    assert bridges.control_bits(bytes(loop)) is None
    assert bridges.control_bits(bytes(4096)) is None
    assert bridges.control_bits(b"") is None


def test_drives(tmp_path: Path) -> None:
    device = tmp_path / "sys/devices/pci0000:00/0000:00:02.0/0000:05:00.0"
    (device / "nvme/nvme0").mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    bus = tmp_path / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    (bus / "0000:05:00.0").symlink_to(device)
    kind = tmp_path / "sys/class/nvme"
    kind.mkdir(parents=True)
    (kind / "nvme0").symlink_to(device / "nvme/nvme0")
    (device / "nvme/nvme0/device").symlink_to(device)
    (drive,) = bridges.drives(Files(tmp_path))
    assert (drive.name, drive.bdf, drive.root, drive.numa_node) == ("nvme0", "0000:05:00.0", "pci0000:00", 1)
