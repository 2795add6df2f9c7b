"""What a WatchPlan asks for: patched text, step lines, time, calls, the write guard; and how it gets into a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from observe_support import LOOP, only, watch_command, watch_text

from gpudoctor.model import PatchedSource, ProofPlan, WatchPlan
from gpudoctor.observe.run import INJECT, environment

MAIN = LOOP + "print(__name__, __file__, __spec__ and __spec__.name, sum(p.numel() for p in model.parameters()))\n"
MAIN += "if __name__ == '__main__':\n    train(1)\n"


def patch(folder: Path, text: str, *lines: int, name: str = "train.py") -> tuple[PatchedSource, ...]:
    return (PatchedSource(path=str(folder / name), text=text, lines=lines),)


@pytest.mark.parametrize("how", ["script", "module", "imported", "shell"])
def test_patched_text_stands_in_for_the_file(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(MAIN)
    (tmp_path / "start.py").write_text("import train\ntrain.train(1)\n")
    commands = {
        "script": [sys.executable, "-u", "./train.py"],
        "module": [sys.executable, "-m", "train"],
        "imported": [sys.executable, "start.py"],
        "shell": ["sh", "-c", f"{sys.executable} train.py; exit 3"],
    }
    text = MAIN.replace("nn.Linear(8, 2)", "nn.Linear(8,\n    2, bias=False)").replace("step += 1", "step += 1  # one")
    output = tmp_path / "log"
    lines = [number for number, line in enumerate(text.splitlines(), 1) if "bias" in line or "# one" in line]
    dead = text + "if False:\n    print('never')\n"
    never = len(dead.splitlines())
    patched = patch(tmp_path, dead, *lines, never)
    watched = watch_command(tmp_path, commands[how], patched=patched, output=output)
    record = only(watched)
    assert record.patched_lines == {str(tmp_path / "train.py"): tuple(lines)}
    assert record.patched_missed == {str(tmp_path / "train.py"): (never,)}
    name = "train" if how == "imported" else "__main__"
    spec = {"module": "train", "imported": "train"}.get(how)
    file = tmp_path / ("./train.py" if how == "script" else "train.py")
    assert output.read_text().replace("/./", "/") == f"{name} {file} {spec} 16\n"
    assert (watched.exit_code, len(record.steps)) == (3 if how == "shell" else 0, 4)
    assert "bias" not in (tmp_path / "train.py").read_text()


SPAWNING = """\
import multiprocessing, sys
def tell(queue):
    queue.put((__name__, WORD, sys.argv[1:], sys.path[0]))
WORD = "old"
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=tell, args=(queue,))
    child.start()
    print(*queue.get(), __spec__, __package__)
    child.join()
    sys.exit(5)
"""


def test_spawned_children_see_the_patched_text_too(tmp_path: Path) -> None:
    output = tmp_path / "log"
    patched = patch(tmp_path, SPAWNING.replace('"old"', '"new"'), 4)
    watched = watch_text(tmp_path, SPAWNING, "-x", patched=patched, output=output)
    assert watched.exit_code == 5, watched.stderr_tail
    assert output.read_text() == f"__mp_main__ new ['-x'] {tmp_path.resolve()} None None\n"


def test_a_patched_script_that_raises_ends_as_any_other(tmp_path: Path) -> None:
    text = LOOP + "train(1)\nraise KeyError('x')\n"
    watched = watch_text(tmp_path, "", patched=patch(tmp_path, text, 7))
    record = only(watched)
    assert (watched.exit_code, record.ended, len(record.steps)) == (1, "exception", 4)
    assert record.exception == f"KeyError: 'x' (train.py:{len(text.splitlines())})"
    assert watched.stderr_tail.endswith("KeyError: 'x'\n")


def test_patched_text_with_a_future_import_and_a_docstring(tmp_path: Path) -> None:
    text = (
        '"""Doc."""\nfrom __future__ import annotations\n# a comment\ndef f(x: Missing): return __doc__\nprint(f(1))\n'
    )
    output = tmp_path / "log"
    text += LOOP + "train(1)\n"
    watched = watch_text(tmp_path, "", patched=patch(tmp_path, text, 1, 2, 3, 5), output=output)
    assert output.read_text() == "Doc.\n"
    assert only(watched).patched_lines == {str(tmp_path / "train.py"): (1, 2, 3, 5)}


def test_step_at_decides_over_the_optimizer(tmp_path: Path) -> None:
    text = LOOP + "def each(step):\n    if step % 2 == 0:\n        pass  # here\ntrain(3, each)\n"
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "# here" in row)
    watched = watch_text(tmp_path, text, step_at=f"train.py:{line}", steps=3)
    record = only(watched)
    assert (watched.stopped, record.step_source, record.step_site) == ("steps", "step-at", f"train.py:{line}")
    assert (len(record.steps), record.optimizer_steps, record.batches) == (3, 6, 6)
    assert record.counts_differ is False


def test_time_ends_a_run_at_a_step(tmp_path: Path) -> None:
    text = LOOP + "import time\ntrain(1000, lambda step: time.sleep(0.01))\n"
    watched = watch_text(tmp_path, text, max_seconds=4.0)
    record = only(watched)
    assert (watched.stopped, record.ended) == ("steps", "time")
    assert record.steps


def test_a_start_that_takes_all_the_time_still_leaves_some_steps(tmp_path: Path) -> None:
    text = LOOP + "import time\ntime.sleep(0.5)\ntrain(1000, lambda step: time.sleep(0.01))\n"
    record = only(watch_text(tmp_path, text, max_seconds=0.1, least_steps=7))
    assert (record.ended, len(record.steps)) == ("time", 7)


SPAWNED_RANKS = """\
import os, sys, time, torch
import torch.distributed as dist
import torch.multiprocessing as mp
def work(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10 ** 6):
        time.sleep(0.02 * rank)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


