"""later_use: every use of a running sum inside its loop, and the claim that safe uses show what a number shows."""

from __future__ import annotations

import contextlib
import io

import pytest

from gpudoctor.model import Edit
from gpudoctor.prescribe.patch import apply_edits
from gpudoctor.source import LaterUse, later_uses

HEAD = """\
def run(steps, losses, out):
    total, best, ema, step = 0.0, 1e9, 0.0, 0
    names = []
"""


def script(body: str, after: str = "return total") -> tuple[str, int]:
    """A loop that sums; `body` stands behind the addition, `after` behind the loop."""
    lines = ["    for loss in losses:", "        total += loss.item()"]
    lines += ["        step += 1"] + ["        " + line for line in body.split("\n") if line]
    lines += ["    " + line for line in after.split("\n")]
    return HEAD + "\n".join(lines) + "\n", 5


def judge(body: str, after: str = "return total") -> LaterUse:
    text, line = script(body, after)
    return later_uses(text, "total", line)


SAFE = [
    "",
    "if step % 2 == 0:\n    print(f'{total / step:.4f}')",
    "if step % 2 == 0:\n    print(f'{total} {total:>12.3f} {-total:e} {total / step:.1%}')",
    "if step % 2 == 0:\n    print('%.3f of %d' % (total / step, step))",
    "if step % 2 == 0:\n    print('%g' % total)",
    "if step % 2 == 0:\n    print('{:.2f}'.format(total))",
    "if step % 2 == 0:\n    print('{0:.2f} {t:.3f}'.format(1.0, t=total))",
    "if step % 2 == 0:\n    print(f'{total > 3.0}')",
    "if step % 2 == 0:\n    print(float(total))",
    "if step % 2 == 0:\n    print(round(float(total / step), 3))",
    "if step % 2 == 0:\n    print(int(total))",
    "if step % 2 == 0:\n    print(f'{total / 2:.3f}')\n    total = 0.0",
    "if step % 2 == 0:\n    total, step = 0.0, 0",
    "total += 0.5",
    "total *= 0.9",
    "total = total * 0.5 + 1",
    "if step % 2 == 0:\n    mean = total / step\n    print(f'{mean:.4f}')",
    "if step % 2 == 0:\n    mean = total / step\n    twice = mean * 2\n    print(f'{twice:.4f}')",
    "if step % 2: continue\nprint(f'{total:.3f}')",
]

UNSAFE = {
    "if total > 3: break": "branch",
    "while total > 3: break": "branch",
    "assert total < 1e9": "branch",
    "x = 1 if total else 2": "branch",
    "x = not total": "branch",
    "x = step > 1 and total": "branch",
    "names.append(total)": "names.append",
    "names.append(total / step)": "names.append",
    "out.write(str(total))": "str",
    "print(total)": "without a format",
    "print('mean', total / step)": "without a format",
    "print(f'{total!r}')": "repr",
    "print(f'{total!s}')": "repr",
    "print('%s' % total)": "%s",
    "print('%d' % total)": "%d",
    "print('%.3f %s' % (step, total))": "%s",
    "print('%(a)s' % {'a': total})": "container",
    "print('{!r}'.format(total))": "repr",
    "print('{0.real}'.format(total))": "taken apart",
    "print(total > 3)": "without a format",
    "import math\nmath.exp(total)": "math.exp",
    "out.log({'loss': total})": "container",
    "out.log(loss=total)": "out.log",
    "bar.set_postfix(loss=total / step)": "set_postfix",
    "import json\njson.dump(total, out)": "json.dump",
    "return total": "returned",
    "yield total": "yielded",
    "best = total": "another name",
    "best = min(best, total)": "min",
    "best = +total": "",
    "x = total // 2": "//",
    "x = total % 2": "//",
    "x = total ** 2": "//",
    "x = names[total]": "index",
    "x = range(total)": "range",
    "x = round(total)": "round",
    "x = abs(total)": "abs",
    "x = isinstance(total, float)": "isinstance",
    "x = total is None": "identity",
    "x = total == 3": "identity",
    "x = total in names": "identity",
    "x = 1 < total < 2": "",
    "x = {total}": "container",
    "x = {total: 1}": "container",
    "x = [total]": "container",
    "x = 'a' + total": "joined",
    "x = total + [1]": "",
    "x = total * np.float64(2)": "np",
    "x = total.real": "attribute",
    "out.total = total": "another name",
    "out['total'] = total": "",
    "x = lambda: total": "nested",
    "def inner():\n    return total": "nested",
    "def inner():\n    nonlocal total\n    total = 1": "",
    "class Inner:\n    value = total": "nested",
    "x = [total for _ in names]": "",
    "x = locals()": "locals",
    "del total": "deleted",
    "mean = total / step\nnames.append(mean)": "names.append",
    "mean = total / step\nprint(mean)": "without a format",
    "(y := total)": "another name",
    "ema: float = total": "another name",
}


