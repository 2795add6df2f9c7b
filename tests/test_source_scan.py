"""Files that are no ordinary Python: one clear line each, the rest still scanned, nothing of them ever run."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from gpudoctor.source import scan
from gpudoctor.source.notebook import NotANotebookError, read_notebook

GOOD = (
    "import torch\nmodel = torch.nn.Linear(8, 1).cuda()\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for _ in range(9):\n    loss = model(torch.randn(4, 8, device='cuda')).mean()\n"
    "    loss.backward()\n    opt.step()\n"
    "    print(loss.item())\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text(GOOD)
    return tmp_path


def sites(folder: Path, **more: int) -> list[str]:
    return sorted({site.site for site in scan([str(folder)], **more).facts.sites})


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("broken.py", b"def f(:\n", "broken.py:1: it does not parse"),
        ("old.py", b"import torch\nprint 'hello'\n", "Python 2"),
        ("latin.py", b"import torch\nname = 'caf\xe9'\n", "line 2 is not UTF-8"),
        ("wide.py", "import torch\n".encode("utf-16"), "UTF-16"),
        ("binary.py", b"\x7fELF\x00\x00\x01", "binary"),
        ("nulls.py", b"import torch\n\x00\n", "binary"),
        ("deep.py", b"import torch\nx = " + b"(" * 400 + b")" * 400 + b"\n", "does not parse"),
        ("note.ipynb", b"{not json", "no notebook"),
        ("cells.ipynb", b'{"metadata": {}}', "it has no cells"),
        ("julia.ipynb", b'{"cells": [], "metadata": {"kernelspec": {"language": "julia"}}}', "notebook of julia"),
    ],
)
def test_bad_file_costs_only_itself(folder: Path, name: str, content: bytes, told: str) -> None:
    (folder / name).write_bytes(content)
    scanned = scan([str(folder)])
    (error,) = scanned.errors
    assert told in error
    assert "\n" not in error
    assert [site.site for site in scanned.facts.sites if site.kind == "host-read"] == ["good.py:8"]


def test_declared_encoding_byte_order_mark_and_line_ends(folder: Path) -> None:
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n" + GOOD.encode())
    (folder / "bom.py").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    scanned = scan([str(folder)])
    assert scanned.errors == ()
    reads = {site.site for site in scanned.facts.sites if site.kind == "host-read"}
    assert reads == {"good.py:8", "bom.py:8", "latin.py:10"}


def test_links_and_folders_that_cannot_be_read(folder: Path) -> None:
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "again.py").symlink_to(folder / "good.py")
    (folder / "gone.py").symlink_to(folder / "nowhere")
    scanned = scan([str(folder), "missing.py"])
    assert sorted(scanned.errors) == [
        "cannot read 'gone.py': there is no such file",
        "cannot read 'missing.py': there is no such file",
    ]
    assert scanned.facts.files == 3  # good.py once, and the two that are not there
    if os.geteuid() != 0:
        shut = folder / "shut"
        shut.mkdir()
        shut.chmod(0)
        try:
            assert any("shut" in error for error in scan([str(folder)]).errors)
        finally:
            shut.chmod(stat.S_IRWXU)


def test_environments_and_hidden_folders_are_left_alone(folder: Path) -> None:
    for name in (".venv", "node_modules", "env"):
        (folder / name).mkdir()
        (folder / name / "a.py").write_text(GOOD)
    (folder / "env" / "pyvenv.cfg").write_text("home = /usr\n")
    assert sites(folder) == ["good.py:8"]


def test_cyclic_imports_end(folder: Path) -> None:
    (folder / "a.py").write_text("import torch\nfrom b import x\nfrom b import *\n\ndef f():\n    return x\n")
    (folder / "b.py").write_text("import torch\nfrom a import x\nfrom a import *\n\nfor _ in range(3):\n    x.cuda()\n")
    assert scan([str(folder)]).errors == ()


def test_a_list_that_holds_itself_and_recursion(folder: Path) -> None:
    (folder / "self.py").write_text(
        "import torch\n\ndef f(x):\n    return f(x)\n\nparts = []\nfor _ in range(3):\n    parts.append(parts)\n"
        "    more = [parts]\n    parts.append(more)\n    f(parts)\n    f(torch.ones(1).cuda())\n"
    )
    assert scan([str(folder)]).errors == ()


def test_long_and_generated_files(folder: Path) -> None:
    lines = "".join(f"v{n} = torch.ones({n})\n" for n in range(50_000))
    (folder / "long.py").write_text("import torch\n" + lines)
    (folder / "sum.py").write_text("import torch\nx = " + " + ".join(["1"] * 3000) + "\n")
    scanned = scan([str(folder)])
    assert scanned.facts.lines > 50_000
    assert [error for error in scanned.errors if "sum.py" not in error] == []
    assert "good.py:8" in {site.site for site in scanned.facts.sites}


def test_nothing_is_run(folder: Path) -> None:
    (folder / "evil.py").write_text("import torch\nopen('ran', 'w').write('x')\n" + GOOD)
    (folder / "torch.py").write_text("open('ran', 'w').write('x')\n")
    scan([str(folder)])
    assert not (folder / "ran").exists()


def test_several_processes_find_the_same(folder: Path) -> None:
    for number in range(60):
        (folder / f"copy_{number}.py").write_text(GOOD)
    assert sites(folder, processes=2) == sites(folder, processes=1)
    assert len(sites(folder, processes=1)) == 61


def notebook(*cells: str) -> bytes:
    made = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    made.insert(1, {"cell_type": "markdown", "source": ["# no code"]})
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1).encode()


def test_notebook_with_magics(folder: Path) -> None:
    (folder / "a.ipynb").write_bytes(
        notebook(
            "%matplotlib inline\nimport torch\n!pip install \\\n  torch\nfiles = !ls\ntorch?",
            "%%bash\necho loss.item()",
            "%%time\n" + GOOD,
            "text = '''\n% not a magic\n'''",
        )
    )
    scanned = scan([str(folder / "a.ipynb")])
    assert scanned.errors == ()
    (site,) = [site for site in scanned.facts.sites if site.kind == "host-read"]
    assert (site.cell, site.cell_line) == (3, 9)
    line = int(site.site.rpartition(":")[2])
    assert "loss.item()" in (folder / "a.ipynb").read_text().split("\n")[line - 1]


def test_syntax_error_in_a_notebook_names_the_cell(folder: Path) -> None:
    (folder / "a.ipynb").write_bytes(notebook("import torch", "x = (\n"))
    (error,) = scan([str(folder / "a.ipynb")]).errors
    assert "cell 2" in error


def test_notebook_reader_refuses_what_is_none() -> None:
    for raw in (b"[]", b"3", b'{"cells": 3}'):
        with pytest.raises(NotANotebookError):
            read_notebook(raw)
