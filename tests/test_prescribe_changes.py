"""propose: from watched records to candidates, and to advice where no patch is possible."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gpudoctor.model import (
    Case,
    Change,
    CopySite,
    FetchProbe,
    Finding,
    Host,
    Limits,
    SyncSite,
    Watched,
    WatchedLoader,
    WatchRecord,
)
from gpudoctor.prescribe.changes import loader_limit, propose, worker_ladder
from gpudoctor.prescribe.patch import apply_edits
from gpudoctor.source import later_uses

TEXT = (Path(__file__).parent / "scripts" / "patch" / "images.in.py").read_text()
PROBE = FetchProbe(rows=64, row_by_row_ms=60.0, whole_batch_ms=6.0, equal=True, draws_random=False, repeatable=True)


def at(part: str) -> str:
    return f"train.py:{next(n for n, line in enumerate(TEXT.splitlines(), 1) if part in line)}"


LOADER = WatchedLoader(
    site=at("DataLoader("), ordinal=0, role="train", loader_class="DataLoader", dataset_class="Images",
    iterable_dataset=False, dataset_len=6400, length=100, batch_size=64, shuffle=True, drop_last=True,
    iterators=1, batches=100, wait_ms=6000.0, batch_bytes=1_000_000,
)  # fmt: skip
COPIES = tuple(
    CopySite(site=at(part), function="to", kind="h2d", calls=100, bytes=10**8, waited_ms=200.0, calls_in_steps=99,
             from_loader=True)
    for part in ("images = images.to", "labels = labels.to")
)  # fmt: skip
SYNCS = tuple(
    SyncSite(site=at(part), function=function, calls=100, on_device=100, waited_ms=waited, calls_in_steps=99)
    for part, function, waited in [
        ("running_loss +=", "item", 1500.0),
        ("correct +=", "item", 100.0),
        ("empty_cache", "empty_cache", 50.0),
    ]
)
RECORD = WatchRecord(
    pid=1, cuda=True, device="cuda:0", optimizer_steps=100, batches=100, watched_s=10.0,
    loaders=(LOADER,), copies=COPIES, syncs=SYNCS,
)  # fmt: skip
CASE = Case(host=Host(cpu_count=16), limits=Limits(allowed_cpus=tuple(range(16))))


def safe(text: str, name: str, line: int) -> tuple[bool, str | None]:
    use = later_uses(text, name, line)
    return use.safe, use.reason


def proposed(
    record: WatchRecord = RECORD, *more: WatchRecord, case: Case = CASE, text: str = TEXT, findings: Any = ()
) -> list[Change]:
    watched = Watched(command=("python", "train.py"), cwd="/w", records=(record, *more))
    return list(propose(dataclasses.replace(case, watched=watched), findings, texts={"train.py": text}, safe=safe))


def with_loader(**values: Any) -> WatchRecord:
    return dataclasses.replace(RECORD, loaders=(dataclasses.replace(LOADER, **values),))


def one(changes: list[Change], rule: str) -> Change:
    (change,) = [change for change in changes if change.rule == rule]
    return change


def test_everything_at_once() -> None:
    changes = proposed(with_loader(fetch_probe=PROBE))
    assert [change.id for change in changes] == [f"C{number}" for number in range(1, len(changes) + 1)]
    loader = one(changes, "LDR001")
    assert loader.title == "num_workers=2, pin_memory=True"  # a batch takes 60 ms to make and 40 ms to use
    assert (loader.mechanism, loader.change_class, loader.site) == ("loader", "exact", LOADER.site)
    copies = one(changes, "CPY001")
    assert [edit.site for edit in copies.edits] == [COPIES[0].site, COPIES[1].site]
    assert copies.mechanism == "loader"
    fetch = one(changes, "LDR023")
    assert (fetch.mechanism, fetch.change_class) == ("fetch", "exact")
    sums = [change for change in changes if change.rule == "SYN001"]
    assert [change.edits[0].name for change in sums] == ["running_loss", "correct"]  # the longest wait first
    assert one(changes, "SYN006").edits[0].name == "torch.cuda.empty_cache"
    assert {change.mechanism for change in changes if change.rule.startswith("SYN")} == {"sync"}
    result = apply_edits(TEXT, [edit for change in changes for edit in change.edits], file="train.py")
    assert result.refused == ()
    expected = (Path(__file__).parent / "scripts" / "patch" / "images.out.py").read_text()
    assert result.text == expected.replace("num_workers=4", "num_workers=2")


def test_a_well_set_script_yields_nothing() -> None:
    loader = dataclasses.replace(LOADER, num_workers=8, pin_memory=True, wait_ms=100.0, fetch_probe=PROBE)
    copies = tuple(dataclasses.replace(copy, pinned=100, non_blocking=100) for copy in COPIES)
    assert proposed(dataclasses.replace(RECORD, loaders=(loader,), copies=copies, syncs=())) == []
    assert proposed(WatchRecord(pid=1)) == []
    assert propose(CASE, (), texts={}, safe=safe) == ()


def test_without_a_gpu_only_the_loader_is_changed() -> None:
    copies = tuple(dataclasses.replace(copy, kind="none", waited_ms=0.0) for copy in COPIES)
    syncs = tuple(dataclasses.replace(sync, on_device=0) for sync in SYNCS)
    record = dataclasses.replace(RECORD, cuda=False, device="cpu", copies=copies, syncs=syncs)
    (change,) = proposed(record)
    assert change.title == "num_workers=2"


@pytest.mark.parametrize(
    ("probe", "kind"),
    [
        (PROBE, "exact"),
        (dataclasses.replace(PROBE, draws_random=True), "stochastic"),
        (dataclasses.replace(PROBE, repeatable=False), "stochastic"),
        (dataclasses.replace(PROBE, error="no"), "stochastic"),
        (None, "stochastic"),
    ],
)
def test_workers_are_exact_only_when_nothing_is_drawn(probe: FetchProbe | None, kind: str) -> None:
    assert one(proposed(with_loader(fetch_probe=probe)), "LDR001").change_class == kind


def test_workers_from_the_time_to_make_and_to_use_a_batch() -> None:
    assert "num_workers=9," in one(proposed(with_loader(wait_ms=9000.0)), "LDR001").title
    assert "num_workers=15," in one(proposed(with_loader(wait_ms=9900.0)), "LDR001").title  # the limit
    assert "num_workers=4," in one(proposed(with_loader(num_workers=2, wait_ms=5000.0)), "LDR021").title
    assert one(proposed(with_loader(wait_ms=400.0)), "LDR003").title == "pin_memory=True"


def test_persistent_workers_only_where_restarting_shows() -> None:
    assert "persistent" not in one(proposed(with_loader(fetch_probe=PROBE)), "LDR001").title
    change = one(proposed(with_loader(fetch_probe=PROBE, iterators=5)), "LDR001")
    assert change.title == "num_workers=2, pin_memory=True, persistent_workers=True"
    assert change.change_class == "stochastic"
    record = with_loader(num_workers=4, wait_ms=450.0, pin_memory=True, iterators=3, first_batch_ms=150.0)
    assert one(proposed(record), "LDR002").title == "persistent_workers=True"


def test_iterable_datasets_get_no_workers() -> None:
    change = one(proposed(with_loader(iterable_dataset=True)), "LDR001")
    assert change.edits == ()
    assert "several times" in (change.reason or "")


def test_shared_memory_bounds_the_workers() -> None:
    limits = Limits(allowed_cpus=tuple(range(16)), shm_free_bytes=10_000_000)
    case = Case(limits=limits)
    assert loader_limit(case, RECORD, 1) == 3  # (3 * 2 + 2) MB is within 8 MB
    assert loader_limit(case, RECORD, 2) == 1
    tiny = Case(limits=dataclasses.replace(limits, shm_free_bytes=1_000_000))
    assert loader_limit(tiny, RECORD, 1) == 0
    change = one(proposed(case=tiny), "LDR001")
    assert change.edits == ()
    assert "CTR001" in (change.reason or "")


@pytest.mark.parametrize(
    ("cpus", "quota", "ranks", "limit"),
    [(16, None, 1, 15), (16, 4.0, 1, 3), (16, 1.5, 1, 1), (64, None, 8, 7), (2, None, 1, 1), (1, None, 4, 1)],
)
def test_limit(cpus: int, quota: float | None, ranks: int, limit: int) -> None:
    case = Case(limits=Limits(allowed_cpus=tuple(range(cpus)), cpu_quota=quota))
    assert loader_limit(case, WatchRecord(pid=1), ranks) == limit


def test_ladder() -> None:
    assert worker_ladder(0) == ()
    assert worker_ladder(1) == (1,)
    assert worker_ladder(7) == (1, 2, 4, 7)
    assert worker_ladder(8) == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("values", "word"),
    [({"draws_random": True}, "draws random"), ({"equal": False}, "not what its rows"), ({"repeatable": False}, "not")],
)
def test_whole_batches_that_would_differ_are_advice(values: dict[str, Any], word: str) -> None:
    change = one(proposed(with_loader(fetch_probe=dataclasses.replace(PROBE, **values))), "LDR023")
    assert change.edits == ()
    assert word in (change.reason or "")


@pytest.mark.parametrize(
    "values",
    [{"custom_collate": True}, {"custom_sampler": True}, {"iterable_dataset": True}, {"wait_ms": 100.0},
     {"fetch_probe": dataclasses.replace(PROBE, whole_batch_ms=50.0)}, {"fetch_probe": None},
     {"fetch_probe": dataclasses.replace(PROBE, error="IndexError")}, {"batch_size": None}],
)  # fmt: skip
def test_whole_batches_are_not_offered(values: dict[str, Any]) -> None:
    changes = proposed(with_loader(**{"fetch_probe": PROBE, **values}))
    assert [change for change in changes if change.mechanism == "fetch"] == []


def test_one_line_that_makes_several_loaders() -> None:
    other = dataclasses.replace(LOADER, ordinal=1, role="other", dataset_class="Other")
    record = dataclasses.replace(RECORD, loaders=(dataclasses.replace(LOADER, fetch_probe=PROBE), other))
    assert "several datasets" in (one(proposed(record), "LDR023").reason or "")


def test_non_blocking_needs_a_pinned_source() -> None:
    plain = tuple(dataclasses.replace(copy, from_loader=False) for copy in COPIES)
    pins = [change for change in proposed(dataclasses.replace(RECORD, copies=plain)) if change.rule == "CPY001"]
    assert all(change.edits == () and "cannot be told" in (change.reason or "") for change in pins)
    pinned = tuple(dataclasses.replace(copy, pinned=100) for copy in plain)
    change = one(proposed(dataclasses.replace(RECORD, copies=pinned, loaders=())), "CPY001")
    assert len(change.edits) == 2
    text = TEXT.replace("images.to(device)", "images.to(where)")
    change = one(proposed(dataclasses.replace(RECORD, copies=pinned, loaders=()), text=text), "CPY001")
    assert [edit.site for edit in change.edits] == [COPIES[1].site]
    assert f"{COPIES[0].site}: no copy to a device" in (change.reason or "")


def test_small_copies_are_left_alone_unless_a_rule_told() -> None:
    small = tuple(dataclasses.replace(copy, waited_ms=1.0) for copy in COPIES)
    quiet = dataclasses.replace(with_loader(wait_ms=0.0), copies=small, syncs=())
    assert proposed(quiet) == []
    finding = Finding(rule="CPY001", name="n", severity="warning", subject=COPIES[0].site, message="m")
    assert [change.rule for change in proposed(quiet, findings=[finding])] == ["LDR003", "CPY001"]


def test_reads_that_cannot_be_kept_are_advice() -> None:
    for line, word in [
        ("best = max(best, loss.item())", "no sum of the form"),
        ("losses.append(loss.item())", "not made in this function"),
        ("running_loss += loss.item() + 1", "more than scale"),
    ]:
        text = TEXT.replace("running_loss += loss.item()", line)
        change = next(change for change in proposed(text=text) if change.rule == "SYN001")
        assert change.edits == ()
        assert change.change_class == "logging"
        assert word in (change.reason or "")


def test_an_unsafe_later_use_is_advice() -> None:
    text = TEXT.replace("        # the end of the loop", "        names.append(running_loss)")
    changes = [change for change in proposed(text=text) if change.rule == "SYN001"]
    assert changes[0].edits == ()
    assert "names.append" in (changes[0].reason or "")


def test_rare_syncs_are_left_alone() -> None:
    rare = tuple(dataclasses.replace(sync, calls_in_steps=5) for sync in SYNCS)
    assert not any(change.mechanism == "sync" for change in proposed(dataclasses.replace(RECORD, syncs=rare)))


def test_other_syncs_are_no_change() -> None:
    for function in ("sync", "bool", "nonzero", "item"):  # item: read inside of backward()
        sync = dataclasses.replace(SYNCS[0], site=at("loss.backward"), function=function)
        assert not any(c.mechanism == "sync" for c in proposed(dataclasses.replace(RECORD, syncs=(sync,))))


@pytest.mark.parametrize(
    ("file", "word"),
    [("/usr/lib/python3/site-packages/lib/loader.py", "installed package"), ("/srv/train.py", "outside"),
     ("other.py", "not at hand"), ("venv/lib/python3.11/site-packages/x.py", "installed package")],
)  # fmt: skip
def test_files_that_are_never_patched(file: str, word: str) -> None:
    change = one(proposed(with_loader(site=f"{file}:45")), "LDR001")
    assert change.edits == ()
    assert word in (change.reason or "")
    assert not any(c.rule == "CPY001" for c in proposed(with_loader(site=f"{file}:45")))  # nothing will be pinned


def test_ranks_share_the_cpus_and_speak_once() -> None:
    other = dataclasses.replace(with_loader(wait_ms=9000.0), pid=2, rank=1)
    changes = proposed(RECORD, other)
    assert "num_workers=7" in one(changes, "LDR001").title  # the rank that waits longest, half of the CPUs
    assert len([change for change in changes if change.rule == "SYN006"]) == 1


def test_the_mechanism_that_loses_most_comes_first() -> None:
    slow = tuple(dataclasses.replace(sync, waited_ms=sync.waited_ms * 6) for sync in SYNCS)
    changes = proposed(dataclasses.replace(with_loader(wait_ms=900.0), syncs=slow))
    assert changes[0].mechanism == "sync"
    assert proposed()[0].mechanism == "loader"


def test_hostile_sites_are_advice_or_nothing() -> None:
    for site in ("", ":", "train.py", "train.py:x", "train.py:-1", "train.py:0", "a\nb:1", "train.py:99999999999"):
        for change in proposed(dataclasses.replace(with_loader(site=site), copies=(), syncs=())):
            assert change.edits == ()
        sync = dataclasses.replace(SYNCS[0], site=site)
        assert all(c.edits == () for c in proposed(dataclasses.replace(RECORD, loaders=(), copies=(), syncs=(sync,))))
