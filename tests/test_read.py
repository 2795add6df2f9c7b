"""read_artifacts: Case files, merging, and inputs that cannot be read."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest

from gpudoctor import codec
from gpudoctor.model import Case, Envelope, Gpu, Host
from gpudoctor.read import files, identify, read_artifacts

HEAD = "\tGPU0\tGPU1\tCPU Affinity\n"
TOPO = HEAD + "GPU0\t X \tSYS\t0-7\nGPU1\tSYS\t X \t8-15\n"
NEAR = HEAD + "GPU0\t X \tPIX\t0-7\nGPU1\tPIX\t X \t0-7\n"
CASE = Case(host=Host(hostname="node-a"), gpus=(Gpu(index=0, bdf="0000:3b:00.0"),))


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_bare_case_and_envelope(tmp_path: Path) -> None:
    bare = write(tmp_path, "bare.json", codec.encode(CASE))
    envelope = Envelope(version="0", command="topo", status="clean", exit_code=0, case=CASE)
    whole = write(tmp_path, "whole.json", codec.encode_envelope(envelope))
    result = read_artifacts([bare, whole])
    assert result.cases == (CASE, CASE)
    assert [artifact.kind for artifact in result.artifacts] == ["case", "case"]
    assert result.errors == ()


def test_stdin_text_and_bytes() -> None:
    for stdin in (io.StringIO(TOPO), io.BytesIO(TOPO.encode())):
        result = read_artifacts(["-"], stdin)
        assert len(result.cases[0].gpus) == 2
        assert result.artifacts[0].file == "stdin"
        assert result.cases[0].sources[0].origin == "stdin"


def test_one_machine_in_two_files_becomes_one_case(tmp_path: Path) -> None:
    short = write(tmp_path, "short.txt", "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n")
    (case,) = read_artifacts([short, write(tmp_path, "topo.txt", TOPO)]).cases
    assert case.gpus[1].local_cpus == tuple(range(8, 16))


def test_machines_that_differ_stay_apart(tmp_path: Path) -> None:
    paths = [write(tmp_path, "a.txt", TOPO), write(tmp_path, "b.txt", NEAR), write(tmp_path, "c.txt", TOPO)]
    assert [case.pairs[0].path for case in read_artifacts(paths).cases] == ["SYS", "PIX"]
    named = [
        write(tmp_path, f"{host}.txt", f"root@{host}:~# nvidia-smi topo -m\n{TOPO}") for host in ("node-a", "node-b")
    ]
    assert [case.host.hostname for case in read_artifacts(named).cases] == ["node-a", "node-b"]
    mixed = [write(tmp_path, "case.json", codec.encode(CASE)), paths[0]]
    assert len(read_artifacts(mixed).cases) == 2  # a text with indices only is never joined to GPUs with a BDF


def test_each_bad_input_costs_one_line_and_the_rest_is_read(tmp_path: Path) -> None:
    good = write(tmp_path, "topo.txt", TOPO)
    (tmp_path / "nothing").mkdir()
    bad = {
        str(tmp_path / "missing.txt"): "No such file",
        str(tmp_path / "nothing"): "folder without files",
        write(tmp_path, "empty.txt", ""): "empty",
        write(tmp_path, "blank.txt", " \n\n"): "empty",
        write(tmp_path, "binary.bin", b"\x7fELF\0\0\1" * 50): "binary",
        write(tmp_path, "noise.bin", bytes(range(128, 256)) * 4): "binary",
        write(tmp_path, "other.txt", "hello\nworld\n"): "cannot tell what",
        write(tmp_path, "case.json", '{"gpus": [{"index": "zero"}]}'): "$.gpus[0].index",
        write(tmp_path, "cut.json", codec.encode(CASE)[:-30]): "cut.json",
        write(tmp_path, "newer.json", '{"schema": "gpudoctor/9", "case": {}}'): "gpudoctor/9",
        write(tmp_path, "deep.json", '{"gpus":' + "[" * 100_000): "nested too deeply",
        write(tmp_path, "odd\nname\x1b[31m.txt", ""): "odd\\nname\\x1b[31m",
    }
    result = read_artifacts([*bad, good])
    assert len(result.cases) == 1
    assert len(result.errors) == len(bad)
    for (path, words), error in zip(bad.items(), result.errors, strict=True):
        assert words in error, path
        assert "\n" not in error
        assert "\x1b" not in error


def test_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "secret.txt", TOPO)
    Path(path).chmod(0)
    if os.geteuid() == 0:  # root reads everything: let the call fail as it does for others

        def refuse(self: Path, mode: str) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))

        monkeypatch.setattr(Path, "open", refuse)
    (error,) = read_artifacts([path]).errors
    assert "secret.txt: Permission denied" in error


def test_text_that_is_not_utf8_is_read_and_said(tmp_path: Path) -> None:
    path = write(tmp_path, "latin1.txt", b"Universit\xe9t\n" + TOPO.encode())
    result = read_artifacts([path])
    assert len(result.cases) == 1
    assert "not UTF-8" in result.errors[0]
    assert "line 1" in result.errors[0]


def test_windows_powershell_redirect(tmp_path: Path) -> None:
    result = read_artifacts([write(tmp_path, "utf16.txt", ("\ufeff" + TOPO).encode("utf-16-le"))])
    assert (len(result.cases), result.errors) == (1, ())
    (error,) = read_artifacts([write(tmp_path, "odd.txt", b"\xff\xfeG\x00P")]).errors
    assert "UTF-16" in error


def test_too_large_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1024 * 1024)
    path = write(tmp_path, "huge.txt", b"x" * (1024 * 1024 + 1))
    (error,) = read_artifacts([path, write(tmp_path, "topo.txt", TOPO)]).errors
    assert "larger than 1 MiB" in error
    if Path("/dev/zero").exists():
        assert "larger than" in read_artifacts(["/dev/zero"]).errors[0]


def test_identify_by_content_not_by_name() -> None:
    assert identify(TOPO, "case.json") == "nvidia-smi-topo"
    assert identify(codec.encode(CASE), "topo.txt") == "case"
    assert identify(json.dumps({"nvbandwidth": {}}), "x.json") == "nvbandwidth-json"
    assert identify("{broken", "my-case.json") == "case"
