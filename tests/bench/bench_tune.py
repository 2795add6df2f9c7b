"""What tune reaches on slow scripts, and how often it keeps something where nothing is to be won.

    python tests/bench/bench_tune.py slow [NAME...] [--folder DIR] [--budget 60] [--rounds 3] [--save FILE]
    python tests/bench/bench_tune.py false-keeps [--first 0] [--count 40] [--budget 90] [--save FILE]

slow: tunes a copy of NAME/slow.py (default: every folder of tests/bench/slow, or of DIR), applies the patch, and runs
slow, tuned and expert in alternation, unwatched, on the same machine; the rate is what the scripts print themselves.
false-keeps: real tunes of small CPU scripts that are set well already; each must end in "nothing to change".
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SLOW = Path(__file__).resolve().parent / "slow"
ROOT = SLOW.parents[2]
RATE = re.compile(r"^done: ([0-9.]+) steps/s$", re.MULTILINE)
MOST_S = 300.0  # one unwatched run
# On a GPU the scripts get sizes at which its work matters; on CPUs they keep their own, tiny ones.
CUDA_ARGUMENTS = {
    "gan": "--steps 60 --batch-size 64 --size 64 --width 64",
    "segmentation": "--steps 100 --batch-size 32 --size 128 --width 32",
    "inference": "--images 2560 --batch-size 64 --size 160 --width 64",
    "audio": "--steps 60 --batch-size 64 --width 256",
    "lightning": "--steps 80 --batch-size 128 --length 4096 --width 64",
    "accelerate": "--steps 80 --batch-size 64 --length 256 --width 256",
    "notebook": "2 400000 2048",
    "ranks": "--steps 25 --batch-size 64 --length 1024 --width 1024",
}
NEEDS = {"lightning": "lightning", "accelerate": "accelerate"}
RANKS = {"ranks": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("slow", "false-keeps"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=SLOW)
    parser.add_argument("--budget", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="seed of the first of --count scripts")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    if options.what == "slow":
        names = options.names or sorted(path.parent.name for path in options.folder.glob("*/slow.py"))
        results = [slow(options.folder / name, options.budget or 60.0, options.rounds) for name in names]
        summarise(results)
    else:
        results = [
            control(seed, options.budget or 90.0) for seed in range(options.first, options.first + options.count)
        ]
        changed = [result for result in results if result["kept"]]
        print(f"{len(changed)} of {len(results)} tunes kept a change")
    if options.save:
        options.save.write_text(json.dumps(results, indent=1) + "\n")


def environment() -> dict[str, str]:
    """One CPU thread for each process, as under torchrun: spinning thread pools would measure each other."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    if not on_gpu():
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def on_gpu() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not hidden and (Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists())


def command(name: str, script: str) -> list[str]:
    arguments = CUDA_ARGUMENTS.get(name, "").split() if on_gpu() else []
    if name in RANKS:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[name])]
        return [sys.executable, *launcher, script, *arguments]
    return [sys.executable, script, *arguments]


def tune(folder: Path, words: Sequence[str], budget_s: float, *more: str) -> dict[str, Any]:
    """One `gpudoctor tune` in `folder`; the envelope, or what it said when it failed."""
    out = folder / "tuned"
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "gpudoctor", "tune", "--out", str(out), "--budget", str(budget_s), *more, "--", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - begun
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        return {"error": said[0] if said else f"exit code {done.returncode}", "seconds": seconds}
    envelope: dict[str, Any] = json.loads((out / "case.json").read_text())
    return {"prescription": envelope["prescription"], "seconds": seconds}


def slow(source: Path, budget_s: float, rounds: int) -> dict[str, Any]:
    """Tune one script and race the three versions of it."""
    name = source.name
    result: dict[str, Any] = {"name": name}
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        return told({**result, "error": f"{NEEDS[name]} is not installed"})
    with tempfile.TemporaryDirectory(prefix="bench-tune-") as temporary:
        folder = Path(temporary)
        for version in ("slow", "expert"):
            shutil.copy(source / f"{version}.py", folder)
        done = tune(folder, command(name, "slow.py"), budget_s, "--allow", "logging")
        result["tune_s"] = round(done["seconds"], 1)
        if "error" in done:
            return told({**result, "error": done["error"]})
        said = done["prescription"]
        result["verdict"] = said["verdict"]
        result["kept"] = [f"{change['rule']} {change['title']}" for change in said["changes"] if change["kept"]]
        result["proof"] = (said["proof"] or {}).get("verdict")
        versions = ["slow", "expert"]
        env = {}
        if result["kept"]:
            tuned = folder / "patched"
            tuned.mkdir()
            shutil.copy(folder / "slow.py", tuned)
            subprocess.run(["patch", "-s", "-p1", "-i", str(folder / "tuned" / "train.patch")], cwd=tuned, check=True)
            shutil.copy(tuned / "slow.py", folder / "tuned.py")
            versions.insert(1, "tuned")
            env = said["launch"]["env"]
        rates: dict[str, list[float]] = {version: [] for version in versions}
        for turn in range(rounds):
            for version in versions if turn % 2 == 0 else reversed(versions):
                rates[version].append(raced(folder, command(name, f"{version}.py"), env if version == "tuned" else {}))
        rates.setdefault("tuned", rates["slow"])  # nothing was changed: the tuned script is the slow one
    middle = {version: statistics.median(values) for version, values in rates.items()}
    result["rates"] = rates
    result["gain"] = round(middle["tuned"] / middle["slow"], 3)
    result["possible"] = round(middle["expert"] / middle["slow"], 3)
    result["share"] = round(middle["tuned"] / middle["expert"], 3)
    return told(result)


