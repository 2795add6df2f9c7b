"""What each edit refuses and why, and that what it writes behaves as the original did."""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap
from types import FrameType
from typing import Any

import pytest
from test_prescribe_patch import patched

from gpudoctor.model import Edit
from gpudoctor.prescribe.patch import Patched, apply_edits

FILE = "train.py"
LOADER = "from torch.utils.data import DataLoader\n"


def apply(text: str, kind: str, part: str, **values: Any) -> Patched:
    line = next(number for number, line in enumerate(text.split("\n"), 1) if part in line)
    return apply_edits(text, [Edit(kind=kind, site=f"{FILE}:{line}", **values)], file=FILE)  # type: ignore[arg-type]


def refusal(text: str, kind: str, part: str, **values: Any) -> str:
    result = apply(text, kind, part, **values)
    assert result.applied == ()
    assert result.text == text
    assert result.lines == ()
    return result.refused[0][1]


def run(text: str, **space: Any) -> tuple[str, dict[str, Any]]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, FILE, "exec"), space)
    return printed.getvalue(), space


@pytest.mark.filterwarnings("ignore:'pin_memory'")
def test_the_patched_script_prints_the_same_and_runs_every_changed_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float and count sums, whole batches and a dropped call in one script; workers are left out to keep it short."""
    text, result = patched("images")
    monkeypatch.setattr(sys, "argv", [FILE])
    seen: set[int] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != FILE:
            return None
        seen.update([frame.f_lineno] if event == "line" else [])
        return trace

    printed, _ = run(text, __name__="__main__")
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        printed_new, _ = run(result.text.replace("num_workers=4", "num_workers=0"), __name__="__main__")
    finally:
        sys.settrace(before)
    assert "loss" in printed
    assert printed_new == printed
    assert set(result.lines) <= seen


# loader arguments


@pytest.mark.parametrize(
    ("call", "word"),
    [
        ("DataLoader(*parts)", "*arguments"),
        ("DataLoader(data, **options)", "**arguments"),
        ("DataLoader(data, num_workers=4)", "already"),
        ("FastLoader(data)", "FastLoader is not torch's"),
        ("[DataLoader(a), DataLoader(b)]", "several"),
        ("len(data)", "no DataLoader call"),
    ],
)
def test_loader_refusals(call: str, word: str) -> None:
    text = LOADER + f"class FastLoader(DataLoader): pass\nloader = {call}\n"
    assert word in refusal(text, "loader-arguments", "loader =", arguments={"num_workers": 4})


def test_a_loader_of_another_library_is_left_alone() -> None:
    text = "from torch_geometric.loader import DataLoader\nloader = DataLoader(data)\n"
    assert "not torch's" in refusal(text, "loader-arguments", "loader =", arguments={"num_workers": 4})


@pytest.mark.parametrize(
    "head",
    ["from torch.utils.data import *", "from torch.utils.data import DataLoader as DataLoader",
     "from torch.utils.data.dataloader import DataLoader",
     "from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader"],
)  # fmt: skip
def test_ways_to_import_it(head: str) -> None:
    text = f"{head}\nloader = DataLoader(data)\n"
    result = apply(text, "loader-arguments", "loader =", arguments={"num_workers": 3})
    assert result.text == f"{head}\nloader = DataLoader(data, num_workers=3)\n"


def test_worker_settings_need_workers() -> None:
    text = LOADER + "loader = DataLoader(data, pin_memory=False)\n"
    settings = {"persistent_workers": True, "prefetch_factor": 4, "pin_memory": True}
    result = apply(text, "loader-arguments", "loader =", arguments=settings)
    assert result.text == LOADER + "loader = DataLoader(data, pin_memory=True)\n"
    result = apply(text, "loader-arguments", "loader =", arguments={"num_workers": 0, "prefetch_factor": 4})
    assert "already" in result.refused[0][1]


def test_every_kind_of_bad_source_is_refused_with_a_reason() -> None:
    for text in ("x = (\n", "", "\0", "def f(:\n    DataLoader()\n", "if x:\nDataLoader(a)\n"):
        result = apply_edits(text, [Edit(kind="whole-batch", site=f"{FILE}:1")], file=FILE)
        assert result.applied == ()
        assert result.text == text
        assert result.refused[0][1]
    for site in ("other.py:1", f"{FILE}:0", f"{FILE}:x", FILE, f"{FILE}:-1", f"{FILE}:99"):
        edit = Edit(kind="loader-arguments", site=site, arguments={"num_workers": 1})
        assert apply_edits(LOADER, [edit], file=FILE).refused


def test_one_refusal_keeps_the_others() -> None:
    text = LOADER + "a = DataLoader(x)\nb = DataLoader(**y)\nc = DataLoader(z)\n"
    edits = [Edit(kind="loader-arguments", site=f"{FILE}:{line}", arguments={"num_workers": 1}) for line in (2, 3, 4)]
    result = apply_edits(text, edits, file=FILE)
    assert result.applied == (edits[0], edits[2])
    assert [edit for edit, _ in result.refused] == [edits[1]]
    assert result.lines == (2, 4)


# whole batches


@pytest.mark.parametrize(
    ("call", "word"),
    [
        ("DataLoader(data, 8, collate_fn=mine)", "its own collate_fn"),
        ("DataLoader(data, 8, sampler=mine)", "its own sampler"),
        ("DataLoader(data, batch_sampler=mine)", "its own batch_sampler"),
        ("DataLoader(data, batch_size=None)", "already"),
        ("DataLoader(data, 8, shuffle=not args.fixed)", "not known before the run"),
        ("DataLoader(data, 8, shuffle=True, generator=make())", "generator is made in the call"),
        ("[DataLoader(Data(i), 8) for i in parts][0]", "larger expression"),
        ("first() or DataLoader(Data(), 8)", "larger expression"),
        ("call(first(), DataLoader(Data(), 8))", "larger expression"),
    ],
)
def test_whole_batch_refusals(call: str, word: str) -> None:
    assert word in refusal(LOADER + f"loader = {call}\n", "whole-batch", "loader =")


@pytest.mark.parametrize("use", ["loader.batch_size", "self.loader.sampler", "train_loader.batch_size"])
def test_attributes_that_would_change_are_refused(use: str) -> None:
    text = LOADER + f"loader = DataLoader(data, 8)\ndef f(self, train_loader):\n    return {use}\n"
    assert "line 4 reads" in refusal(text, "whole-batch", "loader =")
    assert apply(text.replace(use, "args.batch_size, len(loader), loader.dataset"), "whole-batch", "loader =").applied


@pytest.mark.parametrize(
    "head", ["import lightning as L", "from accelerate import Accelerator", "import transformers.x"]
)
def test_frameworks_that_rebuild_loaders_are_refused(head: str) -> None:
    assert "rebuilds" in refusal(f"{head}\n{LOADER}loader = DataLoader(data, 8)\n", "whole-batch", "loader =")


def test_names_do_not_collide() -> None:
    text = (
        LOADER + "dataset = 1\nclass RandomSampler: pass\ndef make():\n    return DataLoader(Data(), 8, shuffle=True)\n"
    )
    assert apply(text, "whole-batch", "return").text == (
        "from torch.utils.data import DataLoader, BatchSampler, RandomSampler as TorchRandomSampler\n"
        "dataset = 1\nclass RandomSampler: pass\ndef make():\n    loader_dataset = Data()\n"
        "    return DataLoader(loader_dataset, sampler=BatchSampler(TorchRandomSampler(loader_dataset), 8, "
        "drop_last=False),\n                      batch_size=None)\n"
    )


def test_imports_that_are_there_are_used() -> None:
    text = (
        "from torch.utils.data import BatchSampler, DataLoader, SequentialSampler as S\nloader = DataLoader(data, 8)\n"
    )
    result = apply(text, "whole-batch", "loader =")
    assert result.text.splitlines()[0] == text.splitlines()[0]
    assert "BatchSampler(S(data), 8, drop_last=False)" in result.text
    text = f"def f(data):\n    {LOADER}    return DataLoader(data, 8)\n"
    result = apply(text, "whole-batch", "return")
    assert "    from torch.utils.data import DataLoader, BatchSampler, SequentialSampler\n" in result.text


def test_a_loop_over_a_fresh_loader() -> None:
    text = LOADER + "for row in DataLoader(Data(), batch_size=4):\n    pass\n"
    result = apply(text, "whole-batch", "for row")
    assert "dataset = Data()\nfor row in DataLoader(dataset, sampler=BatchSampler(" in result.text


@pytest.mark.parametrize(
    "arguments",
    ["batch_size=5", "5, True", "batch_size=5, shuffle=True, drop_last=True",
     "5, True, None, None, 0, None, False, True",
     "5, shuffle=False, drop_last=True", "shuffle=True, generator=generator, batch_size=5", ""],
)  # fmt: skip
def test_whole_batches_are_the_same_batches(arguments: str) -> None:
    text = textwrap.dedent(f"""\
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(TensorDataset(torch.arange(23.0), torch.arange(23)), {arguments})
        rows = [batch for _ in range(2) for batch in loader]
        count = len(loader)
        after = torch.rand(3)
        """)
    result = apply(text, "whole-batch", "loader =")
    assert result.refused == ()
    (_, before), (_, after) = run(text), run(result.text)
    assert before["count"] == after["count"]
    assert [type(row) for row in before["rows"]] == [type(row) for row in after["rows"]]
    for one, other in zip(before["rows"], after["rows"], strict=True):
        assert all(a.dtype == b.dtype and a.shape == b.shape and a.equal(b) for a, b in zip(one, other, strict=True))
    assert before["after"].equal(after["after"])  # the global generator was drawn from as often


# sums on the device

SUM = textwrap.dedent("""\
    import torch
    import torch.nn.functional as F
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, seen, weight = START, 0, 3
    for step in range(9):
        x, y = torch.randn(7, 4), torch.randint(0, 3, (7,))
        pred = model(x)
        loss = F.cross_entropy(pred, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(y)
        SUM
        if step % 3 == 2:
            print(SHOW)
    print(total, total / seen, repr(total), type(total))
    state = model.state_dict()
    """)
FLOATS = [
    "total += loss.item()",
    "total += float(loss)",
    "total += float(loss.detach().cpu())",
    "total += float(loss.item())",
    "total = total + loss.item()",
    "total = loss.item() + total",
    "total += loss.item() * x.size(0)",
    "total += x.shape[0] * loss.item() / 2",
    "total += weight * loss.detach().item()",
    "total += loss.data.item() * (weight + 1)",
    "total += (loss / 2).item()",
    "total += float(loss / 2)",
    "total += F.cross_entropy(pred, y).item()",
    "total += (pred.argmax(1) == y).float().mean().item()",
    "total += (pred.argmax(1) == y).type(torch.float).sum().item()",
    "if step > 2: total += loss.item()",
]
COUNTS = [
    "total += (pred.argmax(1) == y).sum().item()",
    "total += pred.argmax(1).eq(y).sum().item()",
    "total += torch.sum(pred.argmax(1) == y).item()",
    "total += torch.count_nonzero(pred.argmax(1) == y).item()",
    "total += pred.argmax(1).eq(y.view_as(pred.argmax(1))).sum().cpu().item()",
]


@pytest.mark.parametrize("form", FLOATS)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's, about the original
def test_float_sums_print_the_same(form: str) -> None:
    show = "f'{total:.4f} {total / (step + 1):.6f} {total}', '%.5f' % (total / seen)"
    text = SUM.replace("START", "0.0").replace("SUM", form).replace("SHOW", show)
    result = apply(text, "device-accumulator", "total =" if "total =" in form else form, name="total")
    assert result.refused == ()
    _same(text, result.text)
    assert ".item()" not in result.text.split("total = float(total)")[0].split("optimizer.step()")[1]


@pytest.mark.parametrize(
    ("form", "show"),
    [(form, "f'{100.0 * total / seen:.2f}% {total / seen}'") for form in COUNTS]
    + [(COUNTS[0], "f'{total:5d} {total}'"), (COUNTS[0], "step")],
)
def test_counts_print_the_same(form: str, show: str) -> None:
    text = SUM.replace("START", "0").replace("SUM", form).replace("SHOW", show)
    result = apply(text, "device-accumulator", form, name="total")
    assert result.refused == ()
    _same(text, result.text)


def _same(text: str, new: str) -> None:
    (printed, before), (printed_new, after) = run(text), run(new)
    assert printed
    assert printed_new == printed
    assert all(after["state"][name].equal(value) for name, value in before["state"].items())


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ("total += loss.item() + 1", "more than scale"),
        ("total += 1 / loss.item()", "divides by"),
        ("total += loss.item() * scale()", "calls scale"),
        ("total += loss.item() * total", "depends on total"),
        ("total += min(loss.item(), 1)", "more than scale"),
        ("total += loss.item() * other.item()", "not one value"),
        ("total += seen", "not one value"),
        ("total += thing.item()", "cannot be told"),
        ("total -= loss.item()", "no sum of the form"),
        ("self.total += loss.item()", "no plain name"),
        ("total += (pred == y).sum().item(); print(f'{total} {total / seen}')", "both as an integer"),
    ],
)
def test_sums_that_are_refused(form: str, word: str) -> None:
    text = f"total = 0\nfor x in y:\n    {form}\n"
    assert word in refusal(text, "device-accumulator", "total", name="total") or word in refusal(
        text, "device-accumulator", form, name="total"
    )


def test_sums_outside_of_a_loop_are_refused() -> None:
    text = "def step(loss):\n    total = 0\n    total += loss.item()\n"
    assert "no loop" in refusal(text, "device-accumulator", "total +=")
    text = "for x in y:\n    total += loss.item()\n"
    assert "is total, not other" in refusal(text, "device-accumulator", "total", name="other")


def test_two_additions_are_read_back_once() -> None:
    text = "for x in y:\n    if x:\n        total += loss.item()\n    else:\n        total += loss.item()\n"
    edits = [Edit(kind="device-accumulator", site=f"{FILE}:{line}") for line in (3, 5)]
    assert apply_edits(text, edits, file=FILE).text.count("total = float(total)") == 1


# copies


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("x = x.to(device)", "x = x.to(device, non_blocking=True)"),
        ("a, b = a.to(dev), b.to(dev)", "a, b = a.to(dev, non_blocking=True), b.to(dev, non_blocking=True)"),
        ("x = x.cuda()", "x = x.cuda(non_blocking=True)"),
        ("x = x.cuda(0)", "x = x.cuda(0, non_blocking=True)"),
        ("x = x.to('cuda:0', torch.float16)", "x = x.to('cuda:0', torch.float16, non_blocking=True)"),
        ("x = x.to(f'cuda:{i}')", "x = x.to(f'cuda:{i}', non_blocking=True)"),
        ("x = x.to(self.device)", "x = x.to(self.device, non_blocking=True)"),
        ("x = x.to(y.device).to(torch.bfloat16)", "x = x.to(y.device, non_blocking=True).to(torch.bfloat16)"),
        ("x = x.to(torch.device('cuda'))", "x = x.to(torch.device('cuda'), non_blocking=True)"),
        ("x = x.to(dtype=torch.half, device=d)", "x = x.to(dtype=torch.half, device=d, non_blocking=True)"),
        ("x = x.to(local_rank)", "x = x.to(local_rank, non_blocking=True)"),
        ("b = {k: v.to(device) for k, v in b.items()}",
         "b = {k: v.to(device, non_blocking=True) for k, v in b.items()}"),
        ("f(x.to(device), y.cpu())", "f(x.to(device, non_blocking=True), y.cpu())"),
    ],
)  # fmt: skip
def test_copies(line: str, new: str) -> None:
    assert apply(f"import torch\n{line}\n", "non-blocking", line).text == f"import torch\n{new}\n"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("x = x.to(torch.float32)", "no copy"),
        ("x = x.to(other)", "no copy"),
        ("x = x.to('cpu')", "no copy"),
        ("x = x.to(torch.device('cpu'))", "no copy"),
        ("x = x.to(cpu_device)", "no copy"),
        ("x = x.to(*where)", "no copy"),
        ("model.cuda()", "no copy"),
        ("x = x.to(device, non_blocking=False)", "set there already"),
        ("x = x.to(device, torch.half, True)", "set there already"),
        ("x = x.cuda(0, True)", "set there already"),
        ("y = x.to(device); x.add_(1)", "in place"),
        ("y = x.to(device); x[0] = 1", "in place"),
        ("y = x.to(device); x += 1", "in place"),
    ],
)
def test_copies_that_are_refused(line: str, word: str) -> None:
    assert word in refusal(f"import torch\n{line}\n", "non-blocking", line)


# dropped calls


def dropped(body: str) -> str:
    part = "torch.cuda.synchronize" if "synchronize" in body else "torch.cuda.empty_cache"
    text = "import time\nimport torch\nfor step in range(3):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    result = apply(text, "drop-call", part)
    assert result.refused == (), result.refused
    compile(result.text, FILE, "exec")
    return textwrap.dedent(result.text.split("range(3):\n")[1])


def test_dropped() -> None:
    assert dropped("a()\n# why\ntorch.cuda.empty_cache()  # gone\nb()\n") == "a()\n# why\nb()\n"
    assert dropped("torch.cuda.empty_cache()\n") == "pass\n"
    assert dropped("torch.cuda.synchronize()\na()\n") == "a()\n"
    assert dropped("a(); torch.cuda.empty_cache()\n") == "a()\n"
    assert dropped("torch.cuda.empty_cache(); a()\n") == "a()\n"
    assert dropped("a()\nif torch.cuda.is_available():\n    torch.cuda.synchronize()\n") == "a()\n"
    assert dropped("a()\nif step % 2 == 0: torch.cuda.empty_cache()\n") == "a()\nif step % 2 == 0: pass\n"
    assert dropped("a()\nif f():\n    torch.cuda.empty_cache()\n") == "a()\nif f():\n    pass\n"
    assert dropped("a()\nif step:\n    torch.cuda.empty_cache()\nelse:\n    b()\n").startswith(
        "a()\nif step:\n    pass\n"
    )
    assert dropped("a()\nif step:\n    b()\nelif a:\n    torch.cuda.empty_cache()\n").endswith("elif a:\n    pass\n")
    assert dropped("a()\ntorch.cuda.empty_cache()") == "a()"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("x = torch.cuda.synchronize()", "larger expression"),
        ("torch.cuda.synchronize()\n    start = time.time()", "clock"),
        ("t = time.perf_counter() - t\n    torch.cuda.synchronize()", "clock"),
        ("if a:\n        torch.cuda.synchronize()\n    t = time.time()", "clock"),
        ("end.record()\n    torch.cuda.synchronize()", "clock"),
        ("y = x.to('cpu', non_blocking=True)\n    a()\n    torch.cuda.synchronize()\n    print(y)", "may rely"),
        ("h.copy_(x, non_blocking=True)\n    a()\n    torch.cuda.synchronize()\n    print(h)", "may rely"),
        ("with torch.cuda.stream(s):\n        a()\n    a()\n    torch.cuda.synchronize()", "may rely"),
    ],
)
def test_calls_that_are_kept(body: str, word: str) -> None:
    text = f"import time\nimport torch\nfor step in range(3):\n    {body}\n"
    assert word in refusal(text, "drop-call", "torch.cuda.synchronize")


def test_calls_outside_of_a_loop_are_kept() -> None:
    assert "no loop" in refusal("import torch\ntorch.cuda.empty_cache()\n", "drop-call", "torch.cuda")
    text = "import torch\nfor x in y:\n    def f():\n        torch.cuda.empty_cache()\n"
    assert "no loop" in refusal(text, "drop-call", "torch.cuda")
    assert "no torch.cuda" in refusal("import gc\nfor x in y:\n    gc.collect()\n", "drop-call", "gc.collect")