def test_ranks_that_a_script_spawns_itself_leave_after_the_same_step(tmp_path: Path) -> None:
    watched = watch_text(tmp_path, SPAWNED_RANKS, steps=5)
    assert watched.stopped == "steps", watched.stderr_tail
    assert [(r.rank, r.world_size, len(r.steps), r.ended, r.notes) for r in watched.records] == [
        (0, 2, 5, "steps", ()),
        (1, 2, 5, "steps", ()),
    ]


def test_calls_are_not_wrapped_when_only_time_matters(tmp_path: Path) -> None:
    text = LOOP + "train(1, lambda step: model.weight.sum().item())\nprint(torch.Tensor.item)\n"
    output = tmp_path / "log"
    record = only(watch_text(tmp_path, text, watch_calls=False, output=output))
    assert (record.copies, record.syncs, len(record.steps)) == ((), (), 4)
    assert output.read_text().startswith("<method 'item'")


WRAPPERS = """\
import copy, inspect, pickle, torch
to, base = torch.Tensor.to, torch.Tensor.__base__.to
assert type(to) is not type(base)
assert to == base and base == to and hash(to) == hash(base) and not to != base and to != torch.Tensor.cpu
assert {base: 1}[to] == 1 and to in [base] and to.__name__ == "to" and to.__doc__ == base.__doc__
assert pickle.loads(pickle.dumps(to)) is to
x = torch.ones(3)
assert x.to(torch.float64).dtype == torch.float64 and torch.Tensor.to(x, "cpu") is x
assert bool(x[0]) and int(x[0]) == 1 and float(x[0]) == 1.0 and [5, 6][torch.tensor(1)] == 6
assert f"{x[0]:.2f}" == "1.00" and repr(x) == "tensor([1., 1., 1.])" and x.tolist() == [1.0] * 3
assert torch.equal(copy.deepcopy(x), x) and torch.equal(pickle.loads(pickle.dumps(x)), x)
y = torch.zeros(3)
assert y.copy_(x, non_blocking=True) is y and y.sum().item() == 3
try:
    x.item()
except RuntimeError as error:
    print("as ever:", str(error)[:30])
traced = torch.jit.trace(lambda t: t.to(torch.float64) + 1, x)
assert traced(x).dtype == torch.float64
scripted = torch.jit.script(torch.nn.Linear(3, 1))
graph = torch.fx.symbolic_trace(torch.nn.ReLU())
with torch.device("cpu"):
    torch.ones(2).to("cpu")
assert torch.func.vmap(lambda t: t.to(torch.float64))(torch.ones(2, 2)).dtype == torch.float64
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    torch.empty(2).to("cpu")
print("done")
"""


