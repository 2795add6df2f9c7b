"""Loaders under watch: overrides, proof of what was delivered, the fetch probe, loops that end early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from observe_support import LOOP, only, watch_text

from gpudoctor.model import LoaderOverride, ProofPlan

LOADER_LINE = LOOP.splitlines().index("loader = DataLoader(data, batch_size=8, shuffle=True)") + 1


def override(**arguments: Any) -> tuple[LoaderOverride, ...]:
    return (LoaderOverride(site=f"train.py:{LOADER_LINE}", arguments=arguments),)


def test_persistent_workers_live_over_epochs(tmp_path: Path) -> None:
    pids = "import os\nclass Rows(TensorDataset):\n"
    pids += "    def __getitem__(self, i):\n        return os.getpid(), self.tensors[1][i]\n"
    text = LOOP.replace("data = TensorDataset", pids + "data = Rows").replace("model(x)", "model(seen(x))")
    text = text.replace(
        "def train",
        "workers = set()\ndef seen(x):\n    workers.update(x.tolist())\n    return torch.ones(8, 8)\ndef train",
    )
    text += "train(3)\nprint(len(workers))\n"
    line = next(number for number, row in enumerate(text.splitlines(), 1) if row.startswith("loader ="))
    seen = []
    for persistent in (False, True):
        arguments = {"num_workers": 2, "persistent_workers": persistent, "prefetch_factor": 3, "in_order": False}
        overrides = (LoaderOverride(site=f"train.py:{line}", arguments=arguments),)
        output = tmp_path / f"log{persistent}"
        watched = watch_text(tmp_path, text, loaders=overrides, output=output)
        (loader,) = only(watched).loaders
        assert (loader.overridden, loader.num_workers, loader.prefetch_factor) == (True, 2, 3)
        assert (loader.persistent_workers, loader.in_order, loader.batches) == (persistent, False, 12)
        assert only(watched).notes == ()
        seen.append(output.read_text())
    assert seen == ["6\n", "2\n"]


def test_workers_can_be_taken_away(tmp_path: Path) -> None:
    text = (
        LOOP.replace("shuffle=True", "num_workers=2, prefetch_factor=4, persistent_workers=True, timeout=30")
        + "train(2)\n"
    )
    (loader,) = only(watch_text(tmp_path, text, loaders=override(num_workers=0, pin_memory=False))).loaders
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    assert loader.batches == 8


def test_an_override_for_another_line_changes_nothing(tmp_path: Path) -> None:
    elsewhere = (LoaderOverride(site="train.py:1", arguments={"num_workers": 2}),)
    (loader,) = only(watch_text(tmp_path, LOOP + "train(1)\n", loaders=elsewhere)).loaders
    assert (loader.overridden, loader.num_workers, loader.shuffle, loader.length) == (False, 0, True, 4)
    assert (loader.dataset_class, loader.dataset_len, loader.sampler_class) == ("TensorDataset", 32, "RandomSampler")
    assert (loader.batch_bytes, loader.samples, loader.role) == (8 * 8 * 4 + 8 * 8, 32, "train")


def test_proof_repeats_and_tells_runs_apart(tmp_path: Path) -> None:
    text = LOOP.replace("torch.manual_seed(0)\n", "")
    runs = {
        "base": watch_text(tmp_path, text + "train(2)\n", proof=ProofPlan(seed=3)),
        "workers": watch_text(
            tmp_path, text + "train(2)\n", proof=ProofPlan(seed=3), loaders=override_at(text, num_workers=2)
        ),
        "seed": watch_text(tmp_path, text + "train(2)\n", proof=ProofPlan(seed=4)),
        "unshuffled": watch_text(
            tmp_path, text.replace("shuffle=True", "shuffle=False") + "train(2)\n", proof=ProofPlan(seed=3)
        ),
    }
    proofs = {name: only(watched).proof for name, watched in runs.items()}
    base = proofs["base"]
    assert base is not None
    assert base == proofs["workers"]
    assert base.parameters is not None
    assert (len(base.batches), len(base.rows), len(base.order), base.shuffled, base.duplicates) == (8, 2, 2, True, 0)
    assert len(set(base.batches)) == 8
    assert base.rows[0] == base.rows[1]
    assert base.order[0] != base.order[1]
    seed, unshuffled = proofs["seed"], proofs["unshuffled"]
    assert seed is not None
    assert (seed.parameters != base.parameters, seed.rows == base.rows, seed.order != base.order) == (True, True, True)
    assert unshuffled is not None
    assert (unshuffled.shuffled, unshuffled.rows == base.rows) == (False, True)


def override_at(text: str, **arguments: Any) -> tuple[LoaderOverride, ...]:
    line = next(number for number, row in enumerate(text.splitlines(), 1) if row.startswith("loader ="))
    return (LoaderOverride(site=f"train.py:{line}", arguments=arguments),)


def test_proof_stops_at_the_steps_with_their_rows_only(tmp_path: Path) -> None:
    plans = [{}, {"loaders": override(num_workers=2, prefetch_factor=4)}]
    proofs = [
        only(watch_text(tmp_path, LOOP + "train(9)\n", steps=6, proof=ProofPlan(), **plan)).proof for plan in plans
    ]
    assert proofs[0] == proofs[1]
    assert proofs[0] is not None
    assert (len(proofs[0].batches), len(proofs[0].rows)) == (6, 2)


ROWS = """\
import random
class Rows:
    def __init__(self, get): self.x, self.y, self.get = torch.randn(32, 8), torch.zeros(32).long(), get
    def __len__(self): return 32
    def __getitem__(self, i): return self.get(self.x, i), self.y[i]
