"""defer-read: a value under a name of its own stays on the device. Changed loops are run against the originals."""

from __future__ import annotations

import textwrap

import pytest
from test_prescribe_edits import apply, refusal, run
from test_prescribe_waits import FILE, proposed, sync

from gpudoctor.prescribe.patch import apply_edits

LOOP = textwrap.dedent("""\
    import math, sys
    import torch
    import torch.nn.functional as F
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def show(*values, **named): print(values, named)
    def main(rows):
        total, correct, seen = 0.0, 0, 0
        losses, history = [], {"hits": []}
        for step in range(45):
            x, y = torch.randn(7, 4), torch.randint(0, 3, (7,))
            pred = model(x)
            loss = F.cross_entropy(pred, y)
            optimizer.zero_grad()
            value = loss.item()
            hits = (pred.argmax(1) == y).sum().item()
            loss.backward()
            optimizer.step()
            seen += len(y)
    BODY
        return total, correct, losses, history
    print(main([]))
    state = model.state_dict()
    """)


def loop(*lines: str) -> str:
    return LOOP.replace("BODY\n", "".join(f"        {line}\n" for line in lines))


FORMS = {
    "sums": ["total += value", "correct += hits"],
    "scaled sums": ["total += value * x.size(0) / 2", "correct += 2 * hits"],
    "lists": ["losses.append(value)", 'history["hits"].append(hits)'],
    "shown rarely": ["if step % 10 == 0:", "    print(value, hits, f'{value} {hits}', '%d %s' % (hits, value))"],
    "shown sums": ["total += value", "correct += hits", "if step % 10 == 0:",
                   "    print(total, correct, f'{total} {correct} {correct / seen}', round(total / seen, 4))"],
    "passed on rarely": ["if step % 10 == 0:", "    show(value, hits=hits)", "    rows.append(value)"],
    "reset": ["total += value", "if step % 10 == 0:", "    print(total / 10)", "    total = 0.0"],
    "everything": ["total += value", "losses.append(value)", "correct += hits", 'history["hits"].append(hits)'],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("which", ["value", "hits"])
def test_the_same_numbers(name: str, which: str) -> None:
    """Python sums in double precision; so does the device, and counts stay whole numbers."""
    text = loop(*FORMS[name])
    result = apply(text, "defer-read", f"{which} = ", name=which)
    assert result.refused == ()
    assert f"{which} = " in result.text
    (printed, before), (printed_new, after) = run(text), run(result.text)
    assert printed_new == printed
    assert all(after["state"][key].equal(value) for key, value in before["state"].items())
    changed = result.text.split("seen += len(y)")[1]
    each_step = [line for line in changed.split("\n") if line.startswith("        ") and "if step" not in changed]
    assert not any("float(" in line or "int(" in line for line in each_step)


SHOWN = [
    "if not math.isfinite(value):",
    "    print(f'loss is {value}')",
    "    sys.exit(1)",
    "total += value",
    "losses.append(value)",
    "correct += hits",
    "print('loss', value, 'acc', correct / seen, hits)",
]


def test_output_and_checks_come_every_20_steps() -> None:
    text = loop(*SHOWN)
    changes = proposed(text, sync(text, "value ="), sync(text, "hits ="))
    check, output, value, hits = changes
    assert check.title.startswith("check for NaN every 20 steps")
    assert [len(output.edits), output.change_class] == [1, "logging"]
    assert (value.edits[0].kind, value.change_class, value.needs) == ("defer-read", "exact", (check.id, output.id))
    assert hits.needs == (output.id,)
    result = apply_edits(text, [edit for change in changes for edit in change.edits], file=FILE)
    assert result.refused == ()
    assert "and not math.isfinite(float(value)):\n            print(f'loss is {value}')" in result.text
    (printed, before), (printed_new, after) = run(text), run(result.text)
    old, new = printed.splitlines(), printed_new.splitlines()
    assert new == [old[0], old[20], old[40], old[44], old[45]]
    assert all(after["state"][key].equal(value) for key, value in before["state"].items())
    for left_out in changes:  # each of them can be dropped again
        edits = [edit for change in changes if change is not left_out for edit in change.edits]
        some = apply_edits(text, edits, file=FILE)
        assert some.refused == ()
        printed_some, _ = run(some.text)
        rest = iter(old)
        assert all(line in rest for line in printed_some.splitlines())


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (["best = max(total, value)"], "at every step"),
        (["if value < 3: total = 1"], "at every step"),
        (["show(value)"], "at every step"),
        (["show(value, step) if value else None"], "at every step"),
        (["total = 0.9 * total + 0.1 * value"], "at every step"),
        (["total += value + 1"], "more than scale"),
        (["total += show(value)"], "more than scale"),
        (["losses.append(value / 2)"], "at every step"),
        (["value = 3"], "another value"),
        (["value += 3"], "another value"),
        (["loss /= 2"], "in place"),
        (["f = lambda: value"], "nested"),
    ],
)
def test_refused(lines: list[str], word: str) -> None:
    assert word in refusal(loop(*lines), "defer-read", "value = ", name="value")


def test_refused_outside_of_the_loop() -> None:
    text = loop("total += value").replace("    return total,", "    print(value)\n    return total,")
    assert "outside of its loop" in refusal(text, "defer-read", "value = ")
    assert "is value, not other" in refusal(loop(), "defer-read", "value = ", name="other")
    assert "no loop" in refusal("value = loss.item()\n", "defer-read", "value")
    assert "cannot be told" in refusal("for x in y:\n    value = x.item()\n", "defer-read", "value")
    assert "no name = value" in refusal("for x in y:\n    value = x.mean()\n", "defer-read", "value")
    text = loop("total += value").replace("import math", "from torch.cuda.graphs import graph\nimport math")
    assert "CUDA graphs" in refusal(text, "defer-read", "value = ")


def test_a_count_that_is_computed_with_at_every_step_is_refused() -> None:
    assert "the count correct" in refusal(loop("correct += hits", "rate = correct / seen"), "defer-read", "hits = ")


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (["print(value, model(x))"], "at every step"),
        (["total += value", "rows.append(total)"], "read at every step"),
        (["total += value", "if total > 3: break"], "decides a branch"),
        (["losses.append(value)", "print(losses)"], "before its loop has ended"),
        (["print(value)", "if step > 3:", "    break"], None),
    ],
)
def test_proposed_only_where_it_pays(lines: list[str], word: str | None) -> None:
    text = loop(*lines)
    changes = proposed(text, sync(text, "value = "))
    if word is None:
        assert [len(change.edits) for change in changes] == [1, 1]
    else:
        (change,) = changes
        assert change.edits == ()
        assert word in (change.reason or "")
