"""propose: the waits of a loop become changes that are tried together, and those that need each other say so."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import pytest
from test_prescribe_changes import safe

from gpudoctor.model import Case, Change, CopySite, Gpu, SyncSite, Watched, WatchRecord
from gpudoctor.prescribe.changes import MECHANISMS, propose
from gpudoctor.prescribe.patch import apply_edits

# The loop of a script that shows its running figures at each step.
SHOWN = textwrap.dedent("""\
    import torch
    def main(args, loader, model, optimizer, criterion, device):
        step, running_loss, correct, seen = 0, 0.0, 0, 0
        while step < args.steps:
            for images, labels in loader:
                outputs = model(images)
                loss = criterion(outputs, labels)
                loss.backward()
                optimizer.step()
                running_loss += loss.item()
                correct += (outputs.argmax(1) == labels).sum().item()
                seen += labels.size(0)
                step += 1
                print(f"step {step} loss {running_loss / step:.4f} acc {correct / seen:.3f}")
                if step == args.steps:
                    break
    """)
# The loop of a script that makes its batches itself and waits in six places.
MADE = textwrap.dedent("""\
    import torch
    def get_batch(data, device):
        starts = torch.randint(len(data) - 9, (4,))
        x = torch.stack([data[s:s + 8] for s in starts])
        return x.to(device)
    def main(args, data, model, device="cuda" if torch.cuda.is_available() else "cpu"):
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for step in range(args.steps):
            x = get_batch(data, device)
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isnan(loss):
                raise RuntimeError("loss is nan")
            optimizer.step()
            losses.append(loss.item())
            torch.cuda.empty_cache()
            print(f"step {step} loss {loss.item():.4f} grad norm {norm.item():.3f}")
        return losses
    """)
FILE = "train.py"


def at(text: str, part: str) -> str:
    return f"{FILE}:{next(n for n, line in enumerate(text.splitlines(), 1) if part in line)}"


def sync(text: str, part: str, function: str = "item", waited: float = 100.0, **values: Any) -> SyncSite:
    calls = {"calls": 100, "on_device": 100, "calls_in_steps": 99, **values}
    return SyncSite(site=at(text, part), function=function, waited_ms=waited, **calls)


def copy(text: str, part: str, **values: Any) -> CopySite:
    known = {"function": "to", "kind": "h2d", "calls": 100, "calls_in_steps": 99, "waited_ms": 1.0, **values}
    return CopySite(site=at(text, part), **known)


def proposed(
    text: str, *syncs: SyncSite, copies: tuple[CopySite, ...] = (), allow: Any = (), **values: Any
) -> list[Change]:
    known = {"cuda": True, "device": "cuda:0", "torch": "2.11.0", "argv": (FILE,), "optimizer_steps": 100, **values}
    record = WatchRecord(pid=1, watched_s=10.0, syncs=syncs, copies=copies, **known)
    case = Case(
        watched=Watched(command=("python", FILE), cwd="/w", records=(record,)),
        gpus=(Gpu(index=0, compute_capability="9.0"),),
    )
    return list(propose(case, (), texts={FILE: text}, safe=safe, allow=allow))


SHOWN_SYNCS = (sync(SHOWN, "running_loss +=", waited=900.0), sync(SHOWN, "correct +="))
MADE_SYNCS = (
    sync(MADE, "isnan", "bool", 900.0),
    sync(MADE, "losses.append"),
    sync(MADE, "empty_cache", "empty_cache"),
    sync(MADE, "print", calls=200, on_device=200, calls_in_steps=198),
)


def only(changes: list[Change], kind: str) -> Change:
    (change,) = [change for change in changes if any(edit.kind == kind for edit in change.edits)]
    return change


def test_shown_sums_need_the_rarer_output() -> None:
    changes = proposed(SHOWN, *SHOWN_SYNCS)
    log = only(changes, "log-every")
    assert (log.change_class, log.mechanism, log.rule) == ("logging", "sync", "SYN003")
    assert log.title == f"output every 20 steps at {at(SHOWN, 'print')}"
    sums = [change for change in changes if change is not log]
    assert [change.edits[0].name for change in sums] == ["running_loss", "correct"]
    assert {(change.change_class, change.mechanism, change.needs) for change in sums} == {("exact", "sync", (log.id,))}
    text = apply_edits(SHOWN, [edit for change in changes for edit in change.edits], file=FILE).text
    assert "if step % 20 == 0 or step == args.steps:\n                print(" in text
    assert "running_loss += loss.detach().double()" in text
    assert "correct += (outputs.argmax(1) == labels).sum().double()" in text


def test_an_output_above_the_sum_moves_its_line() -> None:
    line = '            print(f"{running_loss:.4f}")\n            outputs = model(images)\n'
    text = SHOWN.replace("            outputs = model(images)\n", line)
    changes = proposed(text, sync(text, "running_loss +="))
    assert len(only(changes, "log-every").edits) == 2
    assert only(changes, "device-accumulator").needs == (only(changes, "log-every").id,)


def test_a_progress_bar_gets_a_number() -> None:
    text = SHOWN.replace('print(f"step {step} loss {running_loss / step:.4f} acc {correct / seen:.3f}")',
                         "bar.set_postfix(loss=running_loss / step)")  # fmt: skip
    changes = proposed(text, sync(text, "running_loss +="))
    assert only(changes, "device-accumulator").edits[0].arguments == {"convert": True}
    new = apply_edits(text, [edit for change in changes for edit in change.edits], file=FILE).text
    assert "bar.set_postfix(loss=float(running_loss) / step)" in new


def test_a_mean_that_is_shown() -> None:
    text = SHOWN.replace("step += 1", "step += 1\n            mean = running_loss / step")
    text = text.replace("{running_loss / step:.4f}", "{mean:.4f}")
    changes = proposed(text, sync(text, "running_loss +="))
    assert only(changes, "device-accumulator").needs == (only(changes, "log-every").id,)


def test_what_no_output_shows_needs_nothing() -> None:
    text = SHOWN.replace("acc {correct / seen:.3f}", "")
    changes = proposed(text, *(sync(text, part) for part in ("running_loss +=", "correct +=")))
    assert {change.edits[0].name: len(change.needs) for change in changes if change.edits[0].name} == {
        "running_loss": 1,
        "correct": 0,
    }


def test_every_wait_of_a_loop_without_loader() -> None:
    changes = proposed(MADE, *MADE_SYNCS, copies=(copy(MADE, "x.to(device)"),))
    assert {change.mechanism for change in changes} == {"sync"}  # one wait left would keep the whole stall
    classes = {edit.kind: change.change_class for change in changes for edit in change.edits}
    assert classes == {
        "log-every": "logging",
        "collect-device": "exact",
        "drop-call": "exact",
        "pin-copy": "exact",
    }
    assert {change.title for change in changes if change.change_class == "logging"} == {
        f"check for NaN every 20 steps at {at(MADE, 'isnan')}",
        f"output every 20 steps at {at(MADE, 'print')}",
    }
    result = apply_edits(MADE, [edit for change in changes for edit in change.edits], file=FILE)
    assert result.refused == ()
    assert "if (step % 20 == 0 or step == args.steps - 1) and torch.isnan(loss):" in result.text


def test_output_of_one_loop_is_one_change() -> None:
    text = MADE.replace("print(f", "writer.add_scalar('n', norm.item(), step)\n        print(f")
    changes = proposed(text, sync(text, "writer."), sync(text, "print", "format"), sync(text, "print"))
    assert [len(change.edits) for change in changes] == [2]
    new = apply_edits(text, changes[0].edits, file=FILE).text
    assert new.count("if step % 20") == 1


def test_several_lines_of_one_output_are_one_edit() -> None:
    text = MADE.replace("print(f", "print(\n            norm.item(),\n            f")
    places = [sync(text, "norm.item(),"), sync(text, "loss.item():.4f", "format")]
    (change,) = proposed(text, *places)
    assert [edit.site for edit in change.edits] == [at(text, "print(")]


@pytest.mark.parametrize(
    ("part", "function", "line", "word"),
    [
        ("if loss > 3", "bool", "if loss > 3: optimizer.step()", "torch.where"),
        ("while loss", "bool", "while loss > 3: loss = loss / 2", "torch.where"),
        ("if torch.isnan(x)", "bool", "if torch.isnan(x).any(): continue", "in the same step"),
        ("best = ", "item", "best = max(best, loss.item())", "no sum"),
        ("print(model", "item", "print(model(x).item())", "calls model"),
        ("print(x)", "repr", "if step % args.every == 0:\n            print(x)", "raise the number"),
    ],
)
def test_advice(part: str, function: str, line: str, word: str) -> None:
    text = MADE.replace("torch.cuda.empty_cache()", line)
    (change,) = proposed(text, sync(text, part, function))
    assert change.edits == ()
    assert word in (change.reason or "")
    assert change.rule in {"SYN001", "SYN002"}


@pytest.mark.parametrize(("part", "function"), [("loss.backward", "bool"), ("model(x)", "item"), ("norm =", "bool")])
def test_waits_inside_of_libraries_are_no_change(part: str, function: str) -> None:
    assert proposed(MADE, sync(MADE, part, function)) == []


def test_cuda_graphs_anywhere_keep_device_scalars_away() -> None:
    record = WatchRecord(pid=1, cuda=True, optimizer_steps=100, watched_s=10.0, syncs=SHOWN_SYNCS)
    case = Case(watched=Watched(command=("python", FILE), cwd="/w", records=(record,)))
    texts = {FILE: SHOWN, "model.py": "graph = torch.cuda.CUDAGraph()\n"}
    changes = propose(case, (), texts=texts, safe=safe)
    assert not any(edit.kind == "device-accumulator" for change in changes for edit in change.edits)
    assert "CUDA graphs" in (changes[0].reason or "")


def test_the_line_that_counts_steps_is_not_made_rarer() -> None:
    changes = proposed(MADE, *MADE_SYNCS, step_source="step-at", step_site=at(MADE, "print"))
    assert not any(change.title.startswith("output") and change.edits for change in changes)
    assert any("steps are counted at this line" in (change.reason or "") for change in changes)
    changes = proposed(SHOWN, *SHOWN_SYNCS, step_source="step-at", step_site=at(SHOWN, "print"))
    assert all(change.edits == () for change in changes)


# copies


def test_a_copy_alone_has_its_own_mechanism() -> None:
    (change,) = proposed(MADE, copies=(copy(MADE, "x.to(device)", waited_ms=500.0),))
    assert (change.mechanism, change.change_class, change.edits[0].kind) == ("copy", "exact", "pin-copy")
    assert proposed(MADE, copies=(copy(MADE, "x.to(device)"),)) == []  # too short


@pytest.mark.parametrize(
    "values",
    [
        {"pinned": 1},
        {"from_loader": True},
        {"calls_in_steps": 0},
        {"function": "copy_"},
        {"kind": "none"},
        {"kind": "d2h"},
    ],
)
def test_copies_that_are_left_alone(values: dict[str, Any]) -> None:
    assert proposed(MADE, copies=(copy(MADE, "x.to(device)", waited_ms=500.0, **values),)) == []


def test_a_copy_inside_of_a_library_call_is_left_alone() -> None:
    assert proposed(MADE, copies=(copy(MADE, "clip_grad_norm_", waited_ms=500.0),)) == []


def test_a_line_that_does_not_always_copy_is_left_alone() -> None:
    seen = copy(MADE, "x.to(device)", waited_ms=500.0)
    assert proposed(MADE, copies=(seen, dataclasses.replace(seen, kind="none", calls=1))) == []


# numerics and ranks


def test_numerics_only_when_allowed() -> None:
    text = "import torch\nfrom torchvision import models\n" + MADE.split("\n", 1)[1].replace(
        "optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"
    )
    assert proposed(text) == []
    changes = proposed(text, allow={"exact", "numerics"})
    assert {change.mechanism for change in changes} == {"optimizer", "gradients", "convolution", "matmul", "autocast"}
    assert {change.change_class for change in changes} == {"numerics"}
    new = apply_edits(text, [edit for change in changes for edit in change.edits], file=FILE).text
    assert "AdamW(model.parameters(), fused=True)" in new
    assert "optimizer.zero_grad()" in new
    assert new.index("cudnn.benchmark = True") < new.index("def get_batch")
    assert 'torch.set_float32_matmul_precision("high")' in new


@pytest.mark.parametrize(
    ("text", "values", "missing"),
    [
        (MADE, {}, {"convolution", "gradients"}),
        (MADE, {"cuda": False}, {"optimizer", "matmul"}),
        (MADE, {"device": "cpu"}, {"optimizer", "matmul"}),
        (MADE, {"torch": "1.13.1"}, {"optimizer"}),
        (MADE.replace("AdamW", "SGD"), {"torch": "2.2.0"}, {"optimizer"}),
        (MADE.replace("AdamW(", "AdamW(foreach=True, params="), {}, {"optimizer"}),
        (MADE.replace("import torch", "import torch\ntorch.backends.cuda.matmul.allow_tf32 = False"), {}, {"matmul"}),
        (MADE, {"argv": ("other.py",), "torch": None}, {"optimizer"}),
    ],
)
def test_numerics_that_are_not_offered(text: str, values: dict[str, Any], missing: set[str]) -> None:
    found = {change.mechanism for change in proposed(text, allow={"numerics"}, **values)}
    assert not found & missing
    assert found <= set(MECHANISMS)


DDP = textwrap.dedent("""\
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP
    def main(model, rank, data):
        torch.cuda.set_device(rank)
        sampler = torch.utils.data.DistributedSampler(data)
        return DDP(model, device_ids=[rank], find_unused_parameters=True)
    """)


def test_ranks() -> None:
    assert proposed(DDP) == []
    changes = proposed(DDP, world_size=2, backwards=400)
    patched = [change for change in changes if change.edits]
    assert {change.title for change in patched} == {"drop find_unused_parameters", "gradient_as_bucket_view=True"}
    assert {change.mechanism for change in changes} == {"ddp"}
    assert {change.rule for change in changes if not change.edits} == {"PLN013", "LDR022", "LCH017"}
    new = apply_edits(DDP, [edit for change in patched for edit in change.edits], file=FILE).text
    assert "DDP(model, device_ids=[rank], gradient_as_bucket_view=True)" in new
    good = DDP.replace("set_device(rank)", "set_device(local_rank)").replace("(data)", "(data).set_epoch(0)")
    good = good.replace("find_unused_parameters=True", "gradient_as_bucket_view=True")
    assert proposed(good, world_size=2) == []