"""
PROBED = """\
for get in (
    lambda x, i: x[i],
    lambda x, i: x[i] + random.random(),
    lambda x, i: x[int(i)],
    lambda x, i: x[i] / x[i].max(),
):
    loader = DataLoader(Rows(get), batch_size=8)
    train(1)
"""


def test_fetch_probe_finds_what_can_be_indexed_at_once_and_what_forbids_it(tmp_path: Path) -> None:
    record = only(watch_text(tmp_path, LOOP + ROWS + PROBED, probe_fetch=True))
    plain, random, scalar, scaled = [loader.fetch_probe for loader in record.loaders[1:]]
    assert plain is not None
    assert (plain.rows, plain.equal, plain.draws_random, plain.repeatable, plain.error) == (8, True, False, True, None)
    assert plain.row_by_row_ms > 0
    assert plain.whole_batch_ms > 0
    assert random is not None
    assert (random.equal, random.draws_random, random.repeatable) == (False, True, False)
    assert scalar is not None
    assert (scalar.equal, scalar.draws_random, scalar.repeatable) == (False, False, True)
    assert scalar.error is not None
    assert scalar.error.startswith("TypeError")
    assert scaled is not None
    assert (scaled.equal, scaled.repeatable, scaled.error) == (False, True, None)


def test_fetch_probe_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    draws = ROWS + "random.seed(1)\ndata = Rows(lambda x, i: print('row', random.random(), torch.rand(1)) or x[i])\n"
    text = LOOP.replace("loader =", f"{draws}loader =") + "train(1)\nprint(random.random(), torch.rand(1))\n"
    outputs = []
    for probe in (False, True):
        output = tmp_path / f"log{probe}"
        watch_text(tmp_path, text, probe_fetch=probe, output=output)
        outputs.append(output.read_text())
    assert outputs[0] == outputs[1]


def test_loops_can_be_shortened_so_that_what_follows_runs(tmp_path: Path) -> None:
    output = tmp_path / "log"
    text = LOOP + "train(3)\nprint('after', sum(1 for _ in loader))\n"
    watched = watch_text(tmp_path, text, end_loop_after=2, steps=1, output=output)
    record = only(watched)
    assert (watched.stopped, len(record.steps), output.read_text()) == ("exit", 6, "after 2\n")


@pytest.mark.parametrize("arguments", [{"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_loops_with_workers_can_be_shortened(tmp_path: Path, arguments: dict[str, Any]) -> None:
    watched = watch_text(tmp_path, LOOP + "train(3)\n", end_loop_after=2, loaders=override(**arguments))
    assert (watched.exit_code, len(only(watched).steps)) == (0, 6)
