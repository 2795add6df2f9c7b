"""The overlay: writes stay inside, records stay visible, and it says why when it is not to be had."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpudoctor.tune import sandbox as sandboxing


def test_writes_below_the_root_vanish_and_the_kept_directory_stays_visible(tmp_path: Path) -> None:
    root, keep = tmp_path / "project with space", tmp_path / "keep"
    root.mkdir()
    keep.mkdir()
    (root / "checkpoint.pt").write_text("good")
    sandbox = sandboxing.open_sandbox(root)
    if sandbox.own is None:
        pytest.skip(f"no overlay on this system: {sandbox.reason}")
    script = (
        f"cat checkpoint.pt; echo bad >checkpoint.pt; echo new >new.txt; cat checkpoint.pt; echo kept >'{keep}/record'"
    )
    result = subprocess.run(
        sandbox.wrap(["sh", "-c", script], keep), capture_output=True, text=True, check=True, cwd=root
    )
    sandbox.close()
    assert result.stdout == "goodbad\n"
    assert (root / "checkpoint.pt").read_text() == "good"
    assert not (root / "new.txt").exists()
    assert (keep / "record").read_text() == "kept\n"
    assert not sandbox.own.exists()


def test_a_kept_directory_below_the_root_stays_visible_too(tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    keep.mkdir()
    sandbox = sandboxing.open_sandbox(tmp_path)
    if sandbox.own is None:
        pytest.skip(f"no overlay on this system: {sandbox.reason}")
    subprocess.run(sandbox.wrap(["sh", "-c", f"echo kept >{keep}/record; echo x >lost"], keep), check=True)
    sandbox.close()
    assert (keep / "record").read_text() == "kept\n"
    assert not (tmp_path / "lost").exists()


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    sandbox = sandboxing.open_sandbox(tmp_path)
    assert subprocess.run(sandbox.wrap(["sh", "-c", "exit 7"], tmp_path), check=False).returncode == 7
    sandbox.close()


@pytest.mark.parametrize("root", ["/", "/tmp/a,b"])
def test_it_says_why_there_is_no_overlay(root: str) -> None:
    sandbox = sandboxing.open_sandbox(Path(root))
    assert sandbox.own is None
    assert sandbox.reason
    assert sandbox.wrap(["true"], Path("/tmp")) == ["true"]
