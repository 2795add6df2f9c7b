"""log-every: which counter is taken, what may run more rarely, and that nothing else changes."""

from __future__ import annotations

import textwrap

import pytest
from test_prescribe_edits import FILE, apply, refusal, run

from gpudoctor.model import Edit
from gpudoctor.prescribe.patch import apply_edits

EVERY = {"every": 3}


def rare(text: str, part: str = "print") -> str:
    result = apply(text, "log-every", part, arguments=EVERY)
    assert result.refused == (), result.refused
    return result.text


def body(head: str, *lines: str) -> str:
    return f"{head}\n" + "".join(f"    {line}\n" for line in lines)


# the counter of the loop: (loop and lines before the output, lines after it, the test that is written)
COUNTERS = {
    "range": (["for step in range(10):"], [], "step % 3 == 0 or step == 9"),
    "range of a name": (["for step in range(count):"], [], "step % 3 == 0 or step == count - 1"),
    "range from": (["for step in range(2, count):"], [], "step % 3 == 0 or step == count - 1"),
    "range of a length": (["for i in range(len(rows)):"], [], "i % 3 == 0 or i == len(rows) - 1"),
    "computed range": (["for i in range(count * 2):"], [], "i % 3 == 0"),
    "trange": (["for i in trange(count):"], [], "i % 3 == 0 or i == count - 1"),
    "tqdm of range": (["for i in tqdm(range(count), ncols=80):"], [], "i % 3 == 0 or i == count - 1"),
    "enumerate": (["for i, row in enumerate(rows):"], [], "i % 3 == 0"),
    "enumerate, nested target": (["for i, (a, b) in enumerate(zip(rows, rows)):"], [], "i % 3 == 0"),
    "tqdm of enumerate": (["for i, row in tqdm(enumerate(rows)):"], [], "i % 3 == 0"),
    "length is asked for": (["for i, row in enumerate(rows):", "    len(rows)"], [],
                            "i % 3 == 0 or i == len(rows) - 1"),
    "incremented before": (["for row in rows:", "    seen += 1"], [], "seen % 3 == 0"),
    "incremented after": (["for row in rows:"], ["    seen += 1"], "seen % 3 == 0"),
    "while": (["while seen < count:", "    seen += 1"], [], "seen % 3 == 0 or seen == count"),
    "while, incremented after": (["while seen < count:"], ["    seen += 1"], "seen % 3 == 0 or seen == count - 1"),
    "break at a number": (["for row in rows:", "    seen += 1"], ["    if seen == 7:", "        break"],
                          "seen % 3 == 0 or seen == 7"),
    "break, at least": (["for row in rows:"], ["    seen += 1", "    if seen >= count:", "        break"],
                        "seen % 3 == 0 or seen == count - 1"),
    "attribute": (["for row in rows:", "    box.seen += 1"], [], "box.seen % 3 == 0"),
    "the counter that is shown": (["for i, row in enumerate(rows):", "    seen += 1"], [], "seen % 3 == 0"),
    "none": (["for row in rows:"], [], "step % 3 == 0"),
    "none, tuple": (["for a, b in zip(rows, rows):"], [], "step % 3 == 0"),
    "none, stride": (["for first in range(0, count * 4, 4):"], [], "step % 3 == 0"),
    "none, target is set": (["for i in range(count):", "    i = 2 * i"], [], "step % 3 == 0"),
    "none, counts rarely": (["for row in rows:", "    if row: hits += 1"], [], "step % 3 == 0"),
    "none, counts twice": (["for row in rows:", "    hits += 1", "    hits += 1"], [], "step % 3 == 0"),
    "short inner loop": (["for i in range(count):", "    for part in range(2):"], [], "i % 3 == 0 or i == count - 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTERS)
def test_counters(name: str) -> None:
    """The changed script prints what the original printed at those steps, and leaves the same values behind."""
    before, after, test = COUNTERS[name]
    deep = "        " if "inner" in name else "    "
    shown = "seen, " if "shown" in name else ""
    lines = [*before, f"{deep}total += 1.5", f"{deep}print({shown}total)", *after]
    head = textwrap.dedent("""\
        from types import SimpleNamespace
        box = SimpleNamespace(seen=0)
        rows, count, seen, hits, total = list(range(11)), 8, 0, 0, 0.0
        def tqdm(it, **_): return it
        trange = range
        """)
    text = head + "\n".join(lines) + "\nprint('end', total, seen, hits, box.seen)\n"
    new = rare(text, f"print({shown}total)")
    assert f"if {test}:\n" in new
    (printed, space), (printed_new, space_new) = run(text), run(new)
    old_lines, new_lines = printed.splitlines(), printed_new.splitlines()
    assert new_lines[-1] == old_lines[-1]
    rest = iter(old_lines)
    assert all(line in rest for line in new_lines)  # in the same order
    assert 2 <= len(new_lines) < len(old_lines)
    if " or " in test:
        assert new_lines[-2] == old_lines[-2]  # the last step is shown
    assert {k: space[k] for k in ("total", "seen", "hits")} == {k: space_new[k] for k in ("total", "seen", "hits")}


def test_a_name_that_is_free() -> None:
    text = "step = log_step = 5\nfor x in rows:\n    print(x)\n"
    assert "for loop_step, x in enumerate(rows):\n    if loop_step % 3 == 0:\n" in rare(text)
    text = "step = log_step = loop_step = 5\nfor x in rows:\n    print(x)\n"
    assert "for step_2, x in enumerate(rows):" in rare(text)


@pytest.mark.parametrize(
    ("header", "new"),
    [
        ("for a, b in rows:", "for step, (a, b) in enumerate(rows):"),
        ("for (a, b) in rows:", "for step, (a, b) in enumerate(rows):"),
        ("for [a, b] in rows:", "for step, [a, b] in enumerate(rows):"),
        ("for a, (b, c) in zip(rows, rows):  # why", "for step, (a, (b, c)) in enumerate(zip(rows, rows)):  # why"),
        ("for a in (bar := tqdm(rows)):", "for step, a in enumerate((bar := tqdm(rows))):"),
        ("for a in rows[1:] :", "for step, a in enumerate(rows[1:]) :"),
        ("for self.row in rows:", "for step, self.row in enumerate(rows):"),
    ],
)
def test_counting_a_loop(header: str, new: str) -> None:
    text = body(header, "print(1)")
    assert rare(text) == body(new, "if step % 3 == 0:", "    print(1)")


def test_two_outputs_of_one_loop_share_the_counter() -> None:
    text = body("for x in rows:", "print(x)", "work(x)", "log.info('%s', x)")
    edits = [Edit(kind="log-every", site=f"{FILE}:{line}", arguments=EVERY) for line in (2, 4)]
    new = apply_edits(text, edits, file=FILE)
    assert new.refused == ()
    assert new.text == body(
        "for step, x in enumerate(rows):", "if step % 3 == 0:", "    print(x)", "work(x)",
        "if step % 3 == 0:", "    log.info('%s', x)",
    )  # fmt: skip


def test_outputs_in_a_row_share_the_test() -> None:
    text = body("for i in range(n):", "print(i)", "# why", "print(", "    loss)", "log.info(i)  # c", "work()")
    edits = [Edit(kind="log-every", site=f"{FILE}:{line}", arguments=EVERY) for line in (2, 4, 6)]
    new = apply_edits(text, edits, file=FILE)
    assert new.refused == ()
    assert new.text == body(
        "for i in range(n):", "if i % 3 == 0 or i == n - 1:", "    print(i)", "# why",
        "if i % 3 == 0 or i == n - 1:", "    print(", "        loss)", "    log.info(i)  # c", "work()",
    )  # fmt: skip


def test_the_layout_is_kept() -> None:
    text = 'for i in range(n):\r\n\tif main:\r\n\t\tprint(f"""a\r\nb {i}\r\n""",\r\n\t\t      i)  # c\r\n\tx = 1'
    assert rare(text) == (
        'for i in range(n):\r\n\tif main:\r\n\t\tif i % 3 == 0 or i == n - 1:\r\n\t\t\tprint(f"""a\r\nb {i}\r\n""",\r\n'
        "\t\t\t      i)  # c\r\n\tx = 1"
    )
    text = "for i in range(n):\n  print(1)"
    assert rare(text) == "for i in range(n):\n  if i % 3 == 0 or i == n - 1:\n    print(1)"


@pytest.mark.parametrize(
    "line",
    ["print(loss.item())", "print(f'{loss:.3f} {norm.item()}', flush=True)", "print(loss, file=sys.stderr)",
     "logger.info('loss %.3f', loss.item())", "logging.debug(loss)", "self.logger.info(str(loss))",
     "bar.set_postfix(loss=loss.item(), lr=schedule.get_last_lr()[0])", "bar.set_description(f'{float(loss):.2f}')",
     "tqdm.write(f'{loss.item()}')", "writer.add_scalar('loss', loss.item(), step)", "wandb.log({'loss': loss.item()})",
     "run.log({'loss': loss.detach().cpu().numpy()})", "mlflow.log_metric('loss', loss.mean().item())",
     "print(round(100. * (a == b).sum().item() / len(b), 2), time.time() - start)",
     "print(torch.cuda.max_memory_allocated() / 2**30)", "sys.stdout.write(f'{loss.item()}\\n')"],
)  # fmt: skip
def test_what_is_output(line: str) -> None:
    text = body("for step in range(9):", line)
    assert rare(text, line) == body("for step in range(9):", "if step % 3 == 0 or step == 8:", f"    {line}")


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("if main: print(x)", "if main and (step % 3 == 0 or step == 98): print(x)"),
        ("if main or x: print(x)  # c", "if (main or x) and (step % 3 == 0 or step == 98): print(x)  # c"),
        ("if(main): print(x)", "if(main) and (step % 3 == 0 or step == 98): print(x)"),
    ],
)
def test_output_on_the_line_of_its_test(line: str, new: str) -> None:
    assert rare(body("for step in range(99):", line)) == body("for step in range(99):", new)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("loss.backward()", "no console output"),
        ("file.write(f'{loss.item()}')", "no console output"),
        ("x = print(1)", "no console output"),
        ("math.log(x)", "no console output"),
        ("losses.append(loss.item())", "no console output"),
        ("print(next(rows))", "calls next"),
        ("print(rows.pop())", "calls rows.pop"),
        ("print(model(x))", "calls model"),
        ("print(train_step(x).item())", "calls train_step"),
        ("print(torch.rand(1).item())", "calls torch.rand"),
        ("print(y := f)", "does more"),
        ("print(x, file=out)", "to a file"),
        ("a(); print(x)", "shares its line"),
        ("for x in y: print(x)", "shares its line"),
        ("if x: print(x); work()", "shares its line"),
        ("if step % 5 == 0:\n        print(x)", "limits it already"),
        ("if step % args.log_interval == 0:\n        print(x)", "limits it already"),
        ("if args.log_every:\n        print(x)", "limits it already"),
        ("if step % 5: continue\n    print(x)", "limits it already"),
        ("def show():\n        print(x)", "no loop"),
        ("if x:\n        print(x)\n        break", "runs once"),
        ("if x:\n        print(x)\n        sys.exit(1)", "runs once"),
    ],
)
def test_what_is_not(line: str, word: str) -> None:
    text = body("for step in range(99):", line)
    part = next(each for each in line.split("\n") if "print" in each or each == line)
    assert word in refusal(text, "log-every", part.strip(), arguments=EVERY)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("print(1)\n", "no loop"),
        ("def f():\n    print(1)\nfor x in y:\n    f()\n", "no loop"),
        ("while True:\n    print(1)\n", "counts its steps nowhere"),
        ("for x in 1, 2, 3:\n    print(1)\n", "no loop"),  # three parts of one step
        ("for x in [1, 2]:\n    print(1)\n", "no loop"),
        ("for p in model.parameters():\n    print(1)\n", "no loop"),
        ("for i in range(3):\n    print(1)\n", "no loop"),
        ("for x in a:\n    work()\nelse:\n    print(1)\n", "no loop"),
        ("async def f():\n    async for x in a:\n        print(1)\n", "counts its steps nowhere"),
        ("enumerate = 3\nfor x in a:\n    print(1)\n", "enumerate means"),
    ],
)
def test_loops_that_cannot_be_counted(text: str, word: str) -> None:
    assert word in refusal(text, "log-every", "print", arguments=EVERY)


