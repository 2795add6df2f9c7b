"""later_uses of a list that collects device values: nobody may look at it before its loop has ended."""

from __future__ import annotations

import pytest

from gpudoctor.source import LaterUse, later_uses


def judge(
    inside: str = "pass", before: str = "kept = []", after: str = "return kept", place: str = "kept", name: str = "kept"
) -> LaterUse:
    """A loop that appends to `place`; `inside` stands behind the append."""
    lines = ["def run(losses, other, out):", *(f"    {line}" for line in before.split("\n")), "    for loss in losses:"]
    lines += [f"        {place}.append(loss.item())", *(f"        {line}" for line in inside.split("\n"))]
    lines += [f"    {line}" for line in after.split("\n")]
    text = "\n".join(lines) + "\n"
    line = next(number for number, each in enumerate(lines, 1) if each.strip() == f"{place}.append(loss.item())")
    return later_uses(text, name, line)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"inside": "print(len(kept))"},
        {"inside": "if len(kept) > 3: break"},
        {"inside": "if loss.item(): kept.append(loss.item())"},
        {"before": "kept: list = []"},
        {"before": "kept = list()"},
        {"before": "kept, other = [], 3"},
        {"after": "print(sum(kept), kept[-1])\nout.kept = kept\nkept.sort()\nreturn kept"},
        {"before": "kept = {'a': [], 'b': [1]}", "place": "kept['a']"},
        {"before": "kept = {'a': [], 'b': [1]}", "place": "kept['a']", "inside": "kept['b'].append(3)"},
        {"before": "from collections import defaultdict\nkept = defaultdict(list)", "place": "kept['a']"},
    ],
)
def test_safe(values: dict[str, str]) -> None:
    result = judge(**values)
    assert result.safe, result.reason
    assert result.reason is None
    assert result.uses


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"inside": "print(kept)"}, "before its loop has ended"),
        ({"inside": "x = sum(kept) / len(kept)"}, "before its loop has ended"),
        ({"inside": "if len(kept) % 10 == 0: print(kept[-10:])"}, "before its loop has ended"),
        ({"inside": "if kept: break"}, "before its loop has ended"),
        ({"inside": "return kept"}, "before its loop has ended"),
        ({"inside": "yield kept"}, "before its loop has ended"),
        ({"inside": "kept.clear()"}, "before its loop has ended"),
        ({"inside": "kept.append(3)"}, "other values"),
        ({"inside": "kept.append(loss.sum().item())"}, "other values"),
        ({"inside": "x = kept.append(loss.item())"}, "before its loop has ended"),
        ({"inside": "kept = []"}, "not followed"),
        ({"inside": "kept += [1]"}, "not followed"),
        ({"inside": "del kept"}, "deleted"),
        ({"inside": "f = lambda: kept"}, "nested"),
        ({"inside": "exec(out)"}, "can see"),
        ({"before": "pass"}, "not made in this function"),
        ({"before": "kept = other"}, "does not begin"),
        ({"before": "kept = [1]"}, "does not begin"),
        ({"before": "kept = deque()"}, "does not begin"),
        ({"before": "kept = list(other)"}, "does not begin"),
        ({"before": "kept = {}", "place": "kept['a']"}, "does not begin"),
        ({"before": "kept = {'a': [1]}", "place": "kept['a']"}, "does not begin"),
        ({"before": "kept = mine = []"}, "not followed"),
        ({"before": "for kept in other: pass"}, "not followed"),
        ({"before": "global kept\nkept = []"}, "global"),
        ({"before": "kept = []\nout.kept = kept"}, "second name"),
        ({"before": "kept = []\nkept.append(0)"}, "other values"),
        ({"before": "kept = {'a': []}", "place": "kept['a']", "inside": "out.log(kept)"}, "before its loop has ended"),
        ({"before": "kept = {'a': []}", "place": "kept['a']", "inside": "print(kept['b'])"}, "before its loop"),
    ],
)
def test_unsafe(values: dict[str, str], word: str) -> None:
    result = judge(**values)
    assert not result.safe
    assert word in (result.reason or "")


def test_an_exception_that_is_caught_may_skip_the_conversion() -> None:
    text = (
        "def run(losses):\n    kept = []\n    try:\n        for loss in losses:\n            kept.append(loss.item())\n"
        "    except KeyboardInterrupt:\n        pass\n    return kept\n"
    )
    assert "exception" in (later_uses(text, "kept", 5).reason or "")
    assert later_uses(text.replace("return kept", "return len(kept)"), "kept", 5).safe


def test_what_the_rewrite_puts_behind_the_loop_is_no_use() -> None:
    text = (
        "kept = []\nfor epoch in range(2):\n    for loss in losses:\n        kept.append(loss.detach().clone())\n"
        "    kept[:] = [float(value) for value in kept]\n"
    )
    assert later_uses(text, "kept", 4).safe
    assert not later_uses(text + "def show():\n    print(kept)\n", "kept", 4).safe


def test_a_sum_read_back_behind_an_inner_loop_is_no_read_at_every_step() -> None:
    text = (
        "total = 0.0\ntry:\n    for epoch in range(2):\n        for loss in losses:\n"
        "            total += loss.detach().double()\n        total = float(total)\nexcept OSError:\n    pass\n"
    )
    result = later_uses(text, "total", 5)
    assert result.safe
    assert result.reason is None
    inside = text.replace("        total = float(total)", "            total = float(total)")
    assert "every step" in (later_uses(inside, "total", 5).reason or "")
