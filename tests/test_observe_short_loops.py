"""Loops that are left early: every kind of loop, each on its own count, with the code after them run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpudoctor import observe
from gpudoctor.model import PatchedSource, Watched, WatchPlan
from gpudoctor.tune.loops import loops_around

HEAD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.zeros(64, 2)), batch_size=2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(x):
    model(x).sum().backward()
    optimizer.step()
"""
LOOPS = {
    "range": (
        """\
for step in range(10**9):
    train(torch.zeros(2, 2))
print('after', step)
""",
        "2",
    ),
    "while": (
        """\
step = 0
while True:
    train(torch.zeros(2, 2))
    step += 1
print('after', step)
""",
        "2",
    ),
    "steps over epochs": (
        """\
step = epoch = 0
while step < 10**9:
    epoch += 1
    for (x,) in loader:
        train(x)
        step += 1
print('after', step, epoch)
""",
        "2 1",
    ),
    "two phases, each with its own count": (
        """\
seen = []
for phase in 'ab':
    for (x,) in loader:
        pass
    for step in range(10**9):
        train(torch.zeros(2, 2))
    seen.append(step)
for step in range(10**9):
    train(torch.zeros(2, 2))
print('after', phase, seen, step)
""",
        "b [2] 2",
    ),
    "accumulated": (
        """\
count = 0
while count < 10**9:
    for number, (x,) in enumerate(loader):
        model(x).sum().backward()
        count += 1
        if count % 8 == 0:
            optimizer.step()
print('after', count)
""",
        "2",
    ),
    "a loop within a step": (
        """\
total = 0
for step in range(10**9):
    train(torch.zeros(2, 2))
    for part in range(3):
        total += 1
print('after', total)
""",
        "6",
    ),
}


def run(folder: Path, text: str, output: Path | None = None) -> Watched:
    script = folder / "train.py"
    script.write_text(text)
    loops = loops_around({"train.py": text}, {})["train.py"]
    patched = (PatchedSource(path=str(script), text=text, end_loops=loops),)
    plan = WatchPlan(record_dir="", patched=patched, watch_calls=False, end_loop_after=2)
    return observe.watch([sys.executable, "train.py"], plan, cwd=folder, deadline_s=100, output=output)


@pytest.mark.parametrize("name", LOOPS)
def test_the_code_after_the_loop_runs(name: str, tmp_path: Path) -> None:
    loop, wanted = LOOPS[name]
    watched = run(tmp_path, HEAD + loop, tmp_path / "log")
    assert (watched.stopped, watched.exit_code) == ("exit", 0), watched.stderr_tail
    assert (tmp_path / "log").read_text() == f"after {wanted}\n"


def test_a_traceback_names_the_users_own_line(tmp_path: Path) -> None:
    text = f"{HEAD}for step in range(10**9):\n    train(torch.zeros(2, 2))\nprint(unknown)\n"
    watched = run(tmp_path, text)
    assert watched.exit_code == 1
    assert f"line {len(text.splitlines())}, in <module>" in watched.stderr_tail
    assert "NameError: name 'unknown' is not defined" in watched.stderr_tail
