"""The envelope of a study: findings, measurements, prescription, and the diff for the line that makes the loader."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path, PurePath

from gpudoctor import checkup
from gpudoctor.model import (
    Case,
    Change,
    ChangeClass,
    Edit,
    Envelope,
    LoaderSettings,
    LoaderStudy,
    LoaderTrial,
    Measurement,
    Prescription,
    Setting,
)
from gpudoctor.prescribe import patch

FAMILIES = ("LDR", "CTR", "LCH006")  # what a loader can be about


def envelope(
    study: LoaderStudy | None,
    machine: Case,
    *,
    cwd: Path,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fail_on: str = "never",
    require_gpu: int | None = None,
    errors: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Envelope:
    """`study` None: interrupted before anything was known."""
    case = machine
    prescription = None
    numbers: tuple[Measurement, ...] = ()
    if study is not None:
        numbers = measurements(study)
        case = dataclasses.replace(machine, loader=study)
        prescription = prescribe(study, cwd)
    return checkup.examine(
        case,
        command="tune-loader",
        select=select or FAMILIES,
        ignore=ignore,
        fail_on=fail_on,
        require_gpu=require_gpu,
        measurements=numbers,
        prescription=prescription,
        errors=errors,
        notes=notes,
    )


def measurements(study: LoaderStudy) -> tuple[Measurement, ...]:
    """loader.samples_per_s of every setting tried: the median of its trials, with the lowest and highest."""
    groups: dict[tuple[object, ...], list[LoaderTrial]] = {}
    for trial in study.trials:
        if trial.rate is not None and trial.part == "real" and trial.purpose not in ("pin", "check"):
            key = (trial.workers, trial.prefetch, trial.whole_batch, trial.in_order, trial.one_thread)
            groups.setdefault(key, []).append(trial)
    result = []
    for group in groups.values():
        rates = [trial.rate for trial in group if trial.rate is not None]
        first = group[0]
        settings: dict[str, Setting] = {
            "num_workers": first.workers,
            "prefetch_factor": first.prefetch if first.workers else None,
            "whole_batch": first.whole_batch,
            "in_order": first.in_order,
            "threads_limited": first.one_thread,
            "ranks": study.ranks,
            "step_ms": round(study.step_ms, 3) if study.step_ms else None,
        }
        result.append(
            Measurement(
                metric="loader.samples_per_s",
                subject=study.site,
                value=round(statistics.median(rates), 3),
                unit="samples/s",
                spread=(round(min(rates), 3), round(max(rates), 3)) if len(rates) > 1 else None,
                samples=len(rates),
                settings=settings,
                verdict="no verdict" if study.verdict == "no verdict" else None,
            )
        )
    return tuple(result)


def prescribe(study: LoaderStudy, cwd: Path) -> Prescription:
    """Settings of the loader, the edit of its line, and the diff; nothing is written."""
    assert study.choice is not None
    arguments = study.choice.arguments
    kind = change_class(study)
    settings = LoaderSettings(
        site=study.site,
        arguments=arguments,
        change_class=kind,
        gain=study.gain,
        confidence="certain" if study.verdict == "keep" else "likely" if study.verdict == "change" else "possible",
    )
    changes: tuple[Change, ...] = ()
    diff = None
    if study.verdict == "change":
        diff, reason, edits = _diff(study, cwd)
        title = ", ".join(f"{name}={value}" for name, value in arguments.items())
        changes = (
            Change(
                id="C1",
                rule="LDR023" if study.choice.whole_batch else "LDR001" if not study.loader.num_workers else "LDR021",
                site=study.site,
                mechanism="loader",
                title=f"fetch whole batches, {title}" if study.choice.whole_batch else title,
                change_class=kind,
                edits=edits,
                kept=bool(edits),
                gain=study.gain,
                reason="; ".join(part for part in (study.reason, reason) if part),
            ),
        )
    return Prescription(loader=(settings,), changes=changes, patch=diff, verdict=f"{study.verdict}: {study.reason}")


def change_class(study: LoaderStudy) -> ChangeClass:
    """exact where rows draw nothing and stay in order; else stochastic."""
    assert study.choice is not None
    arguments = study.choice.arguments
    if arguments.get("in_order") is False or "persistent_workers" in arguments:
        return "stochastic"
    if study.loader.iterable_dataset or study.preflight.draws_random is not False:
        return "stochastic"
    return "exact"


def _diff(study: LoaderStudy, cwd: Path) -> tuple[str | None, str | None, tuple[Edit, ...]]:
    """(diff, why there is none, edits that it makes)."""
    assert study.choice is not None
    file = study.site.rpartition(":")[0]
    if not study.site.rpartition(":")[2].isdigit():
        return None, "no diff: the line that makes the loader is not known", ()
    if {"site-packages", "dist-packages"} & set(PurePath(file).parts):
        return None, "no diff: the line belongs to an installed package", ()
    path = cwd / file
    try:
        old = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None, f"no diff: {file} cannot be read as UTF-8 text", ()
    wanted = []
    if study.choice.whole_batch:
        wanted.append(Edit(kind="whole-batch", site=study.site, name="DataLoader"))
    arguments = dict(study.choice.arguments)
    wanted.append(Edit(kind="loader-arguments", site=study.site, name="DataLoader", arguments=arguments))
    done = patch.apply_edits(old, wanted, file=file)
    refused = [why for edit, why in done.refused if why != "the loader has these settings already"]
    if refused or not done.applied:
        return None, f"no diff: {refused[0] if refused else 'the call has these settings already'}", ()
    name = file if not PurePath(file).is_absolute() else PurePath(file).name
    return patch.unified_diff(name, old, done.text), None, done.applied
