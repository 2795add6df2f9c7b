"""Values that stay on the device: lists, sums that are shown, copies from pinned memory. Changed scripts are run."""

from __future__ import annotations

import textwrap

import pytest
from test_prescribe_edits import FILE, SUM, apply, refusal, run
from test_prescribe_patch import edits_of, read

from gpudoctor.prescribe.patch import apply_edits

NUMERICS = {"call-argument", "setting"}


@pytest.mark.parametrize("name", ["logs", "tensors"])
def test_the_fixture_computes_the_same(name: str) -> None:
    """Without the numerics: the same parameters, the same lists and sums, and of the output every 20th step."""
    text = read(f"{name}.in.py")
    result = apply_edits(text, [e for e in edits_of(name, text) if e.kind not in NUMERICS], file=FILE)
    assert result.refused == ()
    (printed, before), (printed_new, after) = (
        run(source + "\nstate = main().state_dict()\n") for source in (text, result.text)
    )
    assert all(after["state"][key].equal(value) for key, value in before["state"].items())
    old, new = printed.splitlines(), printed_new.splitlines()
    rest = iter(old)
    assert all(line in rest for line in new)
    if name == "logs":
        assert sum(line.startswith("norm") for line in old) == 2 * 47
        assert sum(line.startswith("norm") for line in new) == 2 * 3  # steps 0, 20 and 40 of both epochs
        assert new[-1] == old[-1]
        assert [line for line in new if "loss" in line][:3] == [old[2 * step] for step in (0, 20, 40)]
    else:
        assert new == old


def test_one_set_of_edits_at_a_time() -> None:
    """Leave-one-out tries every part of the whole: each edit of a fixture applies without any other."""
    text = read("logs.in.py")
    edits = [edit for edit in edits_of("logs", text) if edit.kind not in NUMERICS]
    for left_out in edits:
        rest = [edit for edit in edits if edit is not left_out]
        assert apply_edits(text, rest, file=FILE).refused == ()


# lists

LIST = textwrap.dedent("""\
    import torch
    import torch.nn.functional as F
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, other, best = [], [], {"loss": []}
    for epoch in range(2):
        for step in range(5):
            x, y = torch.randn(7, 4), torch.randint(0, 3, (7,))
            pred = model(x)
            loss = F.cross_entropy(pred, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            APPEND
            loss *= 3
        other.append(sum(kept) / max(1, len(kept)))
    print(kept, other, best, [type(v) for v in kept])
    state = model.state_dict()
    """)


@pytest.mark.parametrize(
    ("line", "behind"),
    [
        ("kept.append(loss.item())", "kept[:] = [float(value) for value in kept]"),
        ("kept.append(float(loss))", "kept[:] = [float(value) for value in kept]"),
        ("kept.append(loss.detach().cpu().item())", "kept[:] = [float(value) for value in kept]"),
        ("kept.append((loss / 2).item())", "kept[:] = [float(value) for value in kept]"),
        ("kept.append((pred.argmax(1) == y).sum().item())", "kept[:] = [int(value) for value in kept]"),
        ("kept.append((pred.argmax(1) == y).float().mean().item())", "kept[:] = [float(value) for value in kept]"),
        ("best['loss'].append(loss.item())", "best['loss'][:] = [float(value) for value in best['loss']]"),
        ("if step % 2: kept.append(loss.item())", "kept[:] = [float(value) for value in kept]"),
    ],
)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's, about the original
def test_lists_hold_the_same_numbers(line: str, behind: str) -> None:
    """The loss is changed in place afterwards, which the kept value must not see."""
    text = LIST.replace("APPEND", line)
    result = apply(text, "collect-device", "loss *= 3" if line.startswith("if") else line)
    if line.startswith("if"):
        assert result.applied == ()  # the statement shares its line
        return
    assert result.refused == ()
    assert f"\n    {behind}\n    other.append" in result.text
    (printed, before), (printed_new, after) = run(text), run(result.text)
    assert printed_new == printed
    assert all(after["state"][key].equal(value) for key, value in before["state"].items())


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("kept.append(loss)", "not one value"),
        ("kept.append(loss.item() / 2)", "not one value"),
        ("kept.append(round(loss.item(), 4))", "not one value"),
        ("kept.append((step, loss.item()))", "not one value"),
        ("self.kept.append(loss.item())", "no plain list"),
        ("kept[epoch].append(loss.item())", "no plain list"),
        ("make().append(loss.item())", "no plain list"),
        ("kept.append(thing.item())", "cannot be told"),
        ("kept.extend(loss.tolist())", "no append"),
        ("kept += [loss.item()]", "no append"),
    ],
)
def test_lists_that_are_refused(line: str, word: str) -> None:
    text = f"kept = []\nfor epoch in range(3):\n    {line}\n"
    assert word in refusal(text, "collect-device", line)


