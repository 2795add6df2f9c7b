"""Between search and confirmation: code that is rewritten must be seen to run past the end of its loop."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpudoctor.model import Change, Edit, ProofResult
from gpudoctor.tune.loops import loops_around
from gpudoctor.tune.runner import CommandRunner
from gpudoctor.tune.sandbox import Sandbox
from gpudoctor.tune.vetting import Vetting

# The loop counts steps: loaders that end early do not end it.
SCRIPT = """\
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step, total = 0, 0.0
while step < STEPS:
    time.sleep(EPOCH_S)
    for (x,) in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
        step += 1
        if step == STEPS:
            break
print(f"{total / step:.4f}")
"""


class Book:
    proof: ProofResult | None = None


def change(number: int, kind: str, mechanism: str) -> Change:
    if kind == "device-accumulator":
        edit = Edit(kind="device-accumulator", site="train.py:15", name="total")
    else:
        edit = Edit(kind="loader-arguments", site="train.py:5", arguments={"num_workers": 1})
    return Change(
        id=f"C{number}", rule="SYN001", site=edit.site, mechanism=mechanism, title=kind, change_class="exact",
        edits=(edit,),
    )  # fmt: skip


SUM = change(1, "device-accumulator", "sync")
LOADER = change(2, "loader-arguments", "loader")


def vetted(
    folder: Path,
    changes: Sequence[Change],
    *,
    steps: int,
    epoch_s: float,
    whole_s: float | None,
    baseline_s: float,
    after: str = "",
) -> tuple[CommandRunner, Book, tuple[tuple[Change, ...], tuple[Change, ...]], list[str]]:
    text = SCRIPT.replace("STEPS", str(steps)).replace("EPOCH_S", str(epoch_s)) + after
    (folder / "train.py").write_text(text)
    said: list[str] = []
    made = CommandRunner(
        [sys.executable, "train.py"], cwd=folder, sandbox=Sandbox(folder, None, "a test"), deadline=float("inf"),
        step_at=None, guard_writes=False, on_trial=said.append,
    )  # fmt: skip
    made.steps, made.whole_s, made.baseline_s = 20, whole_s, baseline_s
    book = Book()
    return made, book, Vetting(made, book).vet(tuple(changes)), said


def test_a_command_that_was_seen_to_end_runs_to_its_end_unshortened(tmp_path: Path) -> None:
    _, book, (passed, refused), said = vetted(tmp_path, [SUM], steps=80, epoch_s=1.0, whole_s=10.0, baseline_s=4.0)
    assert passed == (SUM,), refused
    assert said == ["proof: unchanged", "proof: changed", "proof: past the end of the loop"]
    assert book.proof is not None
    assert book.proof.verdict == "identical"


def test_where_the_whole_command_is_hardly_longer_than_its_window_the_proof_goes_to_the_end(tmp_path: Path) -> None:
    _, book, (passed, refused), said = vetted(tmp_path, [SUM], steps=80, epoch_s=0.1, whole_s=6.0, baseline_s=5.0)
    assert passed == (SUM,), refused
    assert said == ["proof: unchanged", "proof: changed"]
    assert book.proof is not None
    assert "written files" in book.proof.compared or "console output" in book.proof.compared


def test_what_cannot_be_seen_past_its_loop_goes_and_what_rewrites_no_code_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is the code after the loop that does not come to an end."""
    changes = (SUM, LOADER)
    monkeypatch.setattr("gpudoctor.tune.vetting.PATIENCE", 1.0)  # of the run past the loop: 10 s at least
    monkeypatch.setattr("gpudoctor.tune.vetting.GRACE_S", 120.0)
    _, book, (passed, refused), said = vetted(
        tmp_path, changes, steps=100_000, epoch_s=0.5, whole_s=None, baseline_s=4.0, after="time.sleep(600)"
    )
    assert passed == (LOADER,)
    assert [item.id for item in refused] == ["C1"]
    assert (refused[0].reason or "").startswith("not proven past the end of its loop: the command was still running")
    assert said.count("proof: past the end of the loop") == 1
    assert book.proof is not None


def test_a_loop_of_a_hundred_thousand_steps_is_left_early(tmp_path: Path) -> None:
    _, book, (passed, refused), said = vetted(
        tmp_path, [SUM], steps=100_000, epoch_s=0.1, whole_s=None, baseline_s=4.0, after="print('after', total)"
    )
    assert passed == (SUM,), refused
    assert said[-1] == "proof: past the end of the loop"
    assert book.proof is not None


def test_what_breaks_only_after_such_a_loop_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edit is a wrong one: the sum stays a tensor that needs gradients, which numpy does not take."""
    wrong = SCRIPT.replace("STEPS", "100000").replace("EPOCH_S", "0.1").replace("loss.item()", "loss")
    after = "import numpy\nnumpy.asarray(total)"
    monkeypatch.setattr(
        CommandRunner,
        "patched_texts",
        lambda self, changes: {"train.py": (self.text("train.py"), wrong + after, (16,))} if changes else {},
    )
    _, _, (passed, refused), _ = vetted(
        tmp_path, [SUM], steps=100_000, epoch_s=0.1, whole_s=None, baseline_s=4.0, after=after
    )
    assert not passed
    assert (refused[0].reason or "").startswith("the changed command failed after its loop: ")


def test_the_loops_in_which_training_goes_on() -> None:
    train = textwrap.dedent("""\
        class Trainer:
            def one_step(self, batch):
                for part in batch:
                    self.total += part
                loss = self.model(batch)
                loss.backward()
            def fit(self, loader):
                for epoch in range(90):
                    for batch in loader:
                        self.one_step(batch)
                    for batch in self.other:
                        self.check(batch)
                while False:
                    pass
        """)
    main = "from train import Trainer\nfor seed in range(3):\n    Trainer().fit(None)\nfor x in range(3): print(x)\n"
    assert loops_around({"train.py": train, "main.py": main}, {}) == {"train.py": (8, 9), "main.py": (2,)}
    infer = "for x in loader:\n    y = model(x)\n    print(y.item())\nfor y in done:\n    pass\n"
    assert loops_around({"infer.py": infer}, {"infer.py": (3,)}) == {"infer.py": (1,)}
    assert loops_around({"infer.py": infer}, {}) == {}
    assert loops_around({"broken.py": "for x in"}, {"broken.py": (1,)}) == {}
