"""Tensors that are made on the host and moved in each step: made on the device where that gives the same."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import test_prescribe_waits as waits

from gpudoctor.model import Edit
from gpudoctor.prescribe.patch import apply_edits


def edited(line: str, *, random: bool = False) -> str:
    """The line in a loop after the edit, or why it was refused."""
    head = "import torch\nfrom torch import zeros as nothing\ndef f(n, x, device):\n    for _ in range(9):\n"
    text = f"{head}        {line}\n"
    edit = Edit(kind="make-on-device", site="train.py:5", arguments={"random": random})
    done = apply_edits(text, [edit], file="train.py")
    return done.refused[0][1] if done.refused else done.text.splitlines()[4].strip()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("m = torch.zeros(n, 4).to(device)", "m = torch.zeros(n, 4, device=device)"),
        ("m = nothing(n).to(device)", "m = nothing(n, device=device)"),
        ("m = torch.ones(n).cuda()", 'm = torch.ones(n, device="cuda")'),
        ("m = torch.full((n, 2), 0.5).to(x.device)", "m = torch.full((n, 2), 0.5, device=x.device)"),
        ('m = torch.eye(n).to("cuda:1")', 'm = torch.eye(n, device="cuda:1")'),
        ("m = torch.zeros(n,).to(device=device)", "m = torch.zeros(n, device=device,)"),
        ("m = torch.zeros(n).to(device, torch.long)", "m = torch.zeros(n, device=device).to(device, torch.long)"),
        ("m = torch.zeros(n).to(device, non_blocking=True)", "m = torch.zeros(n, device=device)"),
        ("m = (torch.ones(n, n)).to(device)", "m = (torch.ones(n, n, device=device))"),
        (
            "m = torch.tril(torch.ones(n, n)).view(1, 1, n, n).bool().to(device)",
            "m = torch.tril(torch.ones(n, n, device=device)).view(1, 1, n, n).bool()",
        ),
        ("p = torch.arange(0, x.size(1)).to(device)", "p = torch.arange(0, x.size(1), device=device)"),
        (
            "p = torch.arange(len(x), dtype=torch.long).to(device)",
            "p = torch.arange(len(x), dtype=torch.long, device=device)",
        ),
        (
            "a, b = torch.zeros(1).to(device), torch.ones(2).to(device)",
            "a, b = torch.zeros(1, device=device), torch.ones(2, device=device)",
        ),
    ],
)
def test_the_same_tensor_is_made_on_the_device(line: str, wanted: str) -> None:
    assert edited(line) == wanted


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("z = torch.randn(n, 100).to(device)", "other random numbers would be drawn on the device"),
        ("p = torch.arange(0, n, 0.1).to(device)", "it cannot be told that all its numbers are whole"),
        ("p = torch.arange(n).to(device)", "it cannot be told that all its numbers are whole"),
        ("m = torch.zeros(n, pin_memory=True).to(device)", "pin_memory= is set where the tensor is made"),
        ("w = torch.zeros(n, requires_grad=True).to(device)", "requires_grad= is set where the tensor is made"),
        ("m = torch.zeros(*n).to(device)", "its arguments cannot be told from the line"),
        ("m = torch.zeros(n).cuda(1)", "cuda() is called with arguments"),
        ("m = torch.zeros(n).to(pick_device())", "no copy to a device that can be told from the line"),
        ("m = torch.zeros(n).mul(x).to(device)", "the tensor is not made there by a function that gives the same"),
        ("m = torch.linspace(0, 1, n).to(device)", "the tensor is not made there by a function that gives the same"),
        ("m = x.to(device)", "the tensor is not made there by a function that gives the same"),
        ("a, b = torch.zeros(1).to(device), x.to(device)", "the tensor is not made there by a function that gives"),
    ],
)
def test_anything_else_is_refused_with_the_reason(line: str, why: str) -> None:
    assert edited(line).startswith(why)


def test_random_tensors_are_drawn_there_only_where_that_is_allowed() -> None:
    assert edited("z = torch.randn(n, 100).to(device)", random=True) == "z = torch.randn(n, 100, device=device)"


GAN = textwrap.dedent("""\
    import torch
    def main(steps, generator, optimizer, device="cuda"):
        for step in range(steps):
            noise = torch.randn(64, 100).to(device)
            mask = torch.ones(64, 1).to(device)
            loss = (generator(noise) * mask).mean()
            loss.backward()
            optimizer.step()
    """)


def test_what_is_proposed_for_a_loop_that_makes_its_tensors_on_the_host() -> None:
    copies = (waits.copy(GAN, "noise =", waited_ms=600.0), waits.copy(GAN, "mask =", waited_ms=400.0))
    noise, mask = sorted(waits.proposed(GAN, copies=copies, allow=("exact", "stochastic")), key=lambda c: c.site)
    assert (noise.rule, noise.change_class, noise.mechanism) == ("CPY006", "stochastic", "copy")
    assert (mask.rule, mask.change_class) == ("CPY006", "exact")
    new = apply_edits(GAN, [*noise.edits, *mask.edits], file=waits.FILE).text
    assert "torch.randn(64, 100, device=device)\n" in new
    assert "torch.ones(64, 1, device=device)\n" in new
    pinned, mask = sorted(waits.proposed(GAN, copies=copies, allow=("exact",)), key=lambda c: c.site)
    assert (pinned.rule, pinned.change_class) == ("CPY001", "exact")  # the same numbers, so they are copied
    assert mask.rule == "CPY006"


def test_the_edited_script_computes_the_same(tmp_path: Path) -> None:
    text = textwrap.dedent("""\
        import torch
        device = torch.device("cpu")
        total = 0.0
        for step in range(3):
            mask = torch.triu(torch.full((4, 4), float("-inf")), 1).to(device)
            place = torch.arange(0, mask.size(0)).unsqueeze(0).to(device)
            total += float(torch.softmax(mask, 1).sum() + place.sum())
        print(total)
        """)
    edits = [Edit(kind="make-on-device", site=f"t.py:{line}", arguments={"random": False}) for line in (5, 6)]
    done = apply_edits(text, edits, file="t.py")
    assert not done.refused
    said = []
    for number, version in enumerate((text, done.text)):
        (tmp_path / f"{number}.py").write_text(version)
        ran = subprocess.run([sys.executable, f"{number}.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
        said.append(ran.stdout)
    assert said[0] == said[1] != ""