def test_lists_outside_of_a_loop_are_refused() -> None:
    assert "no loop" in refusal("kept = []\nkept.append(loss.item())\n", "collect-device", "append")
    text = "for a in b:\n    kept.append(loss.item())\n"
    assert "is kept, not other" in refusal(text, "collect-device", "append", name="other")


def test_two_appends_are_converted_once() -> None:
    text = "for x in y:\n    if x:\n        kept.append(loss.item())\n    else:\n        kept.append(loss.item())\n"
    new = apply(apply(text, "collect-device", "kept").text, "collect-device", "loss.item()").text
    assert new.count("kept[:] =") == 1
    assert ".item()" not in new


@pytest.mark.parametrize(
    "line",
    ["g = torch.cuda.CUDAGraph()", "with torch.cuda.graph(g): pass", "f = torch.cuda.make_graphed_callables(f, x)",
     "model = torch.compile(model, mode='reduce-overhead')", "model = torch.compile(model, mode=\"max-autotune\")",
     "from torch.cuda.graphs import graph"],
)  # fmt: skip
def test_never_under_cuda_graphs(line: str) -> None:
    text = f"import torch\n{line}\nkept, total = [], 0.0\nfor x in y:\n"
    text += "    kept.append(loss.item())\n    total += loss.item()\n"
    assert "CUDA graphs" in refusal(text, "collect-device", "kept.append")
    assert "CUDA graphs" in refusal(text, "device-accumulator", "total +=")
    plain = text.replace(line, "model = torch.compile(model, mode='max-autotune-no-cudagraphs')")
    assert apply(plain, "device-accumulator", "total +=").applied


# sums that are shown as numbers


@pytest.mark.parametrize(
    "show",
    ["print('mean', total / 3, total)", "print(round(total, 3), str(total), f'{total!r} {max(total, 1)}')",
     "print('%s %d' % (total, total), f'{total:.3f}')", "shown = total / 3; print(shown, [total], {'a': total})",
     "print(repr(total) if total else None)"],
)  # fmt: skip
@pytest.mark.parametrize("sum_of", ["loss.item()", "(pred.argmax(1) == y).sum().item()"])
def test_rare_reads_get_a_number(show: str, sum_of: str) -> None:
    text = SUM.replace("START", "0").replace("SUM", f"total += {sum_of}").replace("print(SHOW)", show)
    result = apply(text, "device-accumulator", sum_of, name="total", arguments={"convert": True})
    assert result.refused == ()
    (printed, before), (printed_new, after) = run(text), run(result.text)
    assert printed_new == printed
    assert all(after["state"][key].equal(value) for key, value in before["state"].items())


