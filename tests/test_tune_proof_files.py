"""Files that a command writes: listed with checksums inside the overlay and without one, and compared by the proof."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpudoctor.model import Change, Edit, ProofResult, Watched
from gpudoctor.tune.proof import Run, prove, wrong_file
from gpudoctor.tune.runner import CommandRunner
from gpudoctor.tune.sandbox import Sandbox, open_sandbox
from gpudoctor.tune.vetting import Vetting

SCRIPT = """\
import os
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4))
model = nn.Linear(4, 3).eval()
out = Path("predictions")
out.mkdir(exist_ok=True)
loader = DataLoader(data, batch_size=8)
total = 0.0
with torch.no_grad():
    for number, (x,) in enumerate(loader):
        total += model(x).mean().item()
        torch.save(model(x), out / f"{number}.pt")
(out / "odd\\nname.txt").write_text(f"{total:.6f}")
Path("old.txt").unlink()
print("saved")
"""


class Book:
    proof: ProofResult | None = None


def runner(folder: Path, sandbox: Sandbox, text: str = SCRIPT) -> CommandRunner:
    (folder / "infer.py").write_text(text)
    (folder / "old.txt").write_text("old")
    made = CommandRunner(
        [sys.executable, "infer.py"],
        cwd=folder,
        sandbox=sandbox,
        deadline=float("inf"),
        step_at=None,
        guard_writes=False,
        on_trial=lambda text: None,
    )
    made.natural_end, made.baseline_s = True, 20.0
    return made


def files_of(made: CommandRunner) -> dict[str, str] | None:
    watched, _, files = made.watch_to_its_end(made.plan((), steps=None, watch_calls=False), deadline_s=150)
    assert watched.exit_code == 0, watched.stderr_tail
    return files


def test_an_overlay_and_none_tell_the_same_files(tmp_path: Path) -> None:
    sandbox = open_sandbox(tmp_path)
    if sandbox.own is None:
        pytest.skip(f"no overlay on this system: {sandbox.reason}")
    inside = files_of(runner(tmp_path, sandbox))
    sandbox.close()
    assert (tmp_path / "old.txt").exists()
    assert not (tmp_path / "predictions").exists()
    outside = files_of(runner(tmp_path, Sandbox(tmp_path, None, "a test")))
    assert not (tmp_path / "old.txt").exists()
    assert inside is not None
    assert outside is not None
    assert outside.pop("predictions/odd?name.txt") == "removed"  # observe's list of writes is one name a line
    odd = inside.pop("predictions/odd\nname.txt")
    assert odd == hashlib.sha256((tmp_path / "predictions" / "odd\nname.txt").read_bytes()).hexdigest()
    assert inside == outside
    assert inside["old.txt"] == "removed"
    assert set(inside) == {"old.txt", *(f"predictions/{number}.pt" for number in range(3))}


def test_the_exit_code_stays_the_commands_while_files_are_listed(tmp_path: Path) -> None:
    sandbox = open_sandbox(tmp_path)
    made = runner(tmp_path, sandbox, "open('part', 'w').close()\nraise SystemExit(7)\n")
    watched, _, files = made.watch_to_its_end(made.plan((), steps=None, watch_calls=False), deadline_s=150)
    sandbox.close()
    assert watched.exit_code == 7
    assert files is not None
    assert "part" in files


def edit(name: str) -> Change:
    sums = Edit(kind="device-accumulator", site="infer.py:16", name="total")
    return Change(
        id="C1", rule="SYN001", site="infer.py:16", mechanism="sync", title=name, change_class="exact", edits=(sums,)
    )


def test_an_inference_script_is_proven_by_its_files(tmp_path: Path) -> None:
    """A sum kept on the device prints nothing else, but its file tells whether it is the same."""
    sandbox = open_sandbox(tmp_path)
    if sandbox.own is None:
        pytest.skip(f"no overlay on this system: {sandbox.reason}")
    book = Book()
    made = runner(tmp_path, sandbox)
    passed, refused = Vetting(made, book).vet((edit("total on the device"),))
    sandbox.close()
    assert passed, refused
    assert book.proof is not None
    assert book.proof.verdict == "identical"
    assert "written files" in book.proof.compared


def test_a_change_that_only_a_file_reveals_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = open_sandbox(tmp_path)
    if sandbox.own is None:
        pytest.skip(f"no overlay on this system: {sandbox.reason}")
    made = runner(tmp_path, sandbox)
    wrong = SCRIPT.replace("torch.save(model(x), out", "torch.save(model(x).half(), out")
    monkeypatch.setattr(made, "patched_texts", lambda changes: {"infer.py": (SCRIPT, wrong, (17,))} if changes else {})
    passed, refused = Vetting(made, Book()).vet((edit("saves half the bits"),))
    sandbox.close()
    assert not passed
    assert refused[0].reason == "the proof failed: the written file predictions/0.pt is another than before"


def run(files: Mapping[str, str] | None, *output: str) -> Run:
    return Run(watched=Watched(command=("t",), cwd="/", records=(), exit_code=0), output=output, files=files)


def judged(first: Mapping[str, str], changed: Mapping[str, str], second: Mapping[str, str]) -> ProofResult:
    return prove(run(first), run(changed), lambda: run(second), change_class="exact", epochs_crossed=True)


@pytest.mark.parametrize(
    ("first", "changed", "second", "verdict"),
    [
        ({"a": "1"}, {"a": "1"}, {"a": "1"}, "identical"),
        ({"a": "1"}, {"a": "2"}, {"a": "1"}, "different"),
        ({"a": "1"}, {}, {"a": "1"}, "different"),
        ({"a": "1"}, {"a": "1", "b": "1"}, {"a": "1"}, "different"),
        ({"a": "1"}, {"a": "removed"}, {"a": "1"}, "different"),
        ({"a": "1", "log": "3"}, {"a": "1", "log": "4"}, {"a": "1", "log": "5"}, "consistent"),
        ({"a": "1", "log": "3"}, {"a": "2", "log": "4"}, {"a": "1", "log": "5"}, "different"),
        ({"a": "1", "17:01": "3"}, {"a": "1", "17:02": "3"}, {"a": "1", "17:03": "3"}, "consistent"),
        ({"a": "1", "17:01": "3"}, {"a": "2", "17:02": "3"}, {"a": "1", "17:03": "3"}, "different"),
    ],
)
def test_files_are_asked_where_the_unchanged_command_repeats_them(
    first: dict[str, str], changed: dict[str, str], second: dict[str, str], verdict: str
) -> None:
    result = judged(first, changed, second)
    assert result.verdict == verdict, result
    if verdict == "different":
        assert wrong_file(run(first), run(changed), run(second)) in {*first, *changed}
        assert (result.reason or "").startswith("the written file ")


def test_a_stochastic_change_may_write_other_files() -> None:
    result = prove(
        run({"a": "1"}, "x"), run({"a": "2"}, "x"), lambda: None, change_class="stochastic", epochs_crossed=True
    )
    assert result.verdict == "not provable"  # nothing but files to compare, and those may differ
