"""What only a GPU shows: directions of copies, pinned sources, and calls that only sync debug mode sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from observe_support import only, watch_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs an NVIDIA GPU"),
]

LOOP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 64), torch.randint(0, 2, (256,)))
loader = DataLoader(data, batch_size=16, shuffle=True, pin_memory=PIN)
model = nn.Linear(64, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        x = x.to("cuda", non_blocking=True)  # copy
        y = y.cuda()  # second
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept = x[y == 1]  # mask
        total = loss.item()  # item
        back = model.weight.detach().cpu()  # back
        torch.cuda.empty_cache()  # cache
        torch.cuda.synchronize()  # wait
        print(f"{loss:.3f}")  # format
        if loss > 1e9: break  # branch
"""


def line_of(marker: str) -> str:
    (number,) = [n for n, row in enumerate(LOOP.splitlines(), 1) if row.endswith(f"# {marker}")]
    return f"train.py:{number}"


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_and_syncs_of_a_gpu_loop(tmp_path: Path, pinned: bool) -> None:
    record = only(watch_text(tmp_path, LOOP.replace("PIN", str(pinned)), steps=20, deadline_s=120))
    assert (record.cuda, record.ended, len(record.steps), record.notes) == (True, "steps", 20, ())
    assert record.device
    copies = {(copy.site, copy.function): copy for copy in record.copies}
    first, second = copies[line_of("copy"), "to"], copies[line_of("second"), "cuda"]
    assert (first.kind, first.calls, first.non_blocking, first.from_loader) == ("h2d", 20, 20, True)
    assert (first.bytes, first.pinned) == (20 * 16 * 64 * 4, 20 if pinned else 0)
    assert (second.kind, second.calls, second.non_blocking, second.pinned) == ("h2d", 20, 0, 20 if pinned else 0)
    back = copies[line_of("back"), "cpu"]
    assert (back.kind, back.calls, back.bytes, back.calls_in_steps) == ("d2h", 19, 19 * 2 * 64 * 4, 19)
    syncs = {(sync.site, sync.function): sync for sync in record.syncs}
    for marker, function in (("item", "item"), ("format", "format"), ("branch", "bool")):
        sync = syncs[line_of(marker), function]
        assert (sync.calls, sync.on_device, sync.detected_by) == (19, 19, "both"), sync
    for marker, function in (("cache", "empty_cache"), ("wait", "synchronize")):
        assert (syncs[line_of(marker), function].calls, syncs[line_of(marker), function].on_device) == (19, 19)
    mask = syncs[line_of("mask"), "sync"]
    assert (mask.detected_by, mask.on_device) == ("sync-debug-mode", mask.calls)
    assert mask.calls >= 18
    assert not [site for site, _ in syncs if site in (line_of("copy"), line_of("second"), line_of("back"))]


def test_watching_leaves_a_script_without_cuda_alone(tmp_path: Path) -> None:
    text = "import torch\nx = torch.ones(3).to('cpu').sum().item()\nassert not torch.cuda.is_initialized()\n"
    watched = watch_text(tmp_path, text)
    assert watched.exit_code == 0, watched.stderr_tail
    assert only(watched).cuda is False
