"""gradient-sync: passes before an optimizer step exchange gradients, the others do not, however the script counts."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from test_prescribe_edits import apply, refusal

HEAD = textwrap.dedent("""\
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP
    model = DDP(net)
    micro, n = 0, 3
    """)
FORMS = {
    "count of enumerate": """\
        for i, x in enumerate(rows):
            loss = model(x) / n
            loss.backward()
            if (i + 1) % n == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
    "counted in between": """\
        for x in rows:
            y = 2 * x
            loss = model(y)
            (loss / n).backward()
            micro += 1
            if micro % n == 0:
                optimizer.step()
                scheduler.step()
        """,
    "or the last one": """\
        for i, x in enumerate(rows):
            with torch.enable_grad():
                loss = model(x)
            loss.backward()
            if (i + 1) % n == 0 or i + 1 == len(rows):
                optimizer.step()
        """,
    "counted behind": """\
        for x in rows:
            model(x).backward()
            if micro % n == n - 1:
                optimizer.step()
            micro += 1
        """,
    "inner loop": """\
        for first in range(0, 9, n):
            for k in range(n):
                loss = model(rows[first + k])
                loss.backward()
            optimizer.step()
        """,
    "inner loop of a number": """\
        for first in range(0, 9, 3):
            for k in range(3):
                model(rows[first + k]).backward()
            optimizer.step()
        """,
    "inner loop of an expression": """\
        for first in range(0, 9, n):
            for k in range(n // 1):
                model(rows[first + k]).backward()
            optimizer.step()
        """,
}


class Recorded:
    """A model, its loss and its optimizer in one, that notes what is called and whether gradients were exchanged."""

    def __init__(self, *_: Any) -> None:
        self.require_backward_grad_sync, self.events = True, []

    def __call__(self, _row: object) -> Recorded:
        return self

    def __truediv__(self, _count: object) -> Recorded:
        return self

    def backward(self) -> None:
        self.events.append("exchanged" if self.require_backward_grad_sync else "kept")

    def step(self) -> None:
        self.events.append("step")

    def zero_grad(self) -> None:
        pass


def events(text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    import torch

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Recorded)

    class Scheduler:
        def step(self) -> None:
            pass

    class Optimizer:
        def step(self) -> None:
            space["model"].step()

        def zero_grad(self) -> None:
            pass

    space: dict[str, Any] = {"net": None, "rows": list(range(9)), "optimizer": Optimizer(), "scheduler": Scheduler()}
    exec(compile(text, "train.py", "exec"), space)
    result: list[str] = space["model"].events
    return result


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_exchanged_before_a_step_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEAD + textwrap.dedent(FORMS[name])
    assert events(text, monkeypatch) == ["exchanged", "exchanged", "exchanged", "step"] * 3
    part = "with torch" if "with torch" in text else "model(rows" if "model(rows" in text else "model(x"
    part = "model(y" if "model(y" in text else part
    done = apply(text, "gradient-sync", part)
    assert done.refused == (), done.refused
    assert events(done.text, monkeypatch) == ["kept", "kept", "exchanged", "step"] * 3
    assert len(done.text.splitlines()) == len(text.splitlines()) + 1


LOOP = FORMS["count of enumerate"]
BACKWARD, BRANCH = "            loss.backward()\n", "            if"
TWICE = 2 * "            micro += 1\n"
REFUSED = {
    "a step for what is left": (LOOP + "        optimizer.step()\n", "not one optimizer step"),
    "two backward passes": (LOOP.replace(BACKWARD, 2 * BACKWARD), "not one backward"),
    "no branch": (LOOP.replace("if (i + 1) % n == 0:", "if True:"), "does not count"),
    "a branch with another end": (LOOP.rstrip() + "\n            else:\n                pass\n", "not in a branch"),
    "asks a function": (LOOP.replace("== 0:", "== int(0):"), "calls int"),
    "the count is set": (LOOP.replace(BRANCH, "            i = i + 0\n" + BRANCH), "i changes"),
    "counted twice": (
        LOOP.replace("(i + 1)", "micro").replace(BRANCH, TWICE + BRANCH),
        "more than once",
    ),
    "decided": (LOOP + "        model.no_sync()\n", "decides itself"),
    "another model": (LOOP + "        other = DDP(net)\n", "not one model"),
    "used elsewhere": (LOOP.replace("model(x)", "run(x)"), "not used in the block"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused(name: str) -> None:
    body, why = REFUSED[name]
    assert why in refusal(HEAD + textwrap.dedent(body), "gradient-sync", "loss =")
