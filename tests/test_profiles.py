"""The profile files: every number has a source, none is above what physics allows; and what code makes of them."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpudoctor import profiles
from gpudoctor.errors import GpudoctorError
from gpudoctor.estimate.link import NVLINK_C2C_GB_S, nvlink_gb_s, pcie_gb_s
from gpudoctor.model import Case, Gpu, PcieHop, PcieLink
from gpudoctor.rules import all_rules

SOURCE = re.compile(r"https://\S+|ours|derived: |docstring of |public repository file")


def link(generation: int | None, width: int | None, **more: Any) -> PcieLink:
    return PcieLink(max_generation=generation, max_width=width, **more)


def test_every_limit_has_unit_and_source_and_a_rule() -> None:
    codes = {module.RULE.code for module in all_rules()}
    for code, limits in profiles.load("thresholds").items():
        assert code in codes
        for name, entry in limits.items():
            assert set(entry) == {"value", "unit", "source"}, f"{code}.{name}"
            assert isinstance(entry["value"], (int, float))
            assert math.isfinite(entry["value"])
            assert entry["unit"]
            assert SOURCE.search(entry["source"]), f"{code}.{name}: {entry['source']}"
            if "share" in name:
                assert 0 < entry["value"] < 1
    assert profiles.thresholds()["CTR001"]["default_shm_bytes"] == 64 * 2**20
    assert profiles.threshold_sources()["LDR023"]["factor"].startswith("2 x (ours: ")


FIGURE = {"metric", "value", "kind", "conditions", "source"}
PLACE = {"generation", "width", "nvlinks", "c2c"}
OF_LINKS = ("h2d", "d2h", "h2d_while_d2h", "d2h_while_h2d", "p2p_write", "p2p_read")


def theory(gpu: dict[str, Any], figure: dict[str, Any]) -> float:
    """What physics allows for a figure, GB/s one way, bytes counted once."""
    if figure["metric"] == "d2d":
        return float(gpu.get("memory_gb_s", math.inf)) / 2 * 1.01  # caches carry a little
    if "nvlinks" in figure:
        version, links = gpu["nvlink"]
        assert figure["nvlinks"] <= links
        return nvlink_gb_s(version, figure["nvlinks"])
    return NVLINK_C2C_GB_S if figure.get("c2c") else pcie_gb_s(figure["generation"], figure["width"])


def test_every_figure_of_a_gpu_has_a_source_and_is_below_theory() -> None:
    count = 0
    for gpu in profiles.load("gpus")["gpu"]:
        assert {"name", "match", "figures"} <= set(gpu)
        assert set(gpu) <= {"name", "match", "figures", "link", "memory_gb_s", "nvlink", "source"}
        assert SOURCE.search(gpu.get("source", "")) or not set(gpu) & {"link", "memory_gb_s", "nvlink"} - {"link"}
        re.compile(gpu["match"])
        for figure in gpu["figures"]:
            count += 1
            assert set(figure) >= FIGURE
            assert set(figure) <= FIGURE | PLACE
            assert figure["metric"] in (*OF_LINKS, "d2d")
            assert figure["kind"] in ("measured", "threshold")
            assert figure["conditions"]
            assert SOURCE.search(figure["source"])
            if figure["metric"] in ("h2d", "d2h") and "generation" in figure:
                # A healthy large copy reaches 75 to 92 % of the link; a pass limit lies lower.
                low = 0.7 if figure["kind"] == "measured" else 0.5
                assert low < figure["value"] / theory(gpu, figure) < 0.92, (gpu["name"], figure)
            assert 0 < figure["value"] < theory(gpu, figure), (gpu["name"], figure)
    assert count >= 45


def test_no_limit_is_above_what_was_measured() -> None:
    """A threshold that healthy machines miss is no threshold."""
    for gpu in profiles.load("gpus")["gpu"]:
        for limit in (figure for figure in gpu["figures"] if figure["kind"] == "threshold"):
            place = {name: limit.get(name) for name in ("metric", *PLACE)}
            seen = [
                figure["value"]
                for figure in gpu["figures"]
                if figure["kind"] == "measured" and {name: figure.get(name) for name in place} == place
            ]
            assert all(value > limit["value"] for value in seen), (gpu["name"], limit)


def test_link_classes_agree_with_link_theory() -> None:
    seen = []
    for entry in profiles.load("platforms")["pcie"]:
        seen.append(entry["generation"])
        assert entry["lane_gb_s"] == pytest.approx(pcie_gb_s(entry["generation"], 1), rel=1e-4)
        assert SOURCE.search(entry["source"])
        for metric in (*OF_LINKS[:4], "p2p", "p2p_far"):
            ratio = entry[metric]
            assert 0.3 < ratio["low"] < ratio["high"] < 0.95
            assert SOURCE.search(ratio["source"])
    assert seen == [1, 2, 3, 4, 5, 6]
    for entry in profiles.load("platforms")["nvlink"]:
        assert entry["link_gb_s"] == nvlink_gb_s(entry["version"])
        assert 0.8 < entry["ce"]["low"] < entry["ce"]["high"] < 1
        assert SOURCE.search(entry["source"])
        assert SOURCE.search(entry["ce"]["source"])
    assert profiles.load("platforms")["c2c"]["link_gb_s"] == NVLINK_C2C_GB_S


@pytest.mark.parametrize("metric", [*OF_LINKS[:4], "p2p", "p2p_far"])
def test_expectations_grow_with_generation_and_width(metric: str) -> None:
    def low(generation: int, width: int) -> float:
        expected = profiles.of_link(generation, width, metric)
        assert expected is not None
        return expected.low

    for generation in range(1, 7):
        rates = [low(generation, width) for width in (1, 2, 4, 8, 16)]
        assert rates == sorted(set(rates))
    for width in (1, 4, 16):
        one_way = metric in ("h2d", "d2h", "p2p")
        rates = [low(generation, width) for generation in range(1, 7)]
        # both ways and across sockets the hosts of one generation differ more than the generations do
        assert rates == sorted(set(rates)) if one_way else rates[-1] > rates[0]


def test_collectives_name_their_message_size_and_ranks() -> None:
    figures = profiles.load("platforms")["collective"]
    for figure in figures:
        assert figure["bytes"] > 0
        assert figure["gpus"] > 1
        assert figure["metric"].endswith(".busbw")
        assert SOURCE.search(figure["source"])
        # a switch that reduces may exceed the wire
        assert figure["value"] < 1.15 * figure["link_gb_s"]
    names = {(figure["name"], figure["metric"]) for figure in figures if figure["kind"] == "measured"}
    for name in names:
        sizes = sorted(
            (figure["bytes"], figure["value"])
            for figure in figures
            if figure["kind"] == "measured" and (figure["name"], figure["metric"]) == name
        )
        by_size: dict[int, float] = {}
        for size, value in sizes:
            by_size[size] = max(value, by_size.get(size, 0.0))
        assert list(by_size.values()) == sorted(by_size.values()), name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("A100-PCIE-40GB", "A100 PCIe 40 GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla V100-PCIE-32GB", "V100 PCIe 32 GB"),
        ("H200\n", None),
        ("", None),
        (None, None),
    ],
)
def test_whole_names_match(name: str | None, found: str | None) -> None:
    entry = profiles.find_gpu(name)
    assert (entry["name"] if entry else None) == found


def test_measured_figure_comes_first() -> None:
    h200 = Gpu(index=0, name="NVIDIA H200", pcie=link(5, 16))
    expected = profiles.expected_copy(h200, "h2d")
    assert expected is not None
    assert (expected.low, expected.high, expected.basis) == (55.43, 55.51, "measured")
    assert "https://" in expected.source
    other_link = profiles.expected_copy(Gpu(index=0, name="NVIDIA H200", pcie=link(4, 16)), "h2d")
    assert other_link is not None
    assert other_link.basis == "theory"


def test_a_pass_limit_of_others_is_no_expectation() -> None:
    expected = profiles.expected_copy(Gpu(index=0, name="NVIDIA H100 80GB HBM3", pcie=link(5, 16)), "d2h")
    assert expected is not None
    assert expected.basis == "theory"
    assert expected.low > 50


def test_theory_times_ratio_says_so() -> None:
    expected = profiles.expected_copy(Gpu(index=0, name="NVIDIA L4", pcie=link(4, 8)), "h2d")
    assert expected is not None
    assert expected.basis == "theory"
    assert expected.source.startswith("Gen4 x8 theory 15.8 GB/s times 0.78-0.84 (")
    assert 12 < expected.low < (expected.high or 0) < pcie_gb_s(4, 8)


@pytest.mark.parametrize(
    ("gpu", "best"),
    [
        (Gpu(index=0), None),
        (Gpu(index=0, pcie=PcieLink()), None),
        # idle readings say nothing about speed
        (Gpu(index=0, pcie=PcieLink(generation=1, width=16, state="idle")), None),
        (Gpu(index=0, pcie=PcieLink(generation=4, width=16, state="load")), (4, 16)),
        # what it is now does not lower what it could be
        (Gpu(index=0, pcie=PcieLink(generation=1, width=4, max_generation=4, max_width=16, state="load")), (4, 16)),
        # the slot limits the card
        (Gpu(index=0, pcie=link(5, 16, port_max_generation=4, port_max_width=8)), (4, 8)),
        (Gpu(index=0, pcie=link(9, 16)), None),
    ],
)
def test_best_link(gpu: Gpu, best: tuple[int, int] | None) -> None:
    assert profiles.best_link(gpu) == best
    assert (profiles.expected_copy(gpu, "h2d") is None) == (best is None)


def test_the_slowest_hop_limits_the_way() -> None:
    path = (
        PcieHop(bdf="0000:03:00.0", kind="endpoint", link=link(4, 16)),
        PcieHop(bdf="0000:02:00.0", kind="switch-down"),
        PcieHop(bdf="0000:01:00.0", kind="switch-up", link=link(4, 4)),
    )
    assert profiles.best_link(Gpu(index=0, pcie=link(4, 16), pcie_path=path)) == (4, 4)
    assert profiles.best_link(Gpu(index=0, pcie_path=path)) == (4, 4)


def test_the_card_stands_in_for_a_link_that_nobody_named() -> None:
    expected = profiles.expected_copy(Gpu(index=0, name="NVIDIA GeForce RTX 5090"), "h2d")
    assert expected is not None
    assert expected.low == 56.35
    assert expected.source.endswith("the link is not known, the card's own is taken")


def test_copies_inside_a_gpu_and_over_c2c() -> None:
    local = profiles.expected_copy(Gpu(index=0, name="NVIDIA H200"), "d2d")
    assert local is not None
    assert (local.low, local.high) == (2092.0, 2095.0)
    grace = profiles.expected_copy(Gpu(index=0, name="NVIDIA GH200 480GB", pcie=link(4, 1)), "h2d")
    assert grace is not None
    assert (grace.low, grace.high) == (346, 370.1)
    assert profiles.expected_copy(Gpu(index=0, name="NVIDIA X1"), "d2d") is None


def test_peers() -> None:
    h200 = Gpu(index=0, name="NVIDIA H200", pcie=link(5, 16))
    nvlink = profiles.expected_peer(h200, h200, nvlinks=18, near=True)
    assert nvlink is not None
    assert 365 < nvlink.low < 376 < 396.4 < (nvlink.high or 0) < 450
    near = profiles.expected_peer(h200, Gpu(index=1, pcie=link(4, 8)), nvlinks=0, near=True)
    assert near is not None
    assert near.source.startswith("Gen4 x8")
    assert near.low == pytest.approx(13.1, abs=0.1)
    far = profiles.expected_peer(h200, h200, nvlinks=None, near=False)
    assert far is not None
    assert far.low < 0.7 * pcie_gb_s(5, 16)
    assert profiles.expected_peer(Gpu(index=0), h200, nvlinks=0, near=True) is None
    unknown_version = Gpu(index=0, name="NVIDIA X1")
    assert profiles.expected_peer(unknown_version, unknown_version, nvlinks=4, near=True) is None


def test_collectives() -> None:
    found = profiles.expected_collective("NVIDIA H200", "all_reduce.busbw", gpus=8, size_bytes=2 << 30)
    assert found is not None
    assert found.low == 463.6  # that of 1 GiB: no larger message than ours may raise the bar
    for name, gpus, size in (("NVIDIA H200", 4, 1 << 30), ("NVIDIA H200", 8, 1000), (None, 8, 1 << 30)):
        assert profiles.expected_collective(name, "all_reduce.busbw", gpus=gpus, size_bytes=size) is None


def test_profile_of_a_case() -> None:
    h200 = Gpu(index=0, name="NVIDIA H200", pcie=link(5, 16))
    profile = profiles.for_case(Case(gpus=(h200, Gpu(index=1, lost=True))))
    assert profile.name == "H200 SXM"
    assert {name: profile.figures[name] for name in ("h2d", "d2h", "d2d")} == {
        "h2d": 55.43,
        "d2h": 55.06,
        "d2d": 2092.0,
    }
    assert profile.thresholds == profiles.thresholds()
    mixed = profiles.for_case(Case(gpus=(h200, Gpu(index=1, name="NVIDIA A10"))))
    assert (mixed.name, mixed.figures) == (None, {})
    unknown = profiles.for_case(Case(gpus=(Gpu(index=0, name="NVIDIA X1"),)))
    assert (unknown.name, unknown.figures) == ("NVIDIA X1", {})
    assert profiles.for_case(Case()).thresholds


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package as a wheel lays it out: profiles inside it, under _profiles."""
    package = tmp_path / "site-packages" / "gpudoctor"
    shutil.copytree(profiles.folder(), package / "_profiles")
    monkeypatch.setattr(profiles, "__file__", str(package / "profiles.py"))
    profiles.load.cache_clear()
    yield package
    profiles.load.cache_clear()


def test_folder_in_a_wheel(installed: Path) -> None:
    assert profiles.folder() == installed / "_profiles"
    assert profiles.thresholds()["CTR001"]


def test_broken_installation(installed: Path) -> None:
    (installed / "_profiles" / "gpus.toml").write_text("not = = toml")
    with pytest.raises(GpudoctorError, match=r"gpus\.toml"):
        profiles.find_gpu("NVIDIA H200")
    shutil.rmtree(installed / "_profiles")
    with pytest.raises(GpudoctorError, match="cannot find the profiles"):
        profiles.folder()
