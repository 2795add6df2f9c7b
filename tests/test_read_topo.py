"""nvidia-smi topo -m text: real pastes with their damage, and damage of our own."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpudoctor.model import Case
from gpudoctor.read import ReadResult, identify, read_artifacts
from gpudoctor.read.cpulist import parse_list
from gpudoctor.read.matrix import read_matrices
from gpudoctor.read.smi_topo import Topology, build_case, read_topologies

FOLDER = Path(__file__).parent / "artifacts" / "topo"
EXPECTED: list[dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
TEXTS = {entry["file"]: (FOLDER / entry["file"]).read_text() for entry in EXPECTED}
CLOSENESS = ("PIX", "PXB", "PHB", "NODE", "SYS")


def read(text: str) -> Case:
    (topology,), _, _ = read_topologies(text, "paste")
    return build_case(topology)


@pytest.mark.parametrize("entry", EXPECTED, ids=lambda entry: entry["file"].removesuffix(".txt"))
def test_real_pastes(entry: dict[str, Any]) -> None:
    path = str(FOLDER / entry["file"])
    result = read_artifacts([path])
    assert result.errors == ()
    (case,) = result.cases
    assert (result.artifacts[0].kind, result.artifacts[0].file) == ("nvidia-smi-topo", path)
    assert [gpu.index for gpu in case.gpus] == list(range(entry["gpu_count"]))
    counts: dict[str, int] = {}
    for pair in case.pairs:
        if pair.b.startswith("gpu:"):
            word = f"NV{pair.nvlinks}" if pair.nvlinks else str(pair.path)
            counts[word] = counts.get(word, 0) + 1
    assert counts == entry["gpu_pairs"]
    for label, text in entry["cpu_affinity"].items():
        assert case.gpus[int(label[3:])].local_cpus == (() if text == "" else parse_list(text))
    for label, text in entry["numa_affinity"].items():
        gpu = case.gpus[int(label[3:])]
        assert gpu.numa_nodes == (parse_list(text) or ())
        assert gpu.numa_node == (int(text) if text.isdigit() else None)
    for label, text in entry["gpu_numa_id"].items():
        assert case.gpus[int(label[3:])].memory_node == (int(text) if text.isdigit() else None)
    assert [nic.name for nic in case.nics] == entry["nics"]
    for label, names in entry["closest_nics"].items():
        near = {
            pair.b[4:]: CLOSENESS.index(pair.path or "")
            for pair in case.pairs
            if pair.a == f"gpu:{label[3:]}" and pair.b.startswith("nic:")
        }
        assert sorted(name for name, rank in near.items() if rank == min(near.values())) == sorted(names)


def test_every_unknown_has_a_gap_and_every_fact_a_line() -> None:
    text = TEXTS["k8s53497-8gpu-trailing-blanks.txt"]
    case = read(text)
    lines = text.split("\n")
    shown = {source.path: source for source in case.sources}
    assert lines[(shown["gpus[4].local_cpus"].line or 0) - 1].startswith("GPU4")
    assert shown["gpus[4].local_cpus"].origin == "paste"
    for gpu in case.gpus:
        for fact in ("local_cpus", "numa_node", "pcie", "name"):
            path = f"gpus[{gpu.index}].{fact}"
            assert (getattr(gpu, fact) is None) == (path not in shown)
            assert path in shown or case.gap(path) is not None
    gap = case.gap("gpus[5].local_cpus")
    assert gap is not None
    assert gap.reason == "truncated"  # the row is cut off; the column is there
    gap = case.gap("gpus[0].numa_node")
    assert gap is not None
    assert gap.reason == "not in this artifact"  # an old driver without the column
    assert case.gap("pairs[gpu:5,gpu:6].path") is not None


def test_empty_affinity_is_a_fact_on_linux_only() -> None:
    text = TEXTS["h100-4gpu-cpuset-excludes-node1.txt"]
    assert [gpu.local_cpus for gpu in read(text).gpus][1:] == [(), (), ()]
    head = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    rows = "GPU0\t X \tPHB\t\t\t\tN/A\nGPU1\tPHB\t X \t\t\t\tN/A\n"
    case = read(head + rows)
    assert [gpu.local_cpus for gpu in case.gpus] == [None, None]
    assert case.gap("gpus[0].local_cpus") is not None
    case = read("PS C:\\Users\\a> nvidia-smi topo -m\n" + head + rows)
    assert (case.host.os, case.gpus[0].local_cpus) == ("windows", None)


def test_column_that_does_not_exist_is_unknown_not_empty() -> None:
    case = read("\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n")
    assert [gpu.local_cpus for gpu in case.gpus] == [None, None]
    gap = case.gap("gpus[0].local_cpus")
    assert gap is not None
    assert gap.reason == "not in this artifact"


HEAD = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
ROWS = "GPU0\t X \tSYS\tPIX\t0-7\t0\t\tN/A\nGPU1\tSYS\t X \tSYS\t8-15\t1\t\tN/A\nNIC0\tPIX\tSYS\t X \t\t\t\t\n"
LEGEND = "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
PLAIN = read(HEAD + ROWS + LEGEND)


@pytest.mark.parametrize(
    "text",
    [
        (HEAD + ROWS + LEGEND).lstrip("\t"),
        "GPU0GPU1NIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n" + ROWS + LEGEND,
        HEAD.replace("\tGPU0", "\t\x1b[4mGPU0").replace("ID\n", "ID\x1b[0m\n") + ROWS + LEGEND,
        HEAD.replace("\tGPU0", "\t[4mGPU0").replace("ID\n", "ID[0m\n") + ROWS + LEGEND,
        HEAD + ROWS.replace("SYS\tPIX", "SYSPIX").replace("X \tSYS", "XSYS") + LEGEND,
        HEAD + ROWS.replace("PIX\t0-7", "PI0-7").replace("SYS\t8-15", "SYS8-15") + LEGEND,
        (HEAD + ROWS + LEGEND).expandtabs(8),
        (HEAD + ROWS + LEGEND).replace("\n", "      \r\n"),
        re.sub(r"[ \t]+", " ", HEAD + ROWS + LEGEND),
        "```\n$ nvidia-smi topo -m" + HEAD + ROWS + LEGEND + "```\n",
        "".join(f"> {line}\n" for line in (HEAD + ROWS + LEGEND).split("\n")),
        "".join(f"2025-05-21 09:40:05 node-a {line}\n" for line in (HEAD + ROWS + LEGEND).split("\n")),
        (HEAD + ROWS + LEGEND).replace("\t", "\\t"),
        "| | GPU0 | GPU1 | NIC0 | CPU Affinity | NUMA Affinity | GPU NUMA ID |\n|---|---|---|---|---|---|---|\n"
        "| GPU0 | X | SYS | PIX | 0-7 | 0 | N/A |\n| GPU1 | SYS | X | SYS | 8-15 | 1 | N/A |\n"
        "| NIC0 | PIX | SYS | X | | | |\n" + LEGEND,
        ROWS + LEGEND + HEAD,
        HEAD + ROWS + LEGEND + HEAD + ROWS + LEGEND,
        HEAD + ROWS.replace("SYS\t8-15", "SYS\n8-15") + LEGEND,
    ],
)
def test_damage_that_hides_nothing(text: str) -> None:
    topologies, _, _ = read_topologies(text, "paste")
    for topology in topologies:
        case = build_case(topology)
        assert (case.gpus, case.pairs, case.nics) == (PLAIN.gpus, PLAIN.pairs, PLAIN.nics)
        assert case.conflicts == ()
    assert topologies


def test_lost_tab_after_the_cpu_list_gives_no_wrong_list() -> None:
    case = read(HEAD + ROWS.replace("0-7\t0", "0-70") + LEGEND)
    assert case.gpus[0].local_cpus is None
    assert case.gpus[1].local_cpus == tuple(range(8, 16))
    assert read(HEAD + ROWS.replace("X \tSYS\tPIX\t0-7", "X \tSYS\tNV180-7") + LEGEND).gpus[0].local_cpus is None


def test_text_that_contradicts_itself_gives_no_fact() -> None:
    case = read(HEAD + ROWS.replace("GPU1\tSYS", "GPU1\tPIX") + LEGEND)
    pair = next(pair for pair in case.pairs if (pair.a, pair.b) == ("gpu:0", "gpu:1"))
    assert pair.path is None
    (conflict,) = case.conflicts
    assert conflict.path == "pairs[gpu:0,gpu:1].path"
    assert {value.value for value in conflict.values} == {"SYS", "PIX"}
    assert case.gap("pairs[gpu:0,gpu:1].path") is not None


def test_row_whose_own_column_does_not_hold_the_x_is_dropped() -> None:
    case = read(HEAD + ROWS.replace("GPU0\t X \tSYS", "GPU0\tSYS\t X ") + LEGEND)
    assert case.gpus[0].local_cpus is None


def test_header_that_was_cut_off() -> None:
    case = read(ROWS)
    assert len(case.gpus) == 2
    assert case.pairs[0].path == "SYS"
    assert case.gpus[0].local_cpus is None  # which column is which was in the header


@pytest.mark.parametrize(
    "text",
    [
        " \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n",  # topo -p2p: same labels, another meaning
        "GPU0 and GPU1 are slow\nGPU0 X\n",
        HEAD,
        "NVIDIA-SMI has failed\n",
        "",
    ],
)
def test_what_is_no_matrix(text: str) -> None:
    assert read_matrices(text).found == []
    assert identify(text) == ("nvidia-smi-topo-p2p" if "CNS" in text else "unknown")


def test_two_machines_in_one_text_stay_apart() -> None:
    other = HEAD + ROWS.replace("PIX", "NODE") + LEGEND
    topologies, _, _ = read_topologies(HEAD + ROWS + LEGEND + other, "paste")
    assert [build_case(topology).pairs[1].path for topology in topologies] == ["PIX", "NODE"]


def _facts(topology: Topology) -> dict[str, object]:
    """Facts with NICs named by position: a cut text may lack their names."""
    names = {f"nic:{name}": f"nic:{place}" for place, name in enumerate(topology.nics)}
    facts: dict[str, object] = {}
    for path in topology.facts:
        value = topology.value(path)
        if value is not None:
            plain = re.sub(r"nic:[^,\]]+", lambda match: names[match[0]], path)
            facts[plain] = parse_list(value) or value
    return facts


def _check_subset(text: str, damaged: str) -> None:
    (whole,), _, _ = read_topologies(text, "paste")
    known = _facts(whole)
    topologies, lines, not_understood = read_topologies(damaged, "paste")
    assert 0 <= not_understood <= lines
    for topology in topologies:
        build_case(topology)
        assert len(topology.gpus) <= len(whole.gpus)
        assert len(topology.nics) <= len(whole.nics)
        for path, value in _facts(topology).items():
            assert known.get(path) == value, path


@settings(deadline=None, max_examples=150)
@given(name=st.sampled_from(sorted(TEXTS)), share=st.floats(0, 1))
def test_truncated_text_gives_a_part_of_the_facts(name: str, share: float) -> None:
    text = TEXTS[name]
    _check_subset(text, text[: int(len(text) * share)])


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(sorted(TEXTS)),
    how=st.sampled_from(["shuffle", "drop lines", "drop tabs", "blanks", "screen edge"]),
    seed=st.integers(0, 2**32),
)
def test_damaged_text_gives_no_wrong_fact(name: str, how: str, seed: int) -> None:
    text = TEXTS[name]
    draw = random.Random(seed)
    lines = text.split("\n")
    if how == "shuffle":
        draw.shuffle(lines)
    elif how == "drop lines":
        lines = [line for line in lines if draw.random() > 0.2]
    elif how == "drop tabs":
        lines = ["".join(c for c in line if c != "\t" or draw.random() > 0.05) for line in lines]
    elif how == "blanks":
        lines = [line.replace("\t", " " * draw.randint(1, 4)) for line in lines]
    elif any("=" in line for line in lines):  # the edge can be seen only where the legend was cut too
        edge = draw.randint(30, 60)
        lines = [line[:edge] for line in lines]
    _check_subset(text, "\n".join(lines))


@settings(deadline=None, max_examples=200)
@example(name="h100-4gpu-cpuset-excludes-node1.txt", place=0.0078125, garbage="G")  # GPU0G is neither GPU nor NIC
@given(
    name=st.sampled_from(sorted(TEXTS)),
    place=st.floats(0, 1),
    garbage=st.text(alphabet=st.sampled_from("GPUNIXSYV0123456789 \t\n|-,:=[4m\x1b\x00mlx5_"), max_size=12),
)
def test_garbage_never_raises(name: str, place: float, garbage: str) -> None:
    text = TEXTS[name]
    at = int(len(text) * place)
    topologies, lines, not_understood = read_topologies(text[:at] + garbage + text[at:], "paste")
    assert 0 <= not_understood <= lines
    for topology in topologies:
        build_case(topology)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=300))
def test_any_text_is_identified_without_raising(text: str) -> None:
    assert identify(text, "x.json") in ("case", "nvidia-smi-topo", "unknown")


def test_read_result_is_plain_for_no_input() -> None:
    assert read_artifacts([]) == ReadResult()
