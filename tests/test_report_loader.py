"""The report of a loader study: every part is told, in any width, in ASCII, and with hostile names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from gpudoctor.cli.tune_loader import _write_svg
from gpudoctor.model import (
    Case,
    Change,
    Envelope,
    Gain,
    LoaderChoice,
    LoaderFault,
    LoaderPreflight,
    LoaderSettings,
    LoaderStudy,
    LoaderTrial,
    Prescription,
    WatchedLoader,
)
from gpudoctor.report import loader_curve, loader_svg, render, render_loader_svg
from gpudoctor.report.text import Style, columns

DIFF = (
    "--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n"
    "-loader = DataLoader(data)\n+loader = DataLoader(data, num_workers=4)\n"
)


def trial(workers: int, rate: float | None, **changes: object) -> LoaderTrial:
    made = LoaderTrial(
        workers=workers, prefetch=2, rate=rate, samples=800, batches=50, seconds=0.8,
        first_batch_s=0.1 + 0.05 * workers, private_bytes=workers * 12 * 2**20, shm_bytes=2**20 * workers,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def study(**changes: object) -> LoaderStudy:
    loader = WatchedLoader(
        site="train.py:45", ordinal=0, role="unknown", loader_class="DataLoader", dataset_class="Photographs",
        iterable_dataset=False, dataset_len=4000, length=250, batch_size=16, num_workers=1, prefetch_factor=2,
    )  # fmt: skip
    made = LoaderStudy(
        site="train.py:45",
        target="train.py",
        loader=loader,
        preflight=LoaderPreflight(rows=64, row_ms=2.1, cpu_share=0.1, collate_ms=0.3, batch_bytes=2**20),
        cpus=8.0,
        most_workers=8,
        most_because="8 usable CPUs a rank",
        step_ms=12.8,
        step_from="observed",
        trials=(
            trial(0, 290.0), trial(1, 350.0), trial(1, 370.0), trial(2, 600.0), trial(4, 1000.0), trial(4, 1040.0),
            trial(8, 1050.0, prefetch=4), trial(8, 1100.0, in_order=False, prefetch=4),
        ),
        present_known=True,
        choice=LoaderChoice(arguments={"num_workers": 4}, rate=1020.0, low=950.0, high=1090.0),
        verdict="change",
        reason="2.8x of the present rate (2.5 to 3.1)",
        gain=Gain(low=2.5, high=3.1, unit="x", basis="measured", source="trials of the loader alone"),
        limit="waiting",
        limit_reason="90% of a row's time is waiting",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def prescription() -> Prescription:
    settings = LoaderSettings(site="train.py:45", arguments={"num_workers": 4}, change_class="exact")
    change = Change(id="C1", rule="LDR021", site="train.py:45", mechanism="loader", title="t", change_class="exact")
    return Prescription(loader=(settings,), changes=(change,), patch=DIFF, verdict="change")


def lines(item: LoaderStudy, width: int | None = None, *, unicode: bool = True) -> list[str]:
    return loader_curve.study(item, prescription(), Style(width=width, unicode=unicode, color=False, verbose=0))


def test_every_part_is_told() -> None:
    text = "\n".join(lines(study()))
    for part in (
        "train.py:45", "Photographs", "4000 rows", "num_workers 1", "a row takes 2.10 ms", "a step 12.8 ms (observed)",
        "at most 8 workers", "now", "best", "any order", "limit", "change: 2.8x", "num_workers=4: 1020 samples/s",
        "+loader = DataLoader(data, num_workers=4)",
    ):  # fmt: skip
        assert part in text, part


def test_the_curve_marks_the_present_and_the_best_setting() -> None:
    rows = [line.split() for line in lines(study()) if line.strip()[:1].isdigit()]
    marks = {row[0]: row[-1] for row in rows if row[-1] in ("now", "best")}
    assert marks == {"1": "now", "4": "best"}


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_terminal(width: int, unicode: bool) -> None:
    shown = [line for line in lines(study(), width, unicode=unicode) if line[:1] not in ("+", "-", "@", " ")] + [
        line for line in lines(study(), width, unicode=unicode) if line.startswith("  ")
    ]
    assert all(columns(line) <= width for line in shown), max(shown, key=columns)
    assert unicode or all(line.isascii() for line in shown)


def test_bars_stand_in_wide_terminals_only() -> None:
    assert any("█" in line for line in lines(study(), 120))
    assert not any("█" in line for line in lines(study(), None))


def test_hostile_names_act_on_nothing() -> None:
    hostile = "a\x1b[31m\n[red]b"
    item = study(
        site=f"{hostile}:3",
        reason=hostile,
        limit_reason=hostile,
        trials=(trial(2, 10.0), trial(3, None, fault=LoaderFault(kind="exception", text=hostile))),
    )
    text = "\n".join(lines(item))
    assert "\x1b" not in text
    assert "\n[red]" not in text


def test_keep_and_no_verdict_are_said_in_words() -> None:
    assert any(line.startswith("keep: ") for line in lines(study(verdict="keep", reason="the loader keeps up")))
    busy = lines(study(verdict="no verdict", reason="host busy: one trial differs from the next by 30%"))
    assert any("host busy" in line for line in busy)
    assert not any(line.startswith("settings") for line in busy)


def test_failed_trials_are_told_once_with_their_line() -> None:
    fault = LoaderFault(
        kind="hang", text="worker 0 makes no progress", site="data.py:7", stack=('File "data.py", line 7',)
    )
    told = [line for line in lines(study(trials=(trial(2, None, fault=fault),) * 2)) if "no progress" in line]
    assert told == ["failed   2 workers: worker 0 makes no progress (data.py:7)"]


def test_the_envelope_renders_in_every_format() -> None:
    envelope = Envelope(
        version="0", command="tune-loader", status="clean", exit_code=0, case=Case(loader=study()),
        prescription=prescription(),
    )  # fmt: skip
    assert "samples/s" in render(envelope, "human")
    assert '"loader"' in render(envelope, "json")
    for form in ("markdown", "junit"):
        assert render(envelope, form)  # type: ignore[arg-type]


@pytest.mark.parametrize(("verdict", "closing"), [("change", "nothing else found."), ("keep", "nothing found.")])
def test_the_closing_line_does_not_contradict_the_choice(verdict: str, closing: str) -> None:
    case = Case(loader=study(verdict=verdict))
    envelope = Envelope(version="0", command="tune-loader", status="clean", exit_code=0, case=case, clean=("LDR001",))
    told = render(envelope, "human")
    assert closing in told.splitlines()


def test_the_curve_as_svg_shows_every_trial_and_escapes_names() -> None:
    loader = dataclasses.replace(study().loader, dataset_class="<script>&")
    picture = render_loader_svg(study(loader=loader, verdict="change"))
    root = ET.fromstring(picture)
    kinds = [(node.tag.rpartition("}")[2], node.get("class", "")) for node in root.iter()]
    rated = [item for item in study().trials if item.rate and item.part == "real"]
    assert sum(kind == "circle" and "dot" in name for kind, name in kinds) == len(rated)
    assert [kind for kind, _ in kinds if kind in ("script", "image", "a", "use")] == []
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    texts = [node.text or "" for node in root.iter() if node.tag.endswith("text")]
    assert {"now", "best", "workers", "samples/s", "\u25cf prefetch 4, any order"} <= set(texts)
    assert any("<script>&" in text for text in texts)
    assert "the step can use 1250" in texts  # 16 rows in 12.8 ms
    with pytest.raises(ValueError, match="no trial gave a rate"):
        render_loader_svg(study(trials=(trial(2, None),)))


def test_a_picture_has_room_for_the_highest_rate() -> None:
    for value in (0.3, 7.0, 103.0, 515.0, 1838.0, 99999.0):
        assert value <= loader_svg._nice(value) <= 1.6 * value


def test_a_study_is_told_where_its_curve_cannot_be_written(tmp_path: Path) -> None:
    session: Any = SimpleNamespace(notes=[], errors=[])
    path = tmp_path / "curve.svg"
    _write_svg(study(trials=(trial(1, 350.0, purpose="check"), trial(2, None))), str(path), session)
    assert session.notes == [f"there is no curve to write to {path}: no trial gave a rate"]
    assert not path.exists()
    _write_svg(study(), str(tmp_path / "no" / "such.svg"), session)
    assert session.errors[0].startswith("cannot write")
    _write_svg(study(), str(path), session)
    assert path.read_text().startswith("<svg ")
