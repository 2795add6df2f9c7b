"""The proof: wrong patches planted into a real script are caught, right ones pass, each run under observe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpudoctor import observe
from gpudoctor.model import (
    ChangeClass,
    PatchedSource,
    Proof,
    ProofPlan,
    ProofResult,
    Step,
    Watched,
    WatchPlan,
    WatchRecord,
)
from gpudoctor.tune.proof import Run, prove

STREAM = """\
import torch
from torch.utils.data import DataLoader, IterableDataset
class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(32.0).split(1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for x in DataLoader(Stream(), batch_size=8):
    model(x).mean().backward()
    optimizer.step()
"""
SCRIPT = Path(__file__).parent / "scripts" / "proof" / "train.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proof")
    (path / "train.py").write_text(SCRIPT.read_text())
    return path


def proof_run(folder: Path, text: str | None = None) -> Run:
    script = folder / "train.py"
    patched = ()
    if text is not None:
        old = script.read_text().splitlines()
        new = text.splitlines()
        changed = tuple(n for n, line in enumerate(new, start=1) if n > len(old) or line != old[n - 1])
        patched = (PatchedSource(path=str(script), text=text, lines=changed),)
    output = folder / f"output-{len(list(folder.iterdir()))}"
    plan = WatchPlan(record_dir="", patched=patched, watch_calls=False, proof=ProofPlan(seed=0))
    watched = observe.watch([sys.executable, "train.py"], plan, cwd=folder, deadline_s=150, output=output)
    return Run(watched=watched, output=tuple(output.read_text().splitlines()))


@pytest.fixture(scope="module")
def baseline(folder: Path) -> Run:
    run = proof_run(folder)
    assert run.watched.exit_code == 0
    assert run.watched.records[0].proof is not None
    assert run.watched.records[0].proof.parameters
    return run


def judge(folder: Path, baseline: Run, *edits: tuple[str, str], change_class: ChangeClass = "exact") -> ProofResult:
    text = SCRIPT.read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    candidate = proof_run(folder, text)
    return prove(baseline, candidate, lambda: proof_run(folder), change_class=change_class, epochs_crossed=True)


LOOP = "for inputs, labels in loader:"
PLANTED: dict[str, list[tuple[str, str]]] = {
    "dropped last batch": [("shuffle=True)", "shuffle=True, drop_last=True)")],
    "a batch used twice": [
        (LOOP, "for inputs, labels in (b for n, b in enumerate(loader) for _ in range(1 + (n == 2))):")
    ],
    "read before the event": [("            copied.synchronize()\n", "")],
    "lost shuffle": [("shuffle=True)", "shuffle=False)")],
    "moved zero_grad": [
        ("            optimizer.zero_grad()\n", ""),
        ("            optimizer.step()\n", "            optimizer.zero_grad()\n            optimizer.step()\n"),
    ],
    "crash after the loop": [("{total / 14:.6f}", "{total.item() / 14:.6f}")],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_wrong_patch_is_caught(name: str, folder: Path, baseline: Run) -> None:
    result = judge(folder, baseline, *PLANTED[name])
    assert result.verdict == "different", result
    assert result.reason


@pytest.mark.parametrize("name", ["dropped last batch", "lost shuffle", "crash after the loop"])
def test_wrong_rows_are_caught_under_a_stochastic_change_too(name: str, folder: Path, baseline: Run) -> None:
    assert judge(folder, baseline, *PLANTED[name], change_class="stochastic").verdict == "different"


def test_right_changes_are_identical(folder: Path, baseline: Run) -> None:
    edits = [
        ("total = 0.0", "total = torch.zeros((), dtype=torch.float64)"),
        ("total += loss.item()", "total += loss.detach().double()"),
        ("shuffle=True)", "shuffle=True, num_workers=1)"),
    ]
    result = judge(folder, baseline, *edits)
    assert result.verdict == "identical", result
    assert {"parameters", "batches", "rows", "console output"} <= set(result.compared)


def test_a_script_that_does_not_repeat_itself_is_consistent_at_best(folder: Path) -> None:
    restless = SCRIPT.read_text().replace("= 0.1 / (1.0", "= 0.1 / (1.0 + time.time() % 1e-3")
    first = proof_run(folder, restless)
    second = proof_run(folder, restless.replace("total += loss.item()", "total += loss.detach()"))
    result = prove(first, second, lambda: proof_run(folder, restless), change_class="exact", epochs_crossed=True)
    assert result.verdict == "consistent", result
    assert "parameters" in (result.reason or "")


@pytest.mark.parametrize(
    ("printed", "verdict"),
    [
        ("mean loss 1.101235", "consistent"),  # another last digit, where two unchanged runs agreed by chance
        ("mean loss 1.301234", "different"),
        ("mean loss 1.101234 of 13", "different"),
    ],
)
def test_a_number_on_which_restless_runs_agree_by_chance(printed: str, verdict: str) -> None:
    def made(parameters: str, line: str) -> Run:
        proof = Proof(parameters=parameters, rows=("a",), batches=("b",))
        record = WatchRecord(pid=1, optimizer_steps_all=14, batches=14, steps=(Step(wall_ms=1.0),) * 14, proof=proof)
        return Run(watched=Watched(command=("python",), cwd="", records=(record,), exit_code=0), output=(line,))

    base, again = made("p1", "mean loss 1.101234"), made("p2", "mean loss 1.101234")
    found = prove(base, made("p3", printed), lambda: again, change_class="exact", epochs_crossed=True)
    assert found.verdict == verdict, found
    repeats = made("p1", "mean loss 1.101234")
    strict = prove(base, made("p1", printed), lambda: repeats, change_class="exact", epochs_crossed=True)
    assert strict.verdict == "different", strict  # a script that repeats itself must print the same


def test_within_the_first_epoch_the_order_of_its_rows_is_what_other_draws_must_keep(folder: Path) -> None:
    def cut(text: str) -> Run:
        script = folder / "cut.py"
        script.write_text(text)
        plan = WatchPlan(record_dir="", steps=3, watch_calls=False, proof=ProofPlan(seed=0))
        watched = observe.watch([sys.executable, "cut.py"], plan, cwd=folder, deadline_s=150)
        assert watched.records[0].proof is not None
        assert watched.records[0].proof.complete in ((False,), ())
        return Run(watched=watched, output=())

    text = SCRIPT.read_text()
    base = cut(text)
    same = prove(base, cut(text), lambda: base, change_class="stochastic", epochs_crossed=False)
    assert same.verdict == "consistent", same
    assert "first epoch's order" in same.compared
    assert "the window did not cross an epoch boundary" in (same.reason or "")
    in_order = cut(text.replace("shuffle=True", "shuffle=False"))
    assert prove(base, in_order, lambda: base, change_class="stochastic", epochs_crossed=False).verdict == "different"


def test_what_an_iterable_dataset_yields_has_no_rows_to_agree_on(folder: Path) -> None:
    (folder / "stream.py").write_text(STREAM)
    plan = WatchPlan(record_dir="", watch_calls=False, proof=ProofPlan(seed=0))
    watched = observe.watch([sys.executable, "stream.py"], plan, cwd=folder, deadline_s=150)
    (record,) = watched.records
    assert record.proof is not None
    assert (len(record.proof.batches), record.proof.rows, record.proof.order) == (4, (), ())
    run = Run(watched=watched, output=())
    assert prove(run, run, lambda: run, change_class="stochastic", epochs_crossed=False).verdict == "not provable"
    assert prove(run, run, lambda: run, change_class="exact", epochs_crossed=False).verdict == "identical"


def test_a_restless_script_still_reveals_a_dropped_batch(folder: Path) -> None:
    restless = SCRIPT.read_text().replace("= 0.1 / (1.0", "= 0.1 / (1.0 + time.time() % 1e-3")
    first = proof_run(folder, restless)
    second = proof_run(folder, restless.replace("shuffle=True)", "shuffle=True, drop_last=True)"))
    result = prove(first, second, lambda: proof_run(folder, restless), change_class="exact", epochs_crossed=True)
    assert result.verdict == "different", result


def test_rarer_output_is_proven_by_parameters_and_batches(folder: Path, baseline: Run) -> None:
    rarer = ('    print(f"mean', '    if total < 0:\n        print(f"mean')
    assert judge(folder, baseline, rarer, change_class="logging").verdict == "identical"
    assert judge(folder, baseline, rarer, change_class="exact").verdict == "different"
    wrong = judge(folder, baseline, rarer, *PLANTED["moved zero_grad"], change_class="logging")
    assert wrong.verdict == "different"