def test_only_rare_reads_get_a_number() -> None:
    text = textwrap.dedent("""\
        for step in range(9):
            total += loss.item()
            mean = total / 2
            if total > 3:
                print(f"{total:.2f} {total / 2:.3f}", total, box.total, f(total=total))
                total = total * 0.5
                total += 1
            bar.set_postfix(loss=total)
        """)
    new = apply(text, "device-accumulator", "total +=", arguments={"convert": True}).text
    assert new == textwrap.dedent("""\
        for step in range(9):
            total += loss.detach().double()
            mean = total / 2
            if total > 3:
                print(f"{total:.2f} {total / 2:.3f}", float(total), box.total, f(total=float(total)))
                total = total * 0.5
                total += 1
            bar.set_postfix(loss=float(total))
        total = float(total)
        """)


# copies from pinned memory

MADE = "x = torch.stack(rows)"


def pinned(*lines: str, head: str = "import torch\n") -> str:
    text = head + "for step in range(9):\n" + "".join(f"    {line}\n" for line in lines)
    result = apply(text, "pin-copy", lines[-1])
    assert result.refused == (), result.refused
    return result.text.split("range(9):\n")[1]


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        ([MADE, "y = x.to(device)"], "y = x.pin_memory().to(device, non_blocking=True)"),
        ([MADE, "y = x.cuda()"], "y = x.pin_memory().cuda(non_blocking=True)"),
        ([MADE, "y = x.float().to(device)"], "y = x.float().pin_memory().to(device, non_blocking=True)"),
        ([MADE, "y = (x + 1).to(device)"], "y = (x + 1).pin_memory().to(device, non_blocking=True)"),
        ([MADE, "y = x.to(device, non_blocking=True)"], "y = x.pin_memory().to(device, non_blocking=True)"),
        (["y = torch.tensor(row).to('cuda')"], "y = torch.tensor(row).pin_memory().to('cuda', non_blocking=True)"),
        (["f(torch.from_numpy(a[i:j]).to(device))"],
         "f(torch.from_numpy(a[i:j]).pin_memory().to(device, non_blocking=True))"),
        ([MADE, "x, y = x.to(device), x[0].to(device)"],
         "x, y = x.pin_memory().to(device, non_blocking=True), x[0].pin_memory().to(device, non_blocking=True)"),
    ],
)  # fmt: skip
def test_pinned_in_place(lines: list[str], last: str) -> None:
    assert pinned(*lines).splitlines()[-1] == f"    {last}"


def test_a_script_that_also_runs_without_a_gpu_pins_under_a_test() -> None:
    head = "import torch\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    assert pinned(MADE, "x = x.to(device)", head=head) == (
        f"    {MADE}\n    if torch.cuda.is_available():\n        x = x.pin_memory()\n"
        "    x = x.to(device, non_blocking=True)\n"
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("for s in a:\n    x = batch['x'].to(device)\n", "cannot be told"),
        ("for x in a:\n    x = x.to(device)\n", "cannot be told"),
        ("def f(x):\n    return x.to(device)\n", "cannot be told"),
        ("for s in a:\n    x = tokenizer(s)\n    x = x.to(device)\n", "cannot be told"),
        ("for s in a:\n    x = torch.nn.Linear(3, 3)\n    x = x.to(device)\n", "cannot be told"),
        ("for s in a:\n    x = torch.ones(3, device=dev)\n    y = x.to(device)\n", "cannot be told"),
        ("for s in a:\n    x = torch.ones(3)\n    x = other(x)\n    y = x.to(device)\n", "cannot be told"),
        ("for s in a:\n    x = torch.ones(3)\n    y = x.to(torch.float16)\n", "no copy"),
        ("for s in a:\n    x = torch.ones(3)\n    y = x.to(device, non_blocking=False)\n", "no copy"),
        ("x = torch.ones(3)\nfor s in a:\n    y = x.to(device)\nz = 'cpu'\n", "made elsewhere"),
        ("for s in a:\n    x = torch.ones(3)\n    y = x.to(device)\n    x.add_(1)\nz = 'cpu'\n", "in place"),
        ("for s in a:\n    y = torch.ones(3).to(device)\nz = 'cpu'\n", "has no name"),
        ("for s in a:\n    x = torch.ones(3)\n    if s: y = x.to(device)\nz = 'cpu'\n", "compound"),
        ("for s in a:\n    x = torch.ones(3)\n    if x.to(device): s()\nz = 'cpu'\n", "compound"),
        ("for s in a:\n    x = torch.ones(3)\n    y = [x.to(device) for _ in s]\nz = 'cpu'\n", "nested"),
    ],
)
def test_copies_that_are_not_pinned(text: str, word: str) -> None:
    part = next(line for line in text.split("\n") if ".to(device" in line or ".to(torch" in line).strip()
    assert word in refusal("import torch\n" + text, "pin-copy", part)


