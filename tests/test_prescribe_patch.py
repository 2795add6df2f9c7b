"""Fixtures: tests/scripts/patch/NAME.in.py becomes NAME.out.py, and the patch goes on and off with git and patch."""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
from pathlib import Path

import pytest

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Edit
from gpudoctor.prescribe.loader_edit import POSITIONAL
from gpudoctor.prescribe.patch import Patched, apply_edits, apply_to_disk, encoding_of, revert, unified_diff

FIXTURES = Path(__file__).parent / "scripts" / "patch"
FILE = "train.py"
WORKERS = {"num_workers": 2}


def read(name: str) -> str:
    return (FIXTURES / name).read_bytes().decode()


def line_of(text: str, part: str) -> int:
    lines = [number for number, line in enumerate(text.split("\n"), 1) if part in line]
    assert lines, part
    return lines[0]


def edit(text: str, kind: str, part: str, **values: object) -> Edit:
    return Edit(kind=kind, site=f"{FILE}:{line_of(text, part)}", **values)  # type: ignore[arg-type]


def edits_of(name: str, text: str) -> list[Edit]:
    def make(kind: str, part: str, **values: object) -> Edit:
        return edit(text, kind, part, **values)

    if name == "images":
        return [
            make("loader-arguments", "DataLoader(Images", arguments={"num_workers": 4, "pin_memory": True}),
            make("whole-batch", "DataLoader(Images"),
            make("non-blocking", "images = images.to"),
            make("non-blocking", "labels = labels.to"),
            make("device-accumulator", "running_loss +=", name="running_loss"),
            make("device-accumulator", "correct +=", name="correct"),
            make("drop-call", "empty_cache", name="torch.cuda.empty_cache"),
        ]
    if name == "layout":
        return [
            make("whole-batch", "shuffle=True,  # keep"),  # any line of the call
            make("loader-arguments", "one_a_line", arguments=WORKERS),
            make("loader-arguments", "no_comma", arguments={"num_workers": 2, "pin_memory": True}),
            make("loader-arguments", "aligned", arguments=WORKERS),
            make("loader-arguments", "positional", arguments={"num_workers": 2, "prefetch_factor": 4}),
            make("whole-batch", "by_module"),
            make("loader-arguments", "by_module", arguments={"num_workers": 4, "prefetch_factor": 2}),
            make("loader-arguments", "replaced", arguments={"num_workers": 8, "persistent_workers": None,
                                                            "prefetch_factor": 2}),
            make("loader-arguments", "removed", arguments={"num_workers": 0, "prefetch_factor": 4}),
            make("whole-batch", "if True"),
            make("loader-arguments", "long =", arguments=WORKERS),
        ]  # fmt: skip
    if name == "logs":
        return [
            make("log-every", "print("),
            make("log-every", 'print("norm"'),
            make("log-every", "assert not torch.isnan"),
            make("log-every", "if torch.isnan"),
            make("collect-device", "losses.append", name="losses"),
            make("collect-device", 'history["norm"].append', name="history"),
            make("collect-device", 'history["hits"].append', name="history"),
            make("device-accumulator", "running_loss +=", name="running_loss"),
            make("device-accumulator", "correct +=", name="correct"),
            make("call-argument", "set_to_none", name="zero_grad", arguments={"set_to_none": None}),
            make("call-argument", "torch.optim.SGD", name="SGD", arguments={"fused": True}),
        ]
    if name == "tensors":
        return [
            make("pin-copy", "x.to(device), y.to"),
            make("pin-copy", "a.to(device)"),
            make("pin-copy", "noise.to(device)"),
            make("device-accumulator", "total +=", name="total", arguments={"convert": True}),
            make("call-argument", "AdamW(", name="AdamW", arguments={"fused": True}),
            make("call-argument", "return DDP", name="DDP", arguments={"find_unused_parameters": None}),
            make("call-argument", "return DDP", name="DDP", arguments={"gradient_as_bucket_view": True}),
            make("setting", "import DistributedDataParallel", name="torch.set_float32_matmul_precision"),
            make("setting", "import DistributedDataParallel", name="torch.backends.cudnn.benchmark"),
        ]
    starts = [number for number, line in enumerate(text.split("\n"), 1) if "empty_cache" in line]
    return [
        make("non-blocking", "x.cuda()"),
        make("device-accumulator", "total = total"),
        make("device-accumulator", "weighted +="),
        make("device-accumulator", "hits +="),
        make("drop-call", "synchronize"),
        *(Edit(kind="drop-call", site=f"{FILE}:{number}") for number in starts),
    ]


