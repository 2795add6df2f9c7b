"""Rows are much slower when they come from storage than from memory.

What it means
    The first epoch, and each epoch of data that does not fit into memory, reads every row from a disk or a network.
    Later epochs may find them in the page cache and look fine.
Why it costs
    A first epoch took about ten times as long in one report (https://github.com/NVIDIA/DALI/issues/1415).
How we know
    tune-loader fetched rows that were read from storage (the kernel counts the bytes) and the same rows again, when no
    byte was read. Small files were asked to leave the page cache first.
Fix
    Copy the data to a local disk before training; few large files that are read in order (shards, archives, memory
    maps) in place of many small ones; more workers overlap the waiting, up to what the storage gives.
When to ignore
    The data fit into memory and there are many epochs: only the first one pays.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of

RULE = Rule(code="LDR005", name="storage-bound", severity="warning", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    study = case.loader
    assert study is not None  # `needs`
    cold, warm = study.preflight.cold_ms, study.preflight.warm_ms
    if cold is None or warm is None or not study.preflight.storage_bytes:
        yield Unchecked(reason="no row was read from storage while it was watched", subject=study.site)
        return
    factor = cold / max(warm, 1e-3)
    if factor >= case.threshold(RULE.code, "factor") and cold >= case.threshold(RULE.code, "row_ms"):
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=study.site,
            message=f"a row takes {cold:.1f} ms from storage and {warm:.2f} ms from memory ({factor:.1f}x)",
            evidence=(evidence(case, "loader.preflight.cold_ms", f"{cold:.1f} ms", f"near {warm:.2f} ms"),),
            remedies=(
                Remedy(kind="config", text="copy the data to a local disk before training"),
                Remedy(kind="code", text="few large files read in order: shards, archives or memory maps"),
            ),
            confidence="likely",
        )


def _case(cold: float, warm: float) -> Case:
    return case_of(preflight={"cold_ms": cold, "warm_ms": warm, "storage_bytes": 2**20})


EXAMPLES = (
    Example(name="20 ms cold, 2 ms warm", kind="fires", case=_case(20.0, 2.0), subjects=("data.py:12",)),
    Example(name="decoding dominates", kind="quiet", case=_case(6.0, 5.0)),
    Example(name="too little to matter", kind="quiet", case=_case(0.2, 0.01)),
    Example(name="nothing was read from storage", kind="lacks", case=case_of()),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