def raced(folder: Path, words: Sequence[str], env: dict[str, str]) -> float:
    done = subprocess.run(
        words, cwd=folder, env={**environment(), **env}, capture_output=True, text=True, timeout=MOST_S, check=False
    )
    rate = RATE.search(done.stdout)
    print(f"{words[1]}: {rate[1] if rate else 'no rate'}", file=sys.stderr, flush=True)
    if done.returncode != 0 or rate is None:
        raise SystemExit(f"{' '.join(words)} failed: {done.stderr[-2000:]}")
    return float(rate[1])


def told(result: dict[str, Any]) -> dict[str, Any]:
    """Prints one result as soon as it is there."""
    head = f"{result['name']:<13}"
    if "error" in result:
        print(f"{head} {result['error']}", flush=True)
        return result
    rates = "  ".join(
        f"{version} {' '.join(f'{rate:.2f}' for rate in values)}" for version, values in result["rates"].items()
    )
    ratios = (("tuned/slow", "gain"), ("expert/slow", "possible"), ("tuned/expert", "share"))
    print(head, "  ".join(f"{what} {result[key]:.2f}" for what, key in ratios))
    print(f"{'':13} {rates} steps/s; tune took {result['tune_s']:.0f} s; proof: {result['proof']}")
    print(f"{'':13} {result['verdict']}; kept: {'; '.join(result['kept']) or 'nothing'}", flush=True)
    return result


def summarise(results: Sequence[dict[str, Any]]) -> None:
    shares = [result["share"] for result in results if "share" in result]
    if shares:
        mean = math.exp(statistics.fmean(math.log(share) for share in shares))
        print(f"tuned/expert, geometric mean of {len(shares)}: {mean:.3f}, lowest {min(shares):.3f}")
        print(f"tuned/slow, lowest: {min(result['gain'] for result in results if 'gain' in result):.3f}")


CONTROL = '''\
"""A small CPU training that is set well already: {kind}."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)


class Rows(Dataset):
    def __len__(self):
        return {rows}

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        wave = rng.standard_normal({work})
        spectrum = np.abs(np.fft.rfft(wave))[:{width}]
        return torch.from_numpy(spectrum.astype(np.float32)), index % 10


{loader}
net = nn.Sequential(
    nn.Linear({width}, {hidden}), nn.ReLU(), nn.Linear({hidden}, {hidden}), nn.ReLU(), nn.Linear({hidden}, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
total = torch.zeros(())
for epoch in range({epochs}):
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
print(f"mean loss {{total / (len(loader) * {epochs}):.4f}}")
'''
INDEXED = """\
data = TensorDataset(torch.randn({rows}, {width}), torch.randint(0, 10, ({rows},)))
batches = BatchSampler(RandomSampler(data), {batch}, drop_last=False)
loader = DataLoader(data, sampler=batches, batch_size=None)"""
LOADERS = {
    "a worker keeps up": (
        "loader = DataLoader(Rows(), batch_size={batch}, shuffle=True, num_workers=1, persistent_workers=True)",
        {"work": 8192, "hidden": 1024},
    ),
    "as many workers as CPUs, and the data take most of the time": (
        "loader = DataLoader(Rows(), batch_size={batch}, shuffle=True, num_workers={cpus}, persistent_workers=True)",
        {"work": 16384, "hidden": 128},
    ),
    "whole batches from memory": (INDEXED, {"work": 16, "hidden": 256}),
    "few rows in a batch, cheaper to make than to send": (INDEXED, {"work": 16, "hidden": 16}),
}


def control(seed: int, budget_s: float) -> dict[str, Any]:
    """One real tune of a script that a seed chose; nothing in it is slow for want of a setting."""
    rng = random.Random(seed)
    kind = list(LOADERS)[seed % len(LOADERS)]
    loader, sizes = LOADERS[kind]
    few = kind.startswith("few")
    batch = 4 if few else rng.choice((16, 32, 64))
    steps = rng.randint(60, 120) * (20 if few else 1)
    values = {
        "kind": kind,
        "batch": batch,
        "rows": steps // 2 * batch,
        "epochs": 2,
        "width": rng.choice((64, 128, 256)),
        "cpus": max(1, len(os.sched_getaffinity(0))),
        "work": sizes["work"],
        "hidden": sizes["hidden"],
    }
    text = CONTROL.format(loader=loader.format(**values), **values)
    with tempfile.TemporaryDirectory(prefix="bench-control-") as temporary:
        folder = Path(temporary)
        (folder / "train.py").write_text(text)
        done = tune(folder, [sys.executable, "train.py"], budget_s)
    said = done.get("prescription") or {}
    kept = [f"{change['rule']} {change['title']}" for change in said.get("changes", ()) if change["kept"]]
    trials = len(said.get("trials", ()))
    result = {"seed": seed, "kind": kind, "kept": kept, "trials": trials, "seconds": round(done["seconds"], 1)}
    result["verdict"] = done.get("error") or said.get("verdict")
    print(f"{seed:3} {kind:<60} {trials:2} trials {done['seconds']:4.0f} s  {result['verdict']}", flush=True)
    return result


if __name__ == "__main__":
    main()
