"""The start-up budget, checked on sys.modules: what a command must not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import report_samples as samples

from gpudoctor import codec

HEAVY = {"torch", "numpy", "rich", "libcst", "psutil", "pynvml", "msgspec", "jinja2", "prometheus_client"}

PROBE = """
import sys
sys.argv = ["gpudoctor", *{words!r}]
from gpudoctor.__main__ import main
try:
    main()
except SystemExit:
    pass
print("LOADED", *[name for name in {names!r} if name in sys.modules], file=sys.stderr)
"""

IMPORT_ALL = """
import importlib, pkgutil, sys
import gpudoctor
names = [m.name for m in pkgutil.walk_packages(gpudoctor.__path__, "gpudoctor.")]
# code that runs inside a user's process or in a probe child, and the example script, import torch on purpose
skipped = ("gpudoctor.__main__", "gpudoctor.examples.", "gpudoctor.observe.inject")
for name in names:
    if not name.startswith(skipped):
        importlib.import_module(name)
print(len(names))
print("LOADED", *[name for name in {names!r} if name in sys.modules], file=sys.stderr)
"""


def loaded(source: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("LOADED")]
    return set(line.split()[1:])


def typer_takes() -> set[str]:
    """What `import typer` itself loads: not ours to avoid."""
    return loaded(f"import sys, typer\nprint('LOADED', *({HEAVY!r} & sys.modules.keys()), file=sys.stderr)")


def test_version_imports_nothing() -> None:
    ours = ["typer", "gpudoctor.cli", "gpudoctor.model"]
    assert loaded(PROBE.format(words=["--version"], names=[*HEAVY, *ours])) == set()


@pytest.mark.parametrize("words", [["--help"], ["tune", "--help"], ["checkup", "--help"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    # typer from 0.29 on imports pydantic when it parses; nothing of ours may
    assert loaded(PROBE.format(words=words, names=[*HEAVY, "gpudoctor.model", "gpudoctor.codec"])) <= typer_takes()


def test_topology_of_a_file_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(codec.encode(samples.faulty_machine()))
    took = loaded(PROBE.format(words=["topo", "--from", str(path)], names=HEAVY))
    assert took - typer_takes() == {"msgspec"}


def test_no_module_imports_heavy_packages_at_its_top() -> None:
    assert loaded(IMPORT_ALL.format(names=HEAVY)) <= typer_takes()
