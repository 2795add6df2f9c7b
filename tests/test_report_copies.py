"""Copies of several GPUs, nodes and sizes in text."""

from __future__ import annotations

import pytest

from gpudoctor.model import Measurement, Setting
from gpudoctor.report import copies
from gpudoctor.report.text import Style, columns


def item(metric: str, subject: str, value: float, unit: str = "GB/s", **settings: Setting) -> Measurement:
    return Measurement(metric=metric, subject=subject, value=value, unit=unit, settings=settings)


def pairs(metric: str, gpus: int, slow: tuple[int, int] | None = None) -> list[Measurement]:
    return [
        item(metric, f"gpu:{a}-gpu:{b}", 9.9 if (a, b) == slow else 26.4)
        for a in range(gpus)
        for b in range(gpus)
        if a != b
    ]


def told(items: list[Measurement], width: int | None = None, *, unicode: bool = True) -> str:
    return "\n".join(copies.lines(items, Style(width=width, unicode=unicode)))


def test_matrix_rows_send_and_columns_receive() -> None:
    lines = told(pairs("p2p_write", 3, slow=(2, 0))).splitlines()
    assert lines[0] == "GPU to GPU, written by the source, GB/s, row to column"
    assert lines[1].split() == ["0", "1", "2"]
    assert lines[4].replace("█", "").split() == ["GPU2", "9.90", "26.4", "—"]
    assert "█" in lines[2]
    assert "█" not in lines[4].split("26.4")[0]


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("unicode", [True, False])
def test_sixteen_gpus_fit_in_blocks_with_every_figure(width: int, unicode: bool) -> None:
    text = told(pairs("p2p_read", 16), width, unicode=unicode)
    assert all(columns(line) <= width for line in text.splitlines())
    assert text.count("26.4") == 16 * 15
    assert unicode or text.isascii()


def test_latency_is_best_when_small() -> None:
    items = [item("p2p_latency", "gpu:0-gpu:1", 1.1, "us"), item("p2p_latency", "gpu:1-gpu:0", 12.8, "us")]
    first, second = told(items).splitlines()[2:]
    assert "█" in first
    assert "█" not in second


def test_groups_nodes_curves_checks_and_counters() -> None:
    text = told(
        [
            item("h2d_all", "gpu:0", 13.0, gpus=2, alone=26.0),
            item("h2d_pair_sum", "gpu:0-gpu:1", 26.5, alone=52.0),
            item("h2d_node", "gpu:0", 12.2, node=0, near=True, on_node=1.0),
            item("h2d_node", "gpu:0", 3.8, node=1, near=False, on_node=0.5),
            item("h2d_curve", "gpu:0", 2.0, bytes=4096),
            item("h2d_curve", "gpu:0", 25.0, bytes=1 << 28),
            item("p2p_check", "gpu:0-gpu:1", 1.0, "passed"),
            Measurement(metric="p2p_check", subject="gpu:1-gpu:0", value=0.0, unit="passed", notes=("it hung\x1b",)),
            item("pcie_replays", "gpu:0", 7.0, "count"),
        ]
    )
    for words in (
        "50%",
        "26.5 GB/s together, 52.0 one after the other: they share an uplink",
        "near",
        "50% of the pages there",
        "gpu:0 h2d by size",
        "256 MiB",
        "1 of 2 arrived",
        "gpu:1-gpu:0: it hung\\x1b",
        "pcie_replays grew by 7",
    ):
        assert words in text, words
    assert "\x1b" not in text


def test_quiet_counters_say_so_and_rows_of_one_gpu_are_not_told_here() -> None:
    assert told([item("pcie_replays", "gpu:0", 0.0, "count")]) == (
        "error counters of the links stood still during the copies"
    )
    assert not copies.is_group(item("h2d", "gpu:0", 26.0))
    assert not copies.is_group(item("d2h_while_h2d", "gpu:0", 26.0))
    assert told([]) == ""
