"""Shared by the tests of observe: scripts written into a folder and watched there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from gpudoctor.model import Watched, WatchPlan, WatchRecord
from gpudoctor.observe import watch

LOOP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(epochs, each=lambda step: None):
    step = 0
    for epoch in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            each(step)
"""


def watch_text(folder: Path, text: str, *arguments: str, **options: Any) -> Watched:
    """Writes `text` to train.py in `folder` and watches `python train.py ARGUMENTS` there.

    Options that WatchPlan has go into the plan, the others to watch().
    """
    (folder / "train.py").write_text(text)
    return watch_command(folder, [sys.executable, "train.py", *arguments], **options)


def watch_command(folder: Path, command: list[str], **options: Any) -> Watched:
    fields = WatchPlan.__dataclass_fields__
    plan = WatchPlan(**{"record_dir": "", **{name: value for name, value in options.items() if name in fields}})
    rest = {name: value for name, value in options.items() if name not in fields}
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return watch(command, plan, cwd=folder, **{"deadline_s": 150.0, "env": env, **rest})


def only(watched: Watched) -> WatchRecord:
    """The one record; fails with what the script said when there is none."""
    assert len(watched.records) == 1, watched.stderr_tail
    return watched.records[0]


def alive(pid: int) -> bool:
    """A process that runs; one that has ended and was not yet collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
