"""Whether a changed script still computes the same: parameters, batches, rows, files, exit code, console output.

Proof runs are apart from timing: observe forces seeds and deterministic algorithms and hashes what the loop sees.
What two runs of the unchanged command do not agree on cannot be asked of the changed one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpudoctor.model import Change, ChangeClass, Proof, ProofResult, Watched, WatchRecord

# Edits that change what the code computes with: the code behind the loop, too, has to be seen to run with them.
_REWRITES = (
    "device-accumulator", "collect-device", "defer-read", "drop-call", "log-every", "make-on-device", "pin-copy",
    "whole-batch", "channels-last", "autocast",
)  # fmt: skip
_DECIMAL = re.compile(r"([-+]?[0-9]*\.[0-9]+(?:[eE][-+]?[0-9]+)?)")
# Where training itself does not repeat, two unchanged runs may print the same rounded number by chance; a number of
# the changed run this near to it tells nothing either.
CHANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One proof run: what was watched, the lines that the command printed, and the checksum of each file that it
    wrote; None where it was stopped before its end."""

    watched: Watched
    output: tuple[str, ...]
    files: Mapping[str, str] | None = None


def prove(
    baseline: Run, candidate: Run, again: Callable[[], Run | None], *, change_class: ChangeClass, epochs_crossed: bool
) -> ProofResult:
    """Compare a candidate with the baseline; `again` runs the baseline once more and is called only on a difference.

    exact: everything must be equal, verdict "identical". logging: everything but console output and written files,
    which come less often. Others draw other random numbers, so parameters and batches are not asked; the rows
    delivered, their order and the exit code are.
    """
    exact = change_class in ("exact", "logging")
    base, changed = _items(baseline, change_class), _items(candidate, change_class)
    compared = tuple(name for name, value in base.items() if value is not None)
    telling = ("parameters", "batches", "rows", "first epoch's order", "console output", "written files")
    if not any(base.get(name) for name in telling):
        return ProofResult(
            verdict="not provable", reason=f"nothing was seen that changes of the class {change_class} must keep"
        )
    differing = [name for name in base if base[name] != changed[name]]
    note = None if epochs_crossed else "the window did not cross an epoch boundary"
    if not differing:
        if exact:
            return ProofResult(verdict="identical", compared=compared, reason=note)
        reason = "the same rows were delivered in the same order; random draws may differ"
        return ProofResult(verdict="consistent", compared=compared, reason=f"{reason}; {note}" if note else reason)
    second = again()
    if second is None:
        return ProofResult(
            verdict="not provable",
            compared=compared,
            reason=f"{differing[0]} differs, and the unchanged command could not be repeated",
        )
    repeat = _items(second, change_class)
    unstable = {name for name in differing if base[name] != repeat[name]}
    if "console output" in unstable and _lines_agree(baseline.output, second.output, candidate.output):
        unstable.discard("console output")  # clock readings differ from run to run, every other line is the same
        differing.remove("console output")
    if "parameters" in unstable and _near(baseline.output, candidate.output):
        unstable.update({"console output"} & set(differing))
    wrong = [name for name in differing if name not in unstable]
    if "written files" in unstable and wrong_file(baseline, candidate, second) is not None:
        wrong.append("written files")
    if wrong:
        return ProofResult(
            verdict="different", compared=compared, reason=_describe(wrong[0], baseline, candidate, second)
        )
    if unstable:
        names = ", ".join(sorted(unstable))
        return ProofResult(
            verdict="consistent",
            compared=tuple(name for name in compared if name not in unstable),
            reason=f"the unchanged command does not repeat itself in: {names}",
        )
    if exact:
        return ProofResult(verdict="identical", compared=compared, reason=note)
    return ProofResult(verdict="consistent", compared=compared, reason=note)


def rewrites(change: Change) -> bool:
    """Whether the change edits code that computes, so that the code behind the loop has to be seen to run with it."""
    return any(edit.kind in _REWRITES for edit in change.edits)


def proven_alone(changes: Sequence[Change]) -> list[Change]:
    """What must not change any number, to be proven once more without the changes that may; none where there are no
    such, or where nothing of it rewrites code."""
    strong = [change for change in changes if change.change_class in ("exact", "logging")]
    return strong if len(strong) < len(changes) and any(map(rewrites, strong)) else []


