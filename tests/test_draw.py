"""The layout of pictures, and its two back ends: what is inside stays inside, nothing overlaps, nothing is active."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from random import Random

import pytest
import report_samples as samples

from gpudoctor.model import Case, Finding, Gpu, Measurement, Nic, Pair, PcieHop, PcieLink
from gpudoctor.model.facts import Acs, Drive
from gpudoctor.report import render_svg, render_topo
from gpudoctor.report.draw import Drawing, Line, Placed, cut, lay_out, standing, to_text
from gpudoctor.report.svg import clean
from gpudoctor.report.text import Style, columns

NASTY = "<script>alert(1)</script>&\"'\x1b[31m\n\u202e\x00"
SVG = "{http://www.w3.org/2000/svg}"


def random_box(random: Random, depth: int) -> Drawing:
    kinds = ("gpu", "nic", "switch", "numa")
    lines = [Line("x" * random.randrange(1, 40), "plain") for _ in range(random.randrange(0, 4))]
    children = [random_box(random, depth - 1) for _ in range(random.randrange(0, 5))] if depth else []
    label = "uplink 4.0 x16" if random.random() < 0.3 else ""
    return Drawing("t" * random.randrange(1, 30), lines, children, kind=random.choice(kinds), label=label)


def check(one: Placed, room: int) -> None:
    assert one.width <= room
    for line in one.lines:
        assert columns(line.text) <= one.width - 4
    for child in one.children:
        assert child.column >= one.column + 2
        assert child.column + child.width <= one.column + one.width - 1
        assert child.row >= one.row + 1 + len(one.lines)
        assert child.row + child.height <= one.row + one.height - 1
        check(child, one.width)
    for place, first in enumerate(one.children):
        for second in one.children[place + 1 :]:
            apart = (
                first.column + first.width <= second.column
                or second.column + second.width <= first.column
                or first.row + first.height <= second.row
                or second.row + second.height <= first.row
            )
            assert apart


@pytest.mark.parametrize("seed", range(60))
def test_boxes_stay_inside_and_apart(seed: int) -> None:
    random = Random(seed)
    width = random.choice((60, 80, 132, 200))
    picture = lay_out([random_box(random, 3) for _ in range(random.randrange(1, 4))], width)
    assert picture.width <= width
    for one in picture.placed:
        check(one, width)
    for unicode in (True, False):
        lines = to_text(picture, Style(width=width, unicode=unicode))
        assert len(lines) == picture.height
        assert all(columns(line) <= width for line in lines)
        assert unicode or all(line.isascii() for line in lines)


def test_a_picture_in_lines() -> None:
    gpus = [
        Drawing("GPU0", [Line("4.0 x8"), Line("[1] FAIL", "bad")], kind="gpu", tone="bad"),
        Drawing("GPU1", [Line("4.0 x16")], kind="gpu"),
    ]
    switch = Drawing("switch A", [], gpus, kind="switch", label="uplink 4.0 x16")
    node = Drawing("NUMA node 0", [Line("CPUs 0-7")], [switch], kind="numa")
    told = "\n".join(to_text(lay_out([node], 60), Style(width=60))) + "\n"
    assert told.startswith("┌─ NUMA node 0 ─")
    assert "┏━ GPU0 ━" in told
    assert "┃ [1] FAIL" in told
    assert "─ uplink 4.0 x16 ─" in told
    painted = "\n".join(to_text(lay_out([node], 60), Style(width=60, color=True)))
    assert "\x1b[31;1m[1] FAIL\x1b[0m" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) + "\n" == told
    ascii_only = "\n".join(to_text(lay_out([node], 60), Style(width=60, unicode=False)))
    assert "#= GPU0 =" in ascii_only


def test_a_small_box_beside_a_tall_one_stays_small() -> None:
    tall = Drawing("bridge", children=[Drawing("GPU0", [Line("one"), Line("two"), Line("three")], kind="gpu")])
    picture = lay_out([tall, Drawing("NIC", kind="nic"), Drawing("NIC", [Line("400 Gb/s")], kind="nic")], 80)
    assert [one.height for one in picture.placed] == [7, 3, 3]


def test_wide_and_combining_characters_keep_the_border() -> None:
    picture = lay_out([Drawing("机器", [Line("e\u0301a 机"), Line("plain")])], 40)
    lines = to_text(picture, Style(width=40))
    assert {columns(line) for line in lines} == {picture.width}


def test_cut_and_standing() -> None:
    assert cut("abcdef", 10) == "abcdef"
    assert cut("abcdefgh", 5) == "abc.."
    assert (standing(26.3, 26.4), standing(13.2, 26.4), standing(6.0, 26.4), standing(1.0, 0.0)) == (1.0, 0.0, 0.0, 0.0)


def test_clean_drops_what_xml_does_not_know() -> None:
    assert clean("a\x00b\x1b\ufffe") == "a?b??"


def machine() -> Case:
    """Two GPUs at one switch and one whose name is hostile, with rates, ACS, a drive and another CUDA order."""
    narrow = PcieLink(generation=4, width=8, max_generation=4, max_width=16, port_max_width=16, state="load")
    full = PcieLink(generation=4, width=16, max_generation=4, max_width=16, state="load")
    uplink = PcieLink(generation=2, width=16, max_generation=4, max_width=16, state="load")
    gpus = []
    for index, link in enumerate((narrow, full, full)):
        bdf = f"0000:0{index + 3}:00.0"
        hops = (
            PcieHop(bdf=bdf, kind="endpoint", link=link),
            PcieHop(bdf=f"0000:02:0{index}.0", kind="switch-down"),
            PcieHop(bdf="0000:01:00.0", kind="switch-up", link=uplink),
        )
        gpus.append(
            Gpu(
                index=index,
                cuda_index=2 - index,
                name=NASTY if index == 2 else "NVIDIA L40S",
                bdf=bdf,
                pcie=link,
                pcie_path=hops,
                root="pci0000:00",
                numa_node=0,
            )
        )
    items = tuple(
        Measurement(metric="p2p_write", subject=f"gpu:{a}-gpu:{b}", value=26.4 - 10 * (a == 2), unit="GB/s")
        for a in range(3)
        for b in range(3)
        if a != b
    )
    return Case(
        gpus=tuple(gpus),
        nics=(Nic(name="mlx5_<0>", root="pci0000:00", numa_node=0),),
        drives=(Drive(name="nvme0", bdf="0000:09:00.0", root="pci0000:00"),),
        acs=(Acs(bdf="0000:01:00.0", on=("ReqRedir",)),),
        pairs=(Pair(a="gpu:0", b="gpu:1", path="PIX", p2p_read="OK"),),
        measurements=(*items, Measurement(metric="h2d", subject="gpu:0", value=13.1, unit="GB/s")),
    )


FINDINGS = (
    Finding(rule="PCI001", name="link-width-below-max", severity="error", subject="gpu:0", message=NASTY),
    Finding(rule="P2P005", name="p2p-slower-than-staged", severity="warning", subject="gpu:0-gpu:1", message="slow"),
    Finding(rule="NUM001", name="gpus-span-numa-nodes", severity="info", subject="host", message="two nodes"),
)


def test_picture_tells_links_rates_faults_and_orders() -> None:
    told = render_topo(machine(), matrix=False, width=100, unicode=True, color=False, findings=FINDINGS, boxes=True)
    for words in (
        "PCIe 4.0 x8, 4.0 x16 possible",
        "H2D 13.1 GB/s",
        "[1] FAIL PCI001",
        "[2] WARN P2P005 with GPU1",
        "[2] WARN P2P005 with GPU0",
        "uplink 2.0 x16 of 4.0 x16",
        "ACS redirects peer traffic",
        "NVMe nvme0",
        "CUDA calls it 2",
        "CUDA's order is not the bus order: 0=GPU2 1=GPU1 2=GPU0",
        "P2P OK for every pair",
    ):
        assert words in told, words
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert "[3]" not in told  # an info about the host marks no device


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_pictures_fit_the_terminal(width: int, unicode: bool) -> None:
    for case in (machine(), samples.faulty_machine()):
        told = render_topo(
            case, matrix=False, width=width, unicode=unicode, color=False, findings=samples.findings(), boxes=True
        )
        assert all(columns(line) <= width for line in told.splitlines())
        assert unicode or told.isascii()


def test_svg_is_xml_without_script_or_outside_address() -> None:
    text = render_svg(machine(), FINDINGS)
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "title", "style", "rect", "text", "g"}
    for element in root.iter():
        for name in element.attrib:
            assert not name.lower().startswith("on")
            assert "href" not in name
    addresses = re.findall(r"(?:https?:|//|data:|url\(|@import)[^\s\"']*", text)
    assert addresses in (["http://www.w3.org/2000/svg"], ["//www.w3.org/2000/svg"]), addresses
    assert "<script" not in text
    shown = "".join(element.text or "" for element in root.iter(f"{SVG}text"))
    assert "<script>alert(1)</script>" in shown  # as text, escaped
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", text)


def test_svg_and_terminal_show_the_same_boxes() -> None:
    text = render_svg(samples.faulty_machine(), samples.findings())
    root = ET.fromstring(text)
    titles = [element.text for element in root.iter(f"{SVG}text") if element.get("class") == "strong"]
    drawn = render_topo(
        samples.faulty_machine(),
        matrix=False,
        width=132,
        unicode=True,
        color=False,
        findings=samples.findings(),
        boxes=True,
    )
    for title in titles:
        assert (title or "").replace("\u00a0", " ") in drawn
    boxes = [element for element in root.iter(f"{SVG}rect") if (element.get("class") or "").startswith("gpu")]
    assert len(boxes) == 8
    assert sum("is-bad" in (box.get("class") or "") for box in boxes) == 2  # the narrow link and the lost GPU


def test_heat_map_of_pairs() -> None:
    root = ET.fromstring(render_svg(machine(), ()))
    heat = [element for element in root.iter(f"{SVG}g") if element.get("class") == "heat"]
    assert len(heat) == 1
    squares = list(heat[0].iter(f"{SVG}rect"))
    assert len(squares) == 6
    assert len({square.get("style") for square in squares}) == 2  # the slow row has a colour of its own


def test_no_devices_no_picture() -> None:
    assert render_topo(Case(), matrix=False, width=80, unicode=True, color=False, boxes=True) == ""
    ET.fromstring(render_svg(Case(), ()))