@pytest.mark.parametrize("body", SAFE)
def test_safe(body: str) -> None:
    result = judge(body)
    assert result.safe, result.reason
    assert result.reason is None


@pytest.mark.parametrize(("body", "word"), UNSAFE.items())
def test_unsafe(body: str, word: str) -> None:
    result = judge(body)
    assert not result.safe
    assert word in (result.reason or "")
    assert (result.reason or "").startswith("line ")


@pytest.mark.parametrize("body", SAFE)
def test_safe_uses_print_what_the_number_prints(body: str) -> None:
    """The whole chain: rewritten, and run with real tensors, it prints and returns exactly the same."""
    import torch

    text, line = script(body)
    text = text.replace("in losses:", "in losses:  # float32 values that no double sum rounds alike")
    result = apply_edits(text, [Edit(kind="device-accumulator", site=f"t.py:{line}")], file="t.py")
    assert result.refused == ()
    values = torch.rand(7, generator=torch.Generator().manual_seed(3)) * 3.7

    def run(source: str) -> tuple[str, object]:
        space: dict[str, object] = {}
        exec(compile(source, "t.py", "exec"), space)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = space["run"](None, list(values), None)  # type: ignore[operator]
        return printed.getvalue(), value

    before, after = run(text), run(result.text)
    assert after == before
    assert type(after[1]) is type(before[1])


def test_read_at_every_step_is_safe_but_cannot_pay() -> None:
    result = judge("print(f'{total / step:.3f}')")
    assert result.safe
    assert "every step (line 7)" in (result.reason or "")


def test_after_the_loop_the_name_is_a_number_again() -> None:
    assert judge("", "names.append(total)\nif total > 3:\n    return str(total)\nreturn total // 1").safe


def test_a_value_computed_in_the_loop_is_followed_behind_it() -> None:
    result = judge("mean = total / step", "return mean")
    assert not result.safe
    assert "mean is returned" in (result.reason or "")
    assert judge("mean = total / step", "print(f'{mean:.3f}')").safe


def test_a_caught_exception_may_skip_the_reading() -> None:
    text = (
        "def run(losses):\n    total = 0.0\n    try:\n        for loss in losses:\n"
        "            total += loss.item()\n    except KeyboardInterrupt:\n        pass\n    return total\n"
    )
    assert not later_uses(text, "total", 5).safe
    assert later_uses(text.replace("return total", "print(f'{total:.2f}')"), "total", 5).safe


def test_scopes() -> None:
    text = "total = 0.0\nfor loss in losses:\n    total += loss.item()\n"
    assert later_uses(text, "total", 3).safe
    assert not later_uses(text + "def show():\n    print(total)\n", "total", 3).safe
    assert later_uses(text + "def show(total):\n    return total\n", "total", 3).safe
    assert later_uses(text + "def show():\n    total = 1\n    return total\n", "total", 3).safe
    text = "def run(losses):\n    global total\n    for loss in losses:\n        total += loss.item()\n"
    assert "global" in (later_uses(text, "total", 4).reason or "")
    text = "class Run:\n    total = 0.0\n    for loss in losses:\n        total += loss.item()\n"
    assert not later_uses(text, "total", 4).safe


def test_sums_outside_of_a_loop() -> None:
    assert "not summed in a loop" in (
        later_uses("def f(loss):\n    t = 0\n    t += loss.item()\n", "t", 3).reason or ""
    )
    text = "for x in y:\n    pass\nelse:\n    t += x.item()\n"
    assert not later_uses(text, "t", 4).safe


@pytest.mark.parametrize("text", ["", "x = (", "\0", "def f(:\n", "a\n" * 3])
def test_bad_input_is_unsafe_with_a_reason(text: str) -> None:
    result = later_uses(text, "total", 2)
    assert not result.safe
    assert result.reason


def test_invalid_escapes_of_the_user_are_not_our_warning() -> None:
    assert later_uses("x = '\\d'\nfor loss in losses:\n    total += loss.item()\n", "total", 3).safe
