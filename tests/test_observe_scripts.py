"""The twenty watched scripts: steps, sites and overrides of each (scripts of our own construction, tests/scripts).

Run this file itself (`python tests/test_observe_scripts.py`) to print the table.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpudoctor.model import LoaderOverride, Watched, WatchPlan, WatchRecord
from gpudoctor.observe import watch

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Expected:
    """What a script must show when it is stopped after `planned` steps."""

    name: str
    script: str
    planned: int = 8
    source: str = "optimizer"
    optimizer_steps: int = 8
    all_steps: int = 8
    backwards: int = 8
    batches: int = 8
    ahead: int = 0  # batches that the loop's owner fetches ahead
    differ: bool = False
    skipped: int = 0
    sync: str = "item"
    ranks: int = 1
    compiled: bool = False


EXPECTED = (
    Expected("plain", "plain.py"),
    Expected("functions", "functions.py"),
    Expected("GAN", "gan.py", planned=4, optimizer_steps=4, all_steps=7, backwards=7, batches=4, differ=True),
    Expected(
        "gradient accumulation", "accumulation.py", planned=4, optimizer_steps=4, all_steps=4, differ=True, sync="float"
    ),
    Expected("GradScaler", "grad_scaler.py", planned=6, optimizer_steps=6, all_steps=6, skipped=2),
    Expected("fused", "fused.py", sync="bool"),
    Expected(
        "optimizer in backward",
        "in_backward.py",
        planned=4,
        optimizer_steps=4,
        all_steps=13,
        backwards=3,
        batches=4,
        differ=True,
    ),
    Expected(
        "hand-written update", "by_hand.py", source="module", optimizer_steps=0, all_steps=0, backwards=7, sync="tolist"
    ),
    Expected(
        "LBFGS",
        "lbfgs.py",
        planned=4,
        optimizer_steps=4,
        all_steps=4,
        backwards=12,
        batches=4,
        differ=True,
        sync="format",
    ),
    Expected("torch.compile", "compiled.py", compiled=True),
    Expected("lazy module", "lazy.py"),
    Expected("tensor subclass", "subclass.py"),
    Expected("DataLoader subclass", "loader_subclass.py"),
    Expected("positional arguments", "positional.py"),
    Expected("Lightning", "with_lightning.py", planned=6, optimizer_steps=6, all_steps=6, backwards=6, batches=6),
    Expected(
        "accelerate", "with_accelerate.py", planned=6, optimizer_steps=6, all_steps=6, backwards=6, batches=6, ahead=1
    ),
    Expected("two gloo ranks", "two_ranks.py", ranks=2),
    Expected("sh run.sh", "plain.py"),
    Expected("another environment", "plain.py"),
    Expected(
        "inference only", "inference.py", source="module", optimizer_steps=0, all_steps=0, backwards=0, sync="tolist"
    ),
)


def marked(script: str, marker: str) -> str:
    """The site of the line that carries the comment `# marker`."""
    lines = (SCRIPTS / script).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"{script}:{number}"


def command_of(expected: Expected, folder: Path) -> list[str]:
    if expected.name == "sh run.sh":
        return ["sh", "run.sh"]
    if expected.name == "another environment":
        return [str(environment_without_gpudoctor(folder)), expected.script]
    if expected.ranks > 1:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={expected.ranks}"]
        return [*run, expected.script]
    return [sys.executable, expected.script]


def environment_without_gpudoctor(folder: Path) -> Path:
    """A virtual environment of its own that sees torch and what torch needs, and not gpudoctor or its other needs."""
    import torch

    installed = Path(torch.__file__).parent.parent
    linked = folder / "linked"
    linked.mkdir()
    ours = ("gpudoctor", "_editable", "msgspec", "libcst", "typer", "rich", "__pycache__")
    for entry in installed.iterdir():
        if not entry.name.startswith(ours) and entry.suffix != ".pth":
            (linked / entry.name).symlink_to(entry)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(str(linked))
    check = "import torch, importlib.util as u; raise SystemExit(u.find_spec('gpudoctor') is not None)"
    subprocess.run([python, "-c", check], env=clean_environment(), cwd=folder, check=True)
    return python


def clean_environment() -> dict[str, str]:
    """PATH such that `python` in run.sh is this interpreter, and no PYTHONPATH that could lead to gpudoctor."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    env["OMP_NUM_THREADS"] = "1"
    return env


def run_watched(expected: Expected, folder: Path) -> Watched:
    override = LoaderOverride(site=marked(expected.script, "LOADER"), ordinal=0, arguments={"num_workers": 1})
    work = folder / "scripts"
    shutil.copytree(SCRIPTS, work, ignore=shutil.ignore_patterns("__pycache__"))
    plan = WatchPlan(record_dir="", steps=expected.planned, loaders=(override,))
    return watch(command_of(expected, folder), plan, cwd=work, env=clean_environment(), deadline_s=120)


