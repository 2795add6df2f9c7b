"""What watching costs: the same training loop unwatched and watched, in alternation; and one wrapped call.

    python tests/bench/bench_watch.py [PAIRS]

Prints the median step of both and the overhead in percent, for a loop that reads CPU tensors hundreds of times a step
(the worst that was met) and for a plain one. On a machine where torch can use CUDA the model is on the GPU and the
reads are of CPU tensors; without CUDA every read is counted, which costs more: the limit holds where a GPU is.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpudoctor.model import WatchPlan
from gpudoctor.observe import watch
from gpudoctor.observe.run import INJECT

LIMIT = 0.03  # of the step

LOOP = """\
import json, sys, time
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
width, reads, steps = 512, int(sys.argv[1]), int(sys.argv[2])
data = torch.arange(40000.0)
model = nn.Sequential(nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, width)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
walls, rows = [], list(range(100))
begun = time.perf_counter()
for step in range(steps):
    starts = torch.randint(90, (reads,))
    for start in starts:
        rows[start]
    x = data[: 64 * width].view(64, width).to(device)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.item()
    now = time.perf_counter()
    walls.append((now - begun) * 1e3)
    begun = now
print(json.dumps(walls[20:]))
"""


def walls(folder: Path, reads: int, steps: int, *, watched: bool) -> list[float]:
    """Step times in milliseconds as the script itself takes them."""
    script = folder / "loop.py"
    script.write_text(LOOP)
    command = [sys.executable, "loop.py", str(reads), str(steps)]
    if not watched:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
    else:
        output = folder / "output"
        output.unlink(missing_ok=True)
        seen = watch(command, WatchPlan(record_dir=""), cwd=folder, output=output, deadline_s=300)
        assert seen.exit_code == 0, seen.stderr_tail
        found = json.loads(output.read_text().splitlines()[-1])
        print(f"  the watcher says of itself: {(seen.records[0].overhead_ms or 0.0) / steps:.4f} ms a step")
    return [float(value) for value in found]


def overhead(reads: int, pairs: int, steps: int = 300) -> tuple[float, float]:
    """Median step unwatched and watched, over alternating runs."""
    seen: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(pairs):
            for watched in (False, True) if number % 2 == 0 else (True, False):
                seen[watched].append(statistics.median(walls(Path(folder), reads, steps, watched=watched)))
    return statistics.median(seen[False]), statistics.median(seen[True])


CALL = """\
import sys, timeit
sys.path.insert(0, {inject!r})
import torch
if {cuda}:
    torch.version.cuda = "12.0"  # as a build for CUDA wraps them
number, table = torch.tensor(3), list(range(10))
statements = ("number.item()", "table[number]", "number.to('cpu')")
def cost(): return [min(timeit.repeat(s, globals=globals(), number=20000, repeat=5)) * 50 for s in statements]
before = cost()
from _gpudoctor_watch import calls, debug_mode, state
debug_mode.install = lambda torch: None
calls.install(torch)
state.W.torch, state.W.active = torch, True
print(*(f"{{s}} {{b:.2f}} -> {{a:.2f}} us" for s, b, a in zip(statements, before, cost())), sep="; ")
"""


@pytest.mark.bench
@pytest.mark.parametrize("reads", [0, 256])
def test_watching_costs_little(reads: int) -> None:
    """On a machine with a GPU; elsewhere every read is counted, and other load decides."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    unwatched, watched = overhead(reads, 3)
    assert watched <= unwatched * (1 + LIMIT)


if __name__ == "__main__":
    for build in (False, True):
        code = CALL.format(inject=str(INJECT), cuda=build)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        print(f"a call on a CPU tensor, {'CUDA' if build else 'CPU'} build: {done.stdout.strip()}")
    for count in (0, 256):
        plain, seen_ms = overhead(count, int(sys.argv[1]) if len(sys.argv) > 1 else 3)
        print(f"{count} reads a step: {plain:.3f} ms unwatched, {seen_ms:.3f} ms watched: {seen_ms / plain - 1:+.2%}")