@functools.cache
def patched(name: str) -> tuple[str, Patched]:
    text = read(f"{name}.in.py")
    return text, apply_edits(text, edits_of(name, text), file=FILE)


@pytest.mark.parametrize("name", ["images", "layout", "sums", "logs", "tensors"])
def test_fixture(name: str) -> None:
    text, result = patched(name)
    assert result.refused == ()
    assert result.text == read(f"{name}.out.py")
    assert len(result.applied) == len(edits_of(name, text))
    ast.parse(result.text)
    lines = result.text.split("\n")
    assert result.lines
    assert all(lines[number - 1].strip() and not lines[number - 1].strip().startswith("#") for number in result.lines)


@pytest.mark.parametrize("name", ["images", "sums"])
def test_again_changes_nothing(name: str) -> None:
    text, result = patched(name)
    again = apply_edits(
        result.text,
        [Edit(kind=each.kind, site=f"{FILE}:{number}", arguments=each.arguments)
         for each in edits_of(name, text) for number in result.lines if each.kind in {"whole-batch", "drop-call"}],
        file=FILE,
    )  # fmt: skip
    assert again.applied == ()
    assert again.text == result.text


@pytest.mark.parametrize(
    ("name", "newline", "last_newline"),
    [
        ("images", "\n", True),
        ("layout", "\r\n", True),
        ("sums", "\r\n", False),
        ("logs", "\r\n", True),
        ("tensors", "\n", False),
    ],
)
def test_patch_applies_with_git_and_patch_and_back(tmp_path: Path, name: str, newline: str, last_newline: bool) -> None:
    text = read(f"{name}.in.py").replace("\n", newline)
    if not last_newline:
        text = text.rstrip("\r\n")
    result = apply_edits(text, edits_of(name, text), file=FILE)
    assert result.refused == ()
    assert ("\r\n" in result.text) == (newline == "\r\n")
    assert result.text.count("\n") == result.text.count(newline)
    repository = tmp_path / "repository"
    folder = repository / "deep" / "er"
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    target = folder / FILE
    target.write_bytes(text.encode())
    diff = unified_diff(FILE, text, result.text)
    assert "diff --git" not in diff
    (folder / "train.patch").write_bytes(diff.encode())
    for command in (["git", "apply", "--check", "train.patch"], ["patch", "-p1", "--dry-run", "-i", "train.patch"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
    subprocess.run(["git", "apply", "train.patch"], cwd=folder, check=True)
    assert target.read_bytes() == result.text.encode()
    back = unified_diff(FILE, result.text, text)
    subprocess.run(["git", "apply", "-"], cwd=folder, input=back.encode(), check=True)
    assert target.read_bytes() == text.encode()
    subprocess.run(["patch", "-p1", "-s", "--binary", "-i", "train.patch"], cwd=folder, check=True)
    assert target.read_bytes() == result.text.encode()


def test_git_apply_from_the_root_of_the_repository(tmp_path: Path) -> None:
    text, result = patched("images")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / FILE).write_bytes(text.encode())
    diff = unified_diff(FILE, text, result.text)
    subprocess.run(["git", "apply", "--check", "-"], cwd=tmp_path, input=diff.encode(), check=True)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff.encode(), check=True)
    assert (tmp_path / FILE).read_bytes() == result.text.encode()


def test_a_name_with_a_space(tmp_path: Path) -> None:
    old, new = "a = 1\n", "a = 2\n"
    (tmp_path / "my train.py").write_text(old)
    diff = unified_diff("my train.py", old, new)
    subprocess.run(["patch", "-p1", "--dry-run"], cwd=tmp_path, input=diff.encode(), check=True, capture_output=True)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff.encode(), check=True)
    assert (tmp_path / "my train.py").read_text() == new


@pytest.mark.parametrize(
    "file", ["/etc/passwd", "../x.py", "a/../../x.py", "a\nb.py", 'a"b.py', "", "./a.py", "a\u2028b"]
)
def test_unsafe_names_are_refused(file: str) -> None:
    with pytest.raises(GpudoctorError):
        unified_diff(file, "a\n", "b\n")


