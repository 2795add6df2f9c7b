"""Edits of the model as a whole: memory format and autocast."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import test_prescribe_waits as waits

from gpudoctor.model import Edit, EditKind
from gpudoctor.prescribe.patch import Patched, apply_edits

TRAIN = textwrap.dedent("""\
    import torch
    from torch import nn
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    for step in range(4):
        x = torch.randn(4, 3, 16, 16).to(device)
        y = torch.tensor([0, 1, 0, 1]).to(device)
        optimizer.zero_grad()
        outputs = model(x)
        # the mean over the batch

        loss = criterion(
            outputs,
            y,
        )
        if step == 2:
            print(f"at {step}")
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.3f}")
    """)


def applied(text: str, kind: EditKind, part: str) -> Patched:
    line = next(number for number, line in enumerate(text.splitlines(), 1) if part in line)
    return apply_edits(text, [Edit(kind=kind, site=f"train.py:{line}")], file="train.py")


def test_autocast_covers_the_forward_pass_up_to_the_backward_pass() -> None:
    done = applied(TRAIN, "autocast", "outputs = model(x)")
    assert not done.refused
    body = done.text[done.text.index("    optimizer.zero_grad()") : done.text.index("    optimizer.step()")]
    assert body == textwrap.indent(
        textwrap.dedent("""\
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                outputs = model(x)
                # the mean over the batch

                loss = criterion(
                    outputs,
                    y,
                )
                if step == 2:
                    print(f"at {step}")
            loss.backward()
            """),
        "    ",
    )


def test_the_memory_format_is_set_where_the_model_is_made() -> None:
    done = applied(TRAIN, "channels-last", "nn.Sequential")
    assert not done.refused
    assert "nn.Linear(8, 2)).to(memory_format=torch.channels_last)\n" in done.text
    assert "model = model.to(device)\n" in done.text


def test_both_run_beside_the_other_edits(tmp_path: Path) -> None:
    """Without a GPU autocast for CUDA warns and does nothing; channels_last rounds sums in another order."""
    sites: dict[EditKind, str] = {
        "channels-last": "nn.Sequential", "autocast": "outputs = model(x)", "make-on-device": "torch.randn",
        "log-every": "print(f\"loss",
    }  # fmt: skip
    lines = {
        part: number for number, line in enumerate(TRAIN.splitlines(), 1) for part in sites.values() if part in line
    }
    arguments: dict[str, dict[str, int | bool | None]] = {"make-on-device": {"random": True}, "log-every": {"every": 2}}
    edits = [
        Edit(kind=kind, site=f"train.py:{lines[part]}", arguments=arguments.get(kind, {}))
        for kind, part in sites.items()
    ]
    done = apply_edits(TRAIN, edits, file="train.py")
    assert not done.refused
    said = []
    for name, text in (("before.py", TRAIN), ("after.py", done.text)):
        (tmp_path / name).write_text(text)
        ran = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, check=True)
        said.append([line for line in ran.stdout.splitlines() if line.startswith("loss")])
    assert len(said[0]) == 4
    assert said[1][0] == said[0][0]
    assert len(said[1]) == 3  # of step 0, 2 and the last


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("torch.manual_seed(0)", "scaler = torch.amp.GradScaler()", "the script decides itself"),
        ("loss.backward()", "loss.backward(); loss.backward()", "there is not one backward pass"),
        ("= model(x)", "= model.forward(x)", "model is not called in the block"),
        ('print(f"at {step}")', 'print("""at\n{step}""")', "a text of several lines"),
        ("lr=0.1)", "lr=0.1, params=criterion.parameters())", "not the parameters of one model"),
    ],
)
def test_autocast_is_refused(old: str, new: str, why: str) -> None:
    assert old in TRAIN
    assert applied(TRAIN.replace(old, new), "autocast", "outputs = ").refused[0][1].startswith(why)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("model = model.to(device)", "model = nn.Identity()", "model is given more than one value"),
        (
            "to(device)\noptimizer",
            "to(memory_format=torch.channels_last)\noptimizer",
            "the script sets a memory format",
        ),
        ("model = nn.Sequential(", "model = 1 and nn.Sequential(", "it cannot be told where model is made"),
    ],
)
def test_a_memory_format_is_refused(old: str, new: str, why: str) -> None:
    assert old in TRAIN
    assert applied(TRAIN.replace(old, new), "channels-last", "nn.Sequential").refused[0][1].startswith(why)


def test_another_line_is_refused() -> None:
    refusals: dict[EditKind, str] = {
        "autocast": "the forward pass does not begin",
        "channels-last": "the model is not made",
    }
    for kind, why in refusals.items():
        assert applied(TRAIN, kind, "criterion = nn").refused[0][1].startswith(why)


def test_what_is_offered_by_the_gpu_and_the_script() -> None:
    found = {change.mechanism: change for change in waits.proposed(TRAIN, allow={"numerics"})}
    assert {"channels-last", "autocast"} <= set(found)
    assert {found[name].change_class for name in ("channels-last", "autocast")} == {"numerics"}
    linear = TRAIN.replace("nn.Conv2d(3, 8, 3), ", "")
    assert "channels-last" not in {change.mechanism for change in waits.proposed(linear, allow={"numerics"})}
    unknown = TRAIN.replace("import torch\n", "import torch as t\n")
    assert not {"channels-last", "autocast"} & {c.mechanism for c in waits.proposed(unknown, allow={"numerics"})}