def test_wrapped_methods_pass_for_the_originals(tmp_path: Path) -> None:
    output = tmp_path / "log"
    watched = watch_text(tmp_path, WRAPPERS, output=output)
    assert watched.exit_code == 0, watched.stderr_tail
    assert output.read_text().splitlines()[-1] == "done"
    assert only(watched).notes == ()


def test_nested_calls_count_once_at_the_users_line(tmp_path: Path) -> None:
    text = LOOP + "value = torch.ones(())\ndef each(step):\n    print(f'{value:.1f}', value)\ntrain(2, each)\n"
    record = only(watch_text(tmp_path, text))
    line = len(text.splitlines()) - 1
    assert {(sync.site, sync.function, sync.calls, sync.calls_in_steps) for sync in record.syncs} == {
        (f"train.py:{line}", "format", 8, 7),
        (f"train.py:{line}", "repr", 8, 7),
    }


WRITES = """\
import os, pathlib, subprocess, sys, tempfile, torch
os.makedirs("out", exist_ok=True)
tempfile.TemporaryFile().close()
open(os.devnull, "w").close()
def attempt(name, write):
    try:
        write()
    except PermissionError as error:
        print("refused", name, error.filename)
attempt("open", lambda: open("out/opened", "w").close())
attempt("torch", lambda: torch.save({"a": 1}, "out/saved.pt"))
attempt("append", lambda: pathlib.Path("log.txt").open("a").close())
attempt("remove", lambda: os.remove("old"))
attempt("rename", lambda: os.rename("older", "newer"))
open("read").close()
with tempfile.TemporaryDirectory() as folder:  # its files are removed by names relative to an open folder
    open(folder + "/read", "w").close()
subprocess.run([sys.executable, "-c", "try: open('by_child', 'w').close()\\nexcept PermissionError: pass"])
"""


@pytest.mark.parametrize("guard", ["list", "deny", "off"])
def test_writes_are_listed_or_refused(tmp_path: Path, guard: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for name in ("old", "older", "read"):
        (work / name).write_text("mine")
    output = tmp_path / "log"
    watched = watch_text(work, WRITES, guard_writes=guard, output=output)
    assert watched.exit_code == 0, watched.stderr_tail
    names = ("by_child", "log.txt", "newer", "old", "older", "out/opened", "out/saved.pt")
    assert watched.writes == (() if guard == "off" else names), output.read_text()
    if guard == "deny":
        assert sorted(path.name for path in work.iterdir() if path.is_file()) == ["old", "older", "read", "train.py"]
        assert list((work / "out").iterdir()) == []
        assert output.read_text().count("refused") == 5
        assert "refused torch out/saved.pt" in output.read_text()
    else:
        assert output.read_text() == ""
        assert (work / "out" / "saved.pt").exists()


def test_an_existing_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("MINE = 'here'\n")
    text = (
        "import os, sitecustomize, sys\nprint(sitecustomize.MINE, sitecustomize.__name__, os.environ['PYTHONPATH'])\n"
    )
    output = tmp_path / "log"
    env = {"PYTHONPATH": str(tmp_path / "theirs"), "PATH": "/usr/bin:/bin"}
    watched = watch_text(tmp_path, text, env=env, output=output)
    assert watched.exit_code == 0, watched.stderr_tail
    assert output.read_text() == f"here sitecustomize {INJECT}:{tmp_path / 'theirs'}\n"


def test_proof_forces_hash_seed_and_cublas(tmp_path: Path) -> None:
    plan = WatchPlan(record_dir=str(tmp_path), proof=ProofPlan(seed=7))
    env = environment(plan, tmp_path / "plan.json", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert (env["PYTHONHASHSEED"], env["CUBLAS_WORKSPACE_CONFIG"]) == ("7", ":16:8")
    assert "PYTHONHASHSEED" not in environment(WatchPlan(record_dir=""), tmp_path / "plan.json", {})


def test_the_injected_code_stays_within_python_3_9_and_the_standard_library() -> None:
    import ast

    own = {"_gpudoctor_watch"}
    for path in sorted(INJECT.rglob("*.py")):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                assert top in own or top in sys.stdlib_module_names or name == "torch.optim.optimizer", (
                    path.name,
                    name,
                )


def test_without_a_plan_the_injected_code_does_nothing(tmp_path: Path) -> None:
    code = "import sys\nassert not [name for name in sys.modules if '_gpudoctor' in name] \n"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(INJECT)}, cwd=tmp_path, check=True)