# arguments and settings


@pytest.mark.parametrize(
    ("head", "call", "wanted", "new"),
    [
        ("import torch", "torch.optim.Adam(p)", {"fused": True}, "torch.optim.Adam(p, fused=True)"),
        ("from torch import optim", "optim.AdamW(p, lr=1)", {"fused": True}, "optim.AdamW(p, lr=1, fused=True)"),
        ("from torch.optim import SGD as S", "S(p, lr=1, fused=False)", {"fused": True}, "S(p, lr=1, fused=True)"),
        ("", "opt.zero_grad(set_to_none=False)", {"set_to_none": None}, "opt.zero_grad()"),
        ("from torch.nn.parallel import DistributedDataParallel as D", "D(m, find_unused_parameters=True, dim=0)",
         {"find_unused_parameters": None}, "D(m, dim=0)"),
        ("import torch", "torch.nn.parallel.DistributedDataParallel(m)", {"gradient_as_bucket_view": True},
         "torch.nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True)"),
    ],
)  # fmt: skip
def test_arguments(head: str, call: str, wanted: dict[str, bool | None], new: str) -> None:
    assert apply(f"{head}\nx = {call}\n", "call-argument", "x =", arguments=wanted).text == f"{head}\nx = {new}\n"


@pytest.mark.parametrize(
    ("call", "name", "word"),
    [
        ("torch.optim.Adam(p, foreach=True)", "fused", "sets foreach"),
        ("torch.optim.Adam(p, fused=True)", "fused", "already"),
        ("torch.optim.Adam(**options)", "fused", "not known"),
        ("torch.optim.RMSprop(p)", "fused", "not one call"),
        ("mine.Adam(p)", "fused", "not one call"),
        ("[torch.optim.Adam(p), torch.optim.Adam(q)]", "fused", "not one call"),
        ("torch.optim.Adam(p)", "lr", "not an argument"),
    ],
)
def test_arguments_that_are_refused(call: str, name: str, word: str) -> None:
    assert word in refusal(f"import torch\nx = {call}\n", "call-argument", "x =", arguments={name: True})


@pytest.mark.parametrize("name", ["torch.backends.cudnn.benchmark", "torch.set_float32_matmul_precision"])
def test_settings(name: str) -> None:
    head = '"""Doc."""\nfrom __future__ import annotations\nimport os\nimport torch, sys  # c\nx = 1\nimport re\n'
    text = f"{head}\ndef f(): pass\n"
    result = apply(text, "setting", "import re", name=name)
    assert result.text.startswith(f"{head}{name}")
    _, space = run(result.text)
    assert space["torch"].backends.cudnn.benchmark == ("benchmark" in name)
    space["torch"].backends.cudnn.benchmark = False
    assert space["torch"].get_float32_matmul_precision() == ("high" if "matmul" in name else "highest")
    space["torch"].set_float32_matmul_precision("highest")
    assert "sets it itself" in refusal(result.text, "setting", "import re", name=name)
    assert "do not end" in refusal(text, "setting", "import os", name=name)
    assert "do not end" in refusal("from torch import nn\n", "setting", "import", name=name)
    assert "not a setting" in refusal(text, "setting", "import re", name="os.environ")