def test_equal_texts_give_no_diff() -> None:
    assert unified_diff(FILE, "a\n", "a\n") == ""


def test_form_feed_and_line_separator_end_no_line(tmp_path: Path) -> None:
    old = "a = 1\n\x0cb = '\u2028'\nc = 3\n"
    new = old.replace("c = 3", "c = 4")
    (tmp_path / FILE).write_bytes(old.encode())
    subprocess.run(["patch", "-p1", "-s"], cwd=tmp_path, input=unified_diff(FILE, old, new).encode(), check=True)
    assert (tmp_path / FILE).read_bytes() == new.encode()


def test_to_disk_and_back(tmp_path: Path) -> None:
    text, result = patched("images")
    other = "# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n"
    (tmp_path / FILE).write_bytes(text.encode())
    (tmp_path / FILE).chmod(0o755)
    (tmp_path / "lib.py").write_bytes(other.encode("latin-1"))
    assert encoding_of(other) == "iso-8859-1"
    reverse = tmp_path / "out" / "reverse.patch"
    apply_to_disk(tmp_path, {FILE: (text, result.text), "lib.py": (other, other + "more = 1")}, reverse)
    assert (tmp_path / FILE).read_bytes() == result.text.encode()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "lib.py").read_bytes() == (other + "more = 1").encode("latin-1")
    assert revert(reverse, tmp_path) == (FILE, "lib.py")
    assert (tmp_path / FILE).read_bytes() == text.encode()
    assert (tmp_path / "lib.py").read_bytes() == other.encode("latin-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lib.py", "out", FILE]


def test_a_changed_file_is_neither_patched_nor_reverted(tmp_path: Path) -> None:
    text, result = patched("images")
    (tmp_path / FILE).write_text(text + "# edited\n")
    with pytest.raises(GpudoctorError, match="was changed since"):
        apply_to_disk(tmp_path, {FILE: (text, result.text)}, tmp_path / "r.patch")
    assert (tmp_path / FILE).read_text() == text + "# edited\n"
    assert not (tmp_path / "r.patch").exists()
    (tmp_path / FILE).write_text(text)
    apply_to_disk(tmp_path, {FILE: (text, result.text)}, tmp_path / "r.patch")
    (tmp_path / FILE).write_text(result.text.replace("num_workers=4", "num_workers=5"))
    with pytest.raises(GpudoctorError, match="was changed since"):
        revert(tmp_path / "r.patch", tmp_path)


def test_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a\n")
    with pytest.raises(GpudoctorError, match=r"cannot read b\.py"):
        apply_to_disk(tmp_path, {"a.py": ("a\n", "A\n"), "b.py": ("b\n", "B\n")}, tmp_path / "r.patch")
    assert (tmp_path / "a.py").read_text() == "a\n"


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "work"
    inside.mkdir()
    (tmp_path / "outside.py").write_text("a\n")
    (inside / FILE).symlink_to(tmp_path / "outside.py")
    with pytest.raises(GpudoctorError, match="outside"):
        apply_to_disk(inside, {FILE: ("a\n", "b\n")}, inside / "r.patch")
    assert (tmp_path / "outside.py").read_text() == "a\n"


@pytest.mark.parametrize("text", ["", "nothing\n", "--- a/x.py\n", "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n"])
def test_revert_refuses_what_is_no_reverse_patch(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.py").write_text("a\n")
    (tmp_path / "r.patch").write_text(text)
    with pytest.raises(GpudoctorError):
        revert(tmp_path / "r.patch", tmp_path)
    with pytest.raises(GpudoctorError, match="cannot read"):
        revert(tmp_path / "missing.patch", tmp_path)


def test_the_signature_is_torchs() -> None:
    from torch.utils.data import DataLoader

    parameters = list(inspect.signature(DataLoader.__init__).parameters.values())[1:]
    assert [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] == list(POSITIONAL)


def test_byte_order_mark_and_cookie_are_kept() -> None:
    text = "\ufeff# -*- coding: utf-8 -*-\n" + read("images.in.py")
    result = apply_edits(text, edits_of("images", text), file=FILE)
    assert result.refused == ()
    assert result.text == "\ufeff# -*- coding: utf-8 -*-\n" + read("images.out.py")
