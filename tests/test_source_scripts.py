"""Trap scripts: each expected finding is named at the end of its line, and nothing else may be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpudoctor import checkup, rules
from gpudoctor.cli import options
from gpudoctor.cli.sync import _kept
from gpudoctor.model import Case
from gpudoctor.source import scan

SCRIPTS = Path(__file__).parent / "scripts" / "source"
CODES = [m.RULE.code for m in rules.all_rules() if any("source" in need.split("|") for need in m.RULE.needs)]
TARGETS = sorted(
    path.name for path in SCRIPTS.iterdir() if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
)
_EXPECTED = re.compile(r"#((?: [A-Z]{3}\d{3})+)$")


def expected(target: str) -> set[tuple[str, int, str]]:
    root = SCRIPTS / target
    found = set()
    for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        name = path.relative_to(SCRIPTS).as_posix()
        for number, line in enumerate(path.read_text().split("\n"), 1):
            match = _EXPECTED.search(line.rstrip())
            found |= {(name, number, code) for code in match[1].split()} if match else set()
    return found


def findings(target: str, *, torch: str = "2.13.0") -> set[tuple[str, int, str]]:
    scanned = scan([target], torch=torch, torch_from="test", processes=1)
    assert scanned.errors == ()
    envelope = checkup.examine(Case(source=scanned.facts), command="sync", select=CODES)
    kept = _kept(envelope, scanned, None, options.Common()).findings
    return {(f.subject.rpartition(":")[0], int(f.subject.rpartition(":")[2]), f.rule) for f in kept}


@pytest.mark.parametrize("target", TARGETS)
def test_trap(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPTS)
    assert findings(target) == expected(target)


def test_there_are_enough_of_both_kinds() -> None:
    clean = [target for target in TARGETS if not expected(target)]
    assert len(TARGETS) >= 40
    assert len(TARGETS) - len(clean) >= 20
    assert len(clean) >= 20


def test_a_module_known_only_from_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same engine: its only caller puts everything on the CPU, or on the GPU."""
    monkeypatch.chdir(SCRIPTS)
    assert not findings("project_good")
    assert ("project_bad/lib/meter.py", 6, "SYN001") in findings("project_bad")


@pytest.mark.parametrize(("torch", "waits"), [("1.9.1", True), ("1.10.0", False), ("2.13.0", False)])
def test_clipping_waits_only_before_torch_1_10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, waits: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 1).cuda()\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(9):\n    model(torch.randn(4, 8, device='cuda')).mean().backward()\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    opt.step()\n"
    )
    assert (("a.py", 6, "SYN007") in findings("a.py", torch=torch)) is waits