def training_records(watched: Watched) -> tuple[WatchRecord, ...]:
    """The records of processes that made steps or fetched batches; all of them when none did."""
    busy = tuple(record for record in watched.records if record.steps or record.batches)
    return busy or watched.records


def _items(run: Run, change_class: ChangeClass) -> dict[str, object]:
    same_draws = change_class in ("exact", "logging")
    records = training_records(run.watched)
    proofs = [record.proof for record in records]
    items: dict[str, object] = {
        "exit code": run.watched.exit_code,
        "exception": tuple(record.exception for record in records),
        "optimizer steps": tuple(record.optimizer_steps_all for record in records),
        "batches counted": tuple(record.batches for record in records),
        "rows": _gather(_rows(proof, same_draws=same_draws) for proof in proofs),
        "first epoch's order": _gather(proof.order[:1] if proof else () for proof in proofs),
        "shuffle": tuple(proof.shuffled if proof else None for proof in proofs),
        "repeated rows": tuple(proof.duplicates if proof else 0 for proof in proofs),
    }
    if same_draws:
        items |= {
            "batches": _gather(proof.batches if proof else () for proof in proofs),
            "parameters": _gather((proof.parameters,) if proof and proof.parameters else () for proof in proofs),
        }
    if change_class == "exact":
        items |= {
            "console output": run.output or None,
            "written files": tuple(sorted((run.files or {}).items())) or None,
        }
    return items


def _rows(proof: Proof | None, *, same_draws: bool) -> tuple[str, ...]:
    """Hashes of the rows delivered, an epoch each. Where draws may differ, an epoch that was cut short by the end of
    the window holds other rows of the same shuffled data, so only its length (batches counted) can be compared."""
    if proof is None:
        return ()
    if same_draws or not proof.complete:
        return proof.rows
    return tuple(row for row, complete in zip(proof.rows, proof.complete, strict=True) if complete)


def _gather(parts: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...] | None:
    gathered = tuple(parts)
    return gathered if any(gathered) else None


def _lines_agree(first: Sequence[str], second: Sequence[str], candidate: Sequence[str]) -> bool:
    """Whether the candidate printed every line on which two baseline runs agree."""
    if not len(first) == len(second) == len(candidate):
        return False
    return all(a == c for a, b, c in zip(first, second, candidate, strict=True) if a == b)


def _near(first: Sequence[str], candidate: Sequence[str]) -> bool:
    """Whether all lines are the same but for decimals that differ by little."""
    if len(first) != len(candidate):
        return False
    for a, b in zip(first, candidate, strict=True):
        parts, others = _DECIMAL.split(a), _DECIMAL.split(b)
        if len(parts) != len(others) or parts[::2] != others[::2]:
            return False
        if any(
            not math.isclose(float(x), float(y), rel_tol=CHANCE) for x, y in zip(parts[1::2], others[1::2], strict=True)
        ):
            return False
    return True


def wrong_file(baseline: Run, candidate: Run, second: Run) -> str | None:
    """The first file on which two runs of the unchanged command agree and the changed one does not.

    Where not even the names repeat themselves (folders named by the clock), further files say nothing.
    """
    first, again, changed = baseline.files or {}, second.files or {}, candidate.files or {}
    names = first.keys() & again.keys()
    if first.keys() == again.keys():
        names |= changed.keys()
    return next((name for name in sorted(names) if first.get(name) == again.get(name) != changed.get(name)), None)


def _describe(name: str, baseline_run: Run, candidate_run: Run, again: Run) -> str:
    baseline, candidate = baseline_run.watched, candidate_run.watched
    first, second = training_records(baseline)[:1], training_records(candidate)[:1]
    if name == "exit code":
        error = next((record.exception for record in candidate.records if record.exception), None)
        detail = error or (candidate.stderr_tail.strip().splitlines() or ["no message"])[-1]
        return f"the changed command ended with exit code {candidate.exit_code}: {detail}"
    if name == "written files":
        return f"the written file {wrong_file(baseline_run, candidate_run, again)} is another than before"
    if first and second and name in ("batches counted", "optimizer steps"):
        attribute = "batches" if name == "batches counted" else "optimizer_steps_all"
        return f"{name}: {getattr(first[0], attribute)} before, {getattr(second[0], attribute)} after"
    return f"{name} differ between the unchanged and the changed command"
