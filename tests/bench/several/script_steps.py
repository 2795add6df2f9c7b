"""The steps that run the training script: tune, the unwatched race, profiles of the ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from several import boxed
from several.bench import HERE, Bench, Failed, Skip, said_by
from several.figures import counts, scaling_rows, scaling_text

PROFILE_STEPS, RACE_STEPS = 30, 32
MOST_ROUNDS = 3
PROFILE_LEAST_S = 40.0  # what a profile needs at least; the race leaves it


def images_ready(bench: Bench) -> None:
    """Skip without a GPU: the script's model is too large for CPUs."""
    if not bench.gpus:
        raise Skip("no GPU")
    if bench.preparing is not None and bench.preparing.wait(timeout=60) != 0:
        raise Failed(f"the images could not be made: {(bench.raw / 'images.txt').read_text()[-300:]}")


def tune(bench: Bench) -> dict[str, Any]:
    """The table over the ranks, and the changes that hold at the largest count."""
    images_ready(bench)
    folder = bench.raw / "tune"
    folder.mkdir(exist_ok=True)
    shutil.copy(HERE / "images.py", folder)
    more = bench.options.tune.split()
    if bench.options.resume is not None:
        (folder / "out").mkdir()
        shutil.copy(bench.options.resume, folder / "out" / "case.json")
        more.append("--resume")
    budget = min(bench.options.budget, bench.left_s() - 60)
    nproc = ",".join(map(str, counts(bench.gpus)))
    words = ["tune", "--json", "--out", str(folder / "out"), "--budget", f"{budget:.0f}", "--nproc", nproc, "--allow",
             "logging", *more, "--", sys.executable, "images.py", "--steps", "2000", *bench.script()]  # fmt: skip
    envelope, ran = bench.gpudoctor("tune", *words, limit_s=budget + 60, cwd=folder)
    prescription = envelope.get("prescription") or {}
    if prescription.get("verdict") is None:
        raise Failed("; ".join(envelope.get("errors", ())) or ran.why())
    kept = [change for change in prescription["changes"] if change["kept"]]
    patch = folder / "out" / "train.patch"
    if kept and patch.exists():
        bench.tuned = apply_patch(folder, patch)
        bench.tuned_env = prescription["launch"]["env"]
    return {
        **said_by(envelope),
        "conditions": {"budget_s": round(budget), "nproc": nproc, "took_s": ran.seconds, "more": more},
        "verdict": prescription["verdict"],
        "kept": [f"{change['rule']} {change['title']}" for change in kept],
        "proof": (prescription.get("proof") or {}).get("verdict"),
        "scaling": prescription.get("scaling"),
        "changes": prescription["changes"],
        "text": "\n".join([prescription["verdict"], *(f"kept: {change['title']}" for change in kept),
                           *scaling_lines(prescription.get("scaling"))]),
    }  # fmt: skip


def scaling_lines(scaling: dict[str, Any] | None) -> list[str]:
    if not scaling:
        return []
    rows = [
        f"{row['ranks']} ranks: {row.get('rate')} {scaling['unit']}, efficiency {row.get('efficiency')}, exposed "
        f"{row.get('exposed_ms')} ms {row.get('error') or ''}"
        for row in scaling["rows"]
    ]
    return [*rows, f"cause: {scaling.get('cause')}"]


def apply_patch(folder: Path, patch: Path) -> Path:
    """A patched copy of the script, in a folder of its own."""
    tuned = folder / "tuned"
    tuned.mkdir(exist_ok=True)
    shutil.copy(HERE / "images.py", tuned)
    tool = ["patch", "-s", "-p1", "-i"] if shutil.which("patch") else ["git", "apply"]
    done = subprocess.run([*tool, str(patch)], cwd=tuned, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"the patch does not apply: {(done.stderr or done.stdout).strip()[:300]}")
    return tuned / "images.py"


def race(bench: Bench) -> dict[str, Any]:
    """Unwatched runs of the untuned and the tuned script at 1..N ranks, in turn, for as long as there is time."""
    images_ready(bench)
    versions = {"untuned": HERE / "images.py"}
    if bench.tuned is not None:
        versions["tuned"] = bench.tuned
    rates: dict[str, dict[int, list[float]]] = {version: {} for version in versions}
    spare = PROFILE_LEAST_S + 5
    longest, failures = 0.0, []
    for turn in range(MOST_ROUNDS):
        if turn and bench.left_s() - spare < longest * len(versions) * len(counts(bench.gpus)):
            break  # a round that would not be whole favours nobody
        order = [(count, version) for count in reversed(counts(bench.gpus)) for version in versions]
        for count, version in order if turn % 2 == 0 else reversed(order):
            words = bench.ranks(count, versions[version], "--steps", str(RACE_STEPS), *bench.script())
            env = bench.tuned_env if version == "tuned" else None
            try:
                ran = bench.run(f"race-{version}-{count}-{turn}", words, 90, env=env)
            except Skip as reason:
                failures.append(f"{version} with {count} ranks: {reason}")
                continue
            rate = printed_rate(ran)
            longest = max(longest, ran.seconds)
            if rate is None:
                failures.append(f"{version} with {count} ranks: {ran.why()}")
            else:
                rates[version].setdefault(count, []).append(rate)
    if not any(rates.values()):
        raise Failed("; ".join(failures))
    rows = scaling_rows(rates)
    return {
        "rows": rows,
        "failures": failures,
        "text": scaling_text(rows) + "\n".join(failures),
        "conditions": {"steps": RACE_STEPS, "unit": "steps/s x ranks, start-up of loader workers included",
                       "runs": {version: {count: len(values) for count, values in found.items()}
                                for version, found in rates.items()}},
    }  # fmt: skip


def printed_rate(ran: boxed.Ran) -> float | None:
    for line in ran.out.read_text(errors="replace").splitlines():
        if line.startswith("done: ") and ran.ok:
            return float(line.split()[1])
    return None


def profile(bench: Bench) -> dict[str, Any]:
    """What limits the steps of the ranks, as the script is."""
    images_ready(bench)
    command = bench.ranks(bench.gpus, HERE / "images.py", "--steps", "2000", *bench.script())
    words = ["profile", "--json", "--steps", str(PROFILE_STEPS), "--budget", "40", "--", *command]
    envelope, _ = bench.gpudoctor("profile", *words, limit_s=70)
    return {**said_by(envelope), "figures": envelope["measurements"]}


def profile_alone(bench: Bench) -> dict[str, Any]:
    """A script that knows no ranks under torchrun: every rank does the whole work, all on the first GPU."""
    if bench.gpus < 2:
        raise Skip(f"{bench.gpus} GPUs: nothing to share out")
    if bench.options.slow_scripts is None:
        raise Skip("no folder was given (--slow-scripts)")
    images_ready(bench)
    script = bench.options.slow_scripts.resolve() / "images" / "slow.py"
    command = bench.ranks(bench.gpus, script, "--steps", "2000", *bench.script())
    words = ["profile", "--json", "--steps", str(PROFILE_STEPS), "--budget", "40", "--", *command]
    envelope, _ = bench.gpudoctor("profile-alone", *words, limit_s=70)
    return {**said_by(envelope), "figures": envelope["measurements"]}
