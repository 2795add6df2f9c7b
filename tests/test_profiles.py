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
from gpudoctor.estimate.link import pcie_gb_s
from gpudoctor.model import Case, Gpu, PcieHop, PcieLink
from gpudoctor.rules import all_rules

SOURCE = re.compile(r"https://\S+|ours|derived: |docstring of ")


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


def test_every_figure_has_a_source_and_is_below_theory() -> None:
    count = 0
    for gpu in profiles.load("gpus")["gpu"]:
        assert set(gpu) == {"name", "match", "figures"}
        re.compile(gpu["match"])
        for figure in gpu["figures"]:
            count += 1
            assert set(figure) == {"metric", "generation", "width", "value", "kind", "conditions", "source"}
            assert figure["metric"] in ("h2d", "d2h")
            assert figure["kind"] in ("measured", "threshold")
            assert figure["conditions"]
            assert SOURCE.search(figure["source"])
            limit = pcie_gb_s(figure["generation"], figure["width"])
            # A healthy large copy reaches 75 to 92 % of the link.
            assert 0.7 * limit < figure["value"] < 0.92 * limit, (gpu["name"], figure)
    assert count >= 15


def test_link_classes_agree_with_link_theory() -> None:
    seen = []
    for entry in profiles.load("platforms")["pcie"]:
        seen.append(entry["generation"])
        assert entry["lane_gb_s"] == pytest.approx(pcie_gb_s(entry["generation"], 1), rel=1e-4)
        assert SOURCE.search(entry["source"])
        for metric in ("h2d", "d2h"):
            ratio = entry[metric]
            assert 0.5 < ratio["low"] < ratio["high"] < 0.95
            assert SOURCE.search(ratio["source"])
    assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("A100-PCIE-40GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", None),
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


def test_profile_of_a_case() -> None:
    h200 = Gpu(index=0, name="NVIDIA H200", pcie=link(5, 16))
    profile = profiles.for_case(Case(gpus=(h200, Gpu(index=1, lost=True))))
    assert profile.name == "H200 SXM"
    assert profile.figures == {"h2d": 55.43, "d2h": 55.06}
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
