"""What only a GPU shows: directions of copies, pinned sources, and calls that only sync debug mode sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from observe_support import only, watch_text

from gpudoctor.read.traces import read_traces
from gpudoctor.tune.verdict import breakdown, judge

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


def test_waits_are_named_without_any_step_or_copy(tmp_path: Path) -> None:
    text = (
        "import torch\n"
        "w = torch.randn(4096, device='cuda')\n"
        "for _ in range(20):\n"
        "    g = torch.randn(4096, device='cuda')\n"
        "    proj = torch.dot(w, g)\n"
        "    g = g.sub(w, alpha=proj)\n"
    )
    record = only(watch_text(tmp_path, text))
    assert record.gpu is not None
    assert record.gpu.startswith("GPU-")
    assert (record.gpus_visible or 0) >= 1
    found = {(sync.site, sync.function): sync for sync in record.syncs}
    sync = found["train.py:6", "sync"]
    assert (sync.calls, sync.on_device, sync.detected_by, sync.via) == (20, 20, "sync-debug-mode", None)


def test_reads_of_cpu_tensors_are_passed_over(tmp_path: Path) -> None:
    text = LOOP.replace("PIN", "True").replace(
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad()\n        row = list(torch.arange(5)); list(range(9))[row[2]]; row[1].item()\n",
    )
    record = only(watch_text(tmp_path, text, steps=20, deadline_s=120))
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "row = list" in row)
    assert not [sync for sync in record.syncs if sync.site == f"train.py:{line}"]
    assert record.overhead_ms is not None
    assert record.overhead_ms > 0


def test_the_profiler_window_shows_the_device(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    watched = watch_text(
        tmp_path,
        LOOP.replace("PIN", "True").replace("range(2)", "range(5)"),
        steps=30,
        profiler_steps=3,
        deadline_s=180,
        record_dir=str(tmp_path / "records"),
    )
    record = only(watched)
    assert (record.ended, len(record.steps), record.notes) == ("steps", 30, ())
    window = record.window
    assert window is not None
    assert (window.steps, window.skipped) == (3, None), watched.stderr_tail
    assert window.sync_ms is not None
    assert window.unattributed_ms is not None
    assert window.sync_ms > 0
    assert window.unattributed_ms <= 0.5 * window.sync_ms
    mask = next(sync for sync in record.syncs if sync.site == line_of("mask"))
    assert mask.window_waited_ms is not None
    assert mask.window_waited_ms > 0
    ((facts,),) = read_traces([tmp_path / "records" / str(window.trace)]).jobs
    assert facts.whole_steps == 3
    assert facts.window_ms is not None
    assert facts.idle is not None
    assert facts.kernels_per_step is not None
    assert facts.kernels_per_step > 10
    assert {copies.kind for copies in facts.copies} >= {"h2d", "d2h"}
    item = breakdown(record, facts)
    assert item is not None
    assert item.device is not None
    assert item.device.busy + item.device.idle == pytest.approx(item.step)
    bound, _ = judge(item)
    assert bound in ("host", "loader", "unknown")  # tiny kernels: the device is never what limits


def test_a_compiled_step_with_reads_of_the_gpu(tmp_path: Path) -> None:
    plain = "model = nn.Linear(64, 2).cuda()"
    text = LOOP.replace("PIN", "False").replace(plain, f"{plain}\nmodel = torch.compile(model)")
    record = only(watch_text(tmp_path, text, steps=20, deadline_s=240))
    assert (record.ended, len(record.steps), record.compiled) == ("steps", 20, True)
    assert record.steady_from >= 1
    shifted = f"train.py:{int(line_of('item').partition(':')[2]) + 1}"
    item = next(sync for sync in record.syncs if (sync.site, sync.function) == (shifted, "item"))
    assert (item.on_device, item.steady_calls) == (19, 20 - record.steady_from)