# NaN checks

CHECK = textwrap.dedent("""\
    import math, sys
    import torch
    losses = torch.ones(9)
    losses[BAD] = float("nan")
    seen = []
    for step in range(9):
        loss = losses[step]
        seen.append(step)
    """)


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        (["if torch.isnan(loss):", "    raise RuntimeError('nan')"],
         "if (step % 3 == 0 or step == 8) and torch.isnan(loss):"),
        (["if torch.isnan(loss).any() or torch.isinf(loss):", "    print(loss)", "    raise RuntimeError('nan')"],
         "if (step % 3 == 0 or step == 8) and (torch.isnan(loss).any() or torch.isinf(loss)):"),
        (["if not torch.isfinite(loss): raise RuntimeError('nan')"],
         "if (step % 3 == 0 or step == 8) and not torch.isfinite(loss): raise RuntimeError('nan')"),
        (["if math.isnan(loss.item()):", "    sys.exit('nan')"],
         "if (step % 3 == 0 or step == 8) and math.isnan(loss.item()):"),
        (["if(loss != loss):", "    raise RuntimeError('nan')"],
         "if (step % 3 == 0 or step == 8) and (loss != loss):"),
        (["assert not torch.isnan(loss), 'nan'"], "if step % 3 == 0 or step == 8:"),
        (["assert torch.isfinite(loss).all()"], "if step % 3 == 0 or step == 8:"),
    ],
)  # fmt: skip
def test_a_check_runs_rarely(lines: list[str], first: str) -> None:
    """A NaN that stays is found at the next check, and always at the end of the loop."""
    text = CHECK.replace("BAD", "4:") + textwrap.indent("\n".join(lines) + "\n", "    ")
    new = rare(text, lines[0])
    assert f"    {first}\n" in new
    for source, expected in ((text, 4), (new, 6)):
        space: dict[str, object] = {}
        with pytest.raises((RuntimeError, SystemExit, AssertionError)):
            exec(compile(source, FILE, "exec"), space)
        assert space["seen"] == list(range(expected + 1))
    at_the_end = new.replace("4:", "8:")
    with pytest.raises((RuntimeError, SystemExit, AssertionError)):
        exec(compile(at_the_end, FILE, "exec"), {})
    exec(compile(new.replace("4:", "9:"), FILE, "exec"), {})  # no NaN, no error


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (["if torch.isnan(loss):", "    continue"], "in the same step"),
        (["if torch.isnan(loss):", "    break"], "in the same step"),
        (["if torch.isnan(loss):", "    return"], "in the same step"),
        (["if torch.isnan(loss):", "    loss = 0 * loss"], "in the same step"),
        (["if torch.isnan(loss):", "    raise ValueError", "else:", "    optimizer.step()"], "other branches"),
        (["if torch.isnan(model(x)):", "    raise ValueError"], "calls model"),
        (["if torch.isnan(y := loss):", "    raise ValueError"], "does more"),
        (["if loss > 3:", "    raise ValueError"], "no console output"),
        (["assert loss < 3"], "no console output"),
        (["assert not torch.isnan(step_once(x))"], "calls step_once"),
    ],
)
def test_checks_that_stay(lines: list[str], word: str) -> None:
    text = "def f():\n    for step in range(99):\n" + textwrap.indent("\n".join(lines) + "\n", "        ")
    assert word in refusal(text, "log-every", lines[0], arguments=EVERY)


def test_an_elif_stays() -> None:
    text = body("for step in range(99):", "if a:", "    b()", "elif torch.isnan(x):", "    raise ValueError")
    assert "other branches" in refusal(text, "log-every", "elif", arguments=EVERY)


def test_twice_is_refused() -> None:
    text = rare(body("for step in range(99):", "print(x)"))
    assert "limits it already" in refusal(text, "log-every", "print", arguments=EVERY)
    text = rare(body("for step in range(99):", "if torch.isnan(x):", "    raise ValueError"), "isnan")
    assert "limits it already" in refusal(text, "log-every", "isnan", arguments=EVERY)
