"""What a link can carry at most: formulas, no measurements.

Rates are GB/s (1e9 bytes per second), one direction, after line coding and before packet headers: no copy can
be faster, and a healthy one reaches about 80-90 % of it (packet headers, flow control).
"""

from __future__ import annotations

import re

# Transfer rate in GT/s per lane and the share of bits that carry data: PCI-SIG, "PCI Express Base Specification"
# 1.1 (2.5 GT/s, 8b/10b), 2.1 (5 GT/s, 8b/10b), 3.1 / 4.0 / 5.0 (8 / 16 / 32 GT/s, 128b/130b) and 6.0 / 7.0
# (64 / 128 GT/s, PAM4 in 256-byte flits of which 242 bytes are packets).
_PCIE: dict[int, tuple[float, float]] = {
    1: (2.5, 8 / 10),
    2: (5.0, 8 / 10),
    3: (8.0, 128 / 130),
    4: (16.0, 128 / 130),
    5: (32.0, 128 / 130),
    6: (64.0, 242 / 256),
    7: (128.0, 242 / 256),
}
PCIE_GENERATIONS = tuple(_PCIE)
PCIE_WIDTHS = (1, 2, 4, 8, 12, 16, 32)  # link widths that the specification knows

# One link, one direction: NVIDIA's both-way figures halved (P100 160, V100 300, A100 600, H100 900, B200 1800 GB/s
# for 4, 6, 12, 18, 18 links), as tabled in
# https://github.com/stas00/ml-engineering/blob/master/network/README.md. Version 6 is the figure announced for Rubin.
_NVLINK_GB_S: dict[int, float] = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0, 6: 50.0}

# NVLink between a Grace CPU and its GPU (C2C), one direction; same source.
NVLINK_C2C_GB_S = 450.0


def pcie_gb_s(generation: int, width: int) -> float:
    """Upper limit of a PCIe link of `generation` (1-7) and `width` lanes, GB/s one way after line coding.

    Raises ValueError for a generation or width that the specification does not know.
    """
    if generation not in _PCIE:
        raise ValueError(f"PCIe generation {generation} is unknown")
    if width not in PCIE_WIDTHS:
        raise ValueError(f"a PCIe link of {width} lanes is unknown")
    rate, payload = _PCIE[generation]
    return rate * width * payload / 8


def pcie_generation(speed: str) -> int | None:
    """The generation of a speed as the kernel and lspci write it, such as ``32.0 GT/s PCIe``; None if unknown."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*GT/s", speed)
    if match is None:
        return None
    rate = float(match[1])
    return next((generation for generation, (known, _) in _PCIE.items() if known == rate), None)


def nvlink_gb_s(version: int, links: int = 1) -> float:
    """Upper limit of `links` bonded NVLinks of `version` (1-6), GB/s one way; ValueError for an unknown version."""
    if version not in _NVLINK_GB_S:
        raise ValueError(f"NVLink version {version} is unknown")
    if links < 0:
        raise ValueError(f"{links} NVLinks is no count")
    return _NVLINK_GB_S[version] * links
