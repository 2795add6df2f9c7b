"""Scaling: the command by count of ranks, the slow rank and its cause named, the table as people see it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from gpudoctor import codec, observe
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import (
    Communication,
    Scaling,
    ScalingRank,
    ScalingRow,
    Step,
    Watched,
    WatchedLoader,
    WatchPlan,
    WatchRecord,
)
from gpudoctor.report.scaling import scaling as table
from gpudoctor.report.text import Style
from gpudoctor.tune import scaling
from gpudoctor.tune.proof import training_records
from gpudoctor.tune.rank_commands import with_ranks
from gpudoctor.tune.sandbox import Sandbox

SLOW_RANK = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.set_num_threads(1)
dist.init_process_group("gloo")
SLOW = dist.get_rank() == 1

class Rows(Dataset):
    def __len__(self):
        return 8 * 40 * dist.get_world_size()
    def __getitem__(self, index):
        row = torch.randn(64, generator=torch.Generator().manual_seed(index))
        for _ in range(400 if SLOW else 1):
            row = torch.sort(row).values
        return row, index % 2

data = Rows()
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def run(folder: Path, text: str, *counts: int) -> Scaling:
    (folder / "train.py").write_text(text)
    found, last = scaling.scale(
        [sys.executable, "train.py"],
        counts,
        cwd=folder,
        sandbox=Sandbox(folder, None, "a test"),
        budget_s=600,
        steps=30,
        step_at=None,
        gpu=False,
        cpus=2,
        check=lambda seen: None,
        on_stage=lambda text: None,
    )
    largest = max(row.ranks for row in found.rows if row.rate is not None)
    assert len(training_records(last.seen)) == largest  # tune goes on with this run
    assert all(record.loaders and record.loaders[0].wait_ms > 0 for record in training_records(last.seen))
    return found


def test_one_slow_rank_of_1_2_and_4_is_named_with_its_cause(tmp_path: Path) -> None:
    found = run(tmp_path, SLOW_RANK, 4, 1, 2, 2)
    assert [row.ranks for row in found.rows] == [1, 2, 4]
    assert [row.error for row in found.rows] == [None, None, None]
    assert found.unit == "samples/s"
    assert found.rows[0].efficiency == 1.0
    assert found.rows[0].slowest_rank is None
    for row in found.rows[1:]:
        assert row.slowest_rank == 1, row
        assert (row.slowest_because or "").startswith("its loader: ")
        waits = {rank.rank: rank.loader_wait_ms for rank in row.per_rank}
        assert max(waits, key=lambda rank: waits[rank]) == 1
        least = min(row.per_rank, key=lambda rank: rank.communication_ms or 0.0)
        assert least.rank == 1  # the others wait for it, it waits for none
        assert row.exposed_ms == least.communication_ms
    assert (found.cause or "").startswith("waiting for the loader: from ")
    assert (found.cause or "").endswith("on rank 1")
    assert codec.decode(codec.encode(found), Scaling, what="scaling") == found


def test_copies_of_a_script_that_never_talk_to_each_other_do_not_add_up(tmp_path: Path) -> None:
    alone = SLOW_RANK.replace('dist.init_process_group("gloo")\n', "").replace("dist.destroy_process_group()\n", "")
    alone = alone.replace("nn.parallel.DistributedDataParallel(nn.Linear(64, 2))", "nn.Linear(64, 2)")
    alone = alone.replace("dist.get_rank() == 1", "False").replace("dist.get_world_size()", "1")
    alone = alone.replace("sampler=DistributedSampler(data)", "shuffle=True")
    found = run(tmp_path, alone, 1, 2)
    assert found.rows[0].rate
    assert found.rows[1].rate is None
    assert found.rows[1].error == "its processes joined no process group: each does the whole work for itself"
    assert found.cause is None


def test_a_command_that_fails_at_every_count_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(GpudoctorError, match=r"no count of ranks gave a rate; with 1: .*no data"):
        run(tmp_path, "import torch\nraise RuntimeError('no data')\n", 1)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py --lr 1", "python -m torch.distributed.run --standalone --nproc-per-node 4 train.py --lr 1"),
        (
            "/env/bin/python3.11 -u -W ignore -m pkg.train",
            "/env/bin/python3.11 -u -W ignore -m torch.distributed.run --standalone --nproc-per-node 4 -m pkg.train",
        ),
        ("torchrun --nproc-per-node 8 t.py", "torchrun --standalone --nproc-per-node 4 t.py"),
        ("torchrun --standalone --nproc_per_node=gpu t.py", "torchrun --standalone --nproc_per_node=4 t.py"),
        ("torchrun --master_port 1 t.py", "torchrun --nproc-per-node 4 --master_port 1 t.py"),
        ("python -m torch.distributed.run t.py", None),
        ("accelerate launch --num_processes 2 t.py --x", "accelerate launch --num_processes 4 t.py --x"),
        ("accelerate launch t.py", "accelerate launch --num_processes 4 t.py"),
    ],
)
def test_the_count_goes_where_the_launcher_reads_it(command: str, expected: str | None) -> None:
    expected = expected or "python -m torch.distributed.run --nproc-per-node 4 --standalone t.py"
    assert " ".join(with_ranks(command.split(), 4)) == expected


def test_a_lone_process_is_not_multi_gpu_for_accelerate() -> None:
    command = ["accelerate", "launch", "--multi_gpu", "--num_processes=8", "t.py"]
    assert with_ranks(command, 1) == ["accelerate", "launch", "--num_processes=1", "t.py"]
    assert "--multi_gpu" in with_ranks(command, 2)


@pytest.mark.parametrize("command", ["sh run.sh", "python -c pass", "torchrun --nnodes 2 t.py", "python"])
def test_a_command_without_a_place_for_ranks_is_refused(command: str) -> None:
    with pytest.raises(GpudoctorError, match="--nproc: "):
        with_ranks(command.split(), 2)


def record(
    rank: int, wall: float, loader: float, talk: float | None, *, batch: int = 8, steps: int = 40
) -> WatchRecord:
    """One rank: 40 even steps behind a first one that connects."""
    walls = [20 * wall] + [wall] * (steps - 1)
    return WatchRecord(
        pid=rank + 1,
        rank=rank,
        steps=tuple(Step(wall_ms=w, loader_wait_ms=loader, communication_ms=talk or 0.0) for w in walls),
        loaders=(
            WatchedLoader(
                site="t.py:1", ordinal=0, role="train", loader_class="DataLoader", dataset_class="D",
                iterable_dataset=False, batches=steps, samples=batch * steps,
            ),
        ),
        communication=Communication(backend="nccl", ranks=2, reductions=0 if talk is None else steps, untimed=3),
    )  # fmt: skip


def row(*records: WatchRecord) -> ScalingRow:
    seen = Watched(command=("t",), cwd="/", records=records)
    return scaling.row_of(len(records), seen, seen)[0]


def test_the_connecting_first_step_is_no_part_of_the_rate() -> None:
    assert row(record(0, 10.0, 0.0, None)).rate == pytest.approx(800.0)


def test_ranks_alike_name_nobody_and_the_exposed_transfer_is_the_cause() -> None:
    rows = scaling.with_efficiency(
        [row(record(0, 10.0, 1.0, 0.0)), row(*(record(rank, 30.0, 1.2, 20.0) for rank in range(4)))]
    )
    assert rows[1].slowest_rank is None
    assert rows[1].exposed_ms == pytest.approx(20.0)
    assert rows[1].efficiency == pytest.approx(1 / 3, rel=1e-3)
    cause = scaling.growing_cause(rows, cpus=None)
    assert cause == "exposed communication: from 0.0 ms a step with 1 to 20.0 ms with 4"


def test_a_rank_that_computes_slowly_is_told_from_one_with_a_slow_loader() -> None:
    found = row(record(0, 30.0, 1.0, 18.0), record(1, 30.0, 1.0, 2.0), record(2, 30.0, 1.0, 18.0))
    assert found.slowest_rank == 1
    assert (found.slowest_because or "").startswith("its own work without the loader: 28.0 ms a step")
    rows = scaling.with_efficiency([row(record(0, 12.0, 1.0, 0.0)), found])
    assert scaling.growing_cause(rows, cpus=2) == (
        "the ranks' own work: from 11.0 ms a step with 1 to 27.0 ms with 3 (3 ranks share 2 CPUs)"
    )


def test_where_the_host_sees_no_communication_it_is_unknown() -> None:
    found = row(record(0, 30.0, 1.0, None), record(1, 30.0, 1.0, None))
    assert found.exposed_ms is None
    assert found.slowest_rank is None
    rows = scaling.with_efficiency([row(record(0, 10.0, 1.0, None)), found])
    assert (scaling.growing_cause(rows, cpus=None) or "").startswith("work and communication, which cannot be told")
    slow = row(record(0, 30.0, 1.0, None), record(1, 30.0, 25.0, None))
    assert slow.slowest_rank == 1  # a loader gives a rank away all the same


def test_a_script_that_scales_has_no_cause_and_one_that_shares_its_batch_is_compared_by_samples() -> None:
    good = scaling.with_efficiency([row(record(0, 10.0, 1.0, 0.0)), row(*(record(r, 10.5, 1.0, 0.3) for r in (0, 1)))])
    assert (scaling.growing_cause(good, cpus=4) or "").startswith("nothing that matters")
    shared = [row(record(0, 10.0, 1.0, 0.0)), row(*(record(r, 9.0, 1.0, 3.0, batch=4) for r in (0, 1)))]
    shared = scaling.with_efficiency(shared)
    assert shared[1].efficiency == pytest.approx(10 / 18, rel=1e-3)
    assert scaling.growing_cause(shared, cpus=4) == "exposed communication: from 0.0 ms a step with 1 to 6.0 ms with 2"


def sample() -> Scaling:
    ranks = tuple(
        ScalingRank(rank=rank, rate=100.0, step_ms=80.0, loader_wait_ms=60.0 if rank == 3 else 1.0) for rank in range(8)
    )
    rows = (
        ScalingRow(ranks=1, rate=400.0, efficiency=1.0, steps=50, per_rank=ranks[:1]),
        ScalingRow(
            ranks=8, rate=800.0, efficiency=0.25, steps=50, slowest_rank=3, per_rank=ranks,
            slowest_because="its loader: \x1b[31m[red]60 ms",
        ),
        ScalingRow(ranks=16, error="the command ended with exit code 1: Duplicate GPU\ndetected"),
    )  # fmt: skip
    return Scaling(unit="samples/s", rows=rows, cause="waiting for the loader", notes=("a note",))


@pytest.mark.parametrize("width", [60, 200, None])
@pytest.mark.parametrize("unicode", [True, False])
def test_the_table_fits_its_terminal_and_lets_nothing_act_on_it(width: int | None, unicode: bool) -> None:
    lines = table(sample(), Style(width=width, unicode=unicode))
    text = "\n".join(lines)
    if width is not None:
        assert max(map(len, lines)) <= width, text
    assert "\x1b" not in text
    assert unicode or text.isascii()
    flat = " ".join(text.split())
    assert "Duplicate GPU\\ndetected" in flat
    for part in ("25%", "rank 3", "unknown", "what grows with the ranks: waiting for the loader", "note: a note"):
        assert part in flat, part


def test_a_collective_that_blocks_is_counted_and_times_are_told_step_by_step(tmp_path: Path) -> None:
    text = SLOW_RANK.replace("    optimizer.step()\n", "    optimizer.step()\n    dist.barrier()\n")
    (tmp_path / "train.py").write_text(text)
    plan = WatchPlan(record_dir="", steps=12, watch_calls=False, watch_ranks=True)
    seen = observe.watch(with_ranks([sys.executable, "train.py"], 2), plan, cwd=tmp_path, deadline_s=150)
    assert [item.rank for item in seen.records] == [0, 1], seen.stderr_tail
    for item in seen.records:
        assert item.communication is not None
        assert dataclasses.replace(item.communication, calls=0) == Communication(backend="gloo", ranks=2, reductions=12)
        assert item.communication.calls in (11, 12)  # the process stops inside of the last step
        assert not item.notes
    waits = [sum(step.communication_ms for step in item.steps[2:]) for item in seen.records]
    assert waits[0] > waits[1]
