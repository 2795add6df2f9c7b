"""Link theory against published tables."""

from __future__ import annotations

import pytest

from gpudoctor.estimate import nvlink_gb_s, pcie_gb_s, pcie_generation

# One way, GB/s, as tabled by https://fridayswithfaraday.com/posts/gpu-hw-pcie-gen5-bandwidth-bottleneck (x16) and,
# for the rest, GT/s x lanes x line code worked out by hand.
TABLE = [
    (1, 1, 0.25),
    (1, 16, 4.0),
    (2, 4, 2.0),
    (3, 1, 0.98),
    (3, 8, 7.88),
    (3, 16, 15.75),
    (4, 4, 7.88),
    (4, 16, 31.51),
    (5, 8, 31.51),
    (5, 16, 63.02),
    (6, 16, 121.0),
    (7, 16, 242.0),
]


@pytest.mark.parametrize(("generation", "width", "gb_s"), TABLE)
def test_pcie_theory(generation: int, width: int, gb_s: float) -> None:
    assert pcie_gb_s(generation, width) == pytest.approx(gb_s, abs=0.006)


@pytest.mark.parametrize(("generation", "width"), [(0, 16), (8, 16), (4, 0), (4, 3), (4, -1)])
def test_unknown_links_are_refused(generation: int, width: int) -> None:
    with pytest.raises(ValueError, match="unknown"):
        pcie_gb_s(generation, width)


@pytest.mark.parametrize(
    ("text", "generation"),
    [
        ("2.5 GT/s PCIe", 1),
        ("5.0 GT/s PCIe", 2),
        ("8GT/s", 3),
        ("16.0 GT/s PCIe", 4),
        ("32.0 GT/s PCIe", 5),
        ("64.0 GT/s PCIe", 6),
        ("Unknown", None),
        ("", None),
        ("9.9 GT/s", None),
    ],
)
def test_generation_of_a_speed(text: str, generation: int | None) -> None:
    assert pcie_generation(text) == generation


@pytest.mark.parametrize(
    ("version", "links", "gb_s"), [(1, 4, 80), (2, 6, 150), (3, 12, 300), (4, 18, 450), (5, 18, 900)]
)
def test_nvlink_theory(version: int, links: int, gb_s: float) -> None:
    assert nvlink_gb_s(version, links) == gb_s


def test_unknown_nvlink_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        nvlink_gb_s(9)
    with pytest.raises(ValueError, match="count"):
        nvlink_gb_s(4, -1)