def faults(expected: Expected, watched: Watched) -> list[str]:
    """What is not as expected, in words; empty when all is right."""
    found = []

    def same(what: str, value: object, wanted: object) -> None:
        if value != wanted:
            found.append(f"{what} is {value!r}, expected {wanted!r}")

    same("stopped", watched.stopped, "steps")
    same("ranks", len(watched.records), expected.ranks)
    for record in watched.records:
        same("ended", record.ended, "steps")
        same("notes", record.notes, ())
        same("source", record.step_source, expected.source)
        same("steps", len(record.steps), expected.planned)
        same("optimizer steps", record.optimizer_steps, expected.optimizer_steps)
        same("optimizer steps of all", record.optimizer_steps_all, expected.all_steps)
        same("backwards", record.backwards, expected.backwards)
        same("batches", record.batches, expected.batches + expected.ahead)
        same("counts differ", record.counts_differ, expected.differ)
        same("skipped", record.skipped_steps, expected.skipped)
        same("compiled", record.compiled, expected.compiled)
        found += _site_faults(expected, record)
    return found


def _site_faults(expected: Expected, record: WatchRecord) -> list[str]:
    found = []
    copies = [copy for copy in record.copies if copy.site == marked(expected.script, "COPY")]
    if len(copies) != 1 or copies[0].function != "to" or copies[0].calls < expected.planned:
        found.append(f"copies at the marked line: {copies}")
    syncs = [(sync.site, sync.function) for sync in record.syncs if sync.calls >= expected.planned - 1]
    if (marked(expected.script, "SYNC"), expected.sync) not in syncs:
        found.append(f"no {expected.sync} at the marked line: {record.syncs}")
    site = marked(expected.script, "LOADER")
    train = [loader for loader in record.loaders if (loader.site, loader.ordinal) == (site, 0)]
    if len(train) != 1 or not train[0].overridden or train[0].num_workers != 1 or train[0].prefetch_factor != 2:
        found.append(f"the override did not reach the loader: {record.loaders}")
    others = [loader for loader in record.loaders if loader not in train]
    if any(loader.overridden or loader.num_workers for loader in others):
        found.append(f"the override reached another loader: {others}")
    role = "unknown" if expected.name == "inference only" else "train"
    if train and (train[0].role != role or any(loader.role == "train" for loader in others)):
        found.append(f"roles: {[(loader.site, loader.ordinal, loader.role) for loader in record.loaders]}")
    return found


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda expected: expected.name)
def test_watched_script(expected: Expected, tmp_path: Path) -> None:
    watched = run_watched(expected, tmp_path)
    assert faults(expected, watched) == [], watched.stderr_tail


def test_functions_tell_two_loaders_of_one_line_apart(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "functions.py", tmp_path)
    watched = watch([sys.executable, "functions.py"], WatchPlan(record_dir=""), cwd=tmp_path, env=clean_environment())
    (record,) = watched.records
    assert (watched.stopped, watched.exit_code, record.ended, record.exit_code) == ("exit", 0, "exit", 0)
    assert [(loader.ordinal, loader.role, loader.batches, loader.iterators) for loader in record.loaders] == [
        (0, "train", 16, 4),
        (1, "other", 8, 4),
    ]
    assert (len(record.steps), record.batches, record.counts_differ) == (16, 16, False)


def _counts(record: WatchRecord) -> str:
    return f"{record.optimizer_steps} / {record.optimizer_steps_all} / {record.backwards} / {record.batches}"


def table() -> str:
    """The twenty scripts as a Markdown table."""
    import tempfile

    counts = "optimizer / all / backward / batches"
    head = f"| script | steps | counted by | {counts} | loader site | override | as expected | s |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for expected in EXPECTED:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            watched = run_watched(expected, Path(folder))
        wrong = faults(expected, watched)
        seconds = time.monotonic() - begun
        site = marked(expected.script, "LOADER")
        records = watched.records
        applied = all(any(loader.site == site and loader.num_workers == 1 for loader in r.loaders) for r in records)
        lines.append(
            f"| {expected.name} | {' + '.join(str(len(r.steps)) for r in records)} "
            f"| {' + '.join(r.step_source for r in records)} "
            f"| {' + '.join(_counts(r) for r in records)} "
            f"| {site} | {'num_workers=1' if records and applied else 'no'} "
            f"| {'yes' if not wrong else '; '.join(wrong)} | {seconds:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
