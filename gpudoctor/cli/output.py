"""Prints results and errors, shows progress, and turns how a command ended into an exit code.

stdout carries the result, stderr everything else. Every command body goes through `execute`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol, TextIO

import typer

from gpudoctor.cli.options import Common
from gpudoctor.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EXIT_USAGE, GpudoctorError

if TYPE_CHECKING:
    from gpudoctor.model import Envelope
    from gpudoctor.report.text import Style

# A body that keeps what it has when Ctrl-C or SIGTERM comes returns normally; the exit code is decided here.
_received: list[int] = []


class Terminated(KeyboardInterrupt):
    """SIGTERM, so that whatever cleans up after Ctrl-C does so here too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command hands back: the envelope, and its own human text where it has one."""

    envelope: Envelope
    human: Callable[[Style], str] | None = None


def execute(command: str, common: Common, body: Callable[[], Result]) -> NoReturn:
    """Run the body of a command, print its result in the wanted format, and leave with its exit code.

    GpudoctorError becomes one line on stderr (and a failed envelope where JSON, JUnit or Markdown is wanted), an
    interrupt 130 or 143, any other exception one line that calls it a bug; traceback only with GPUDOCTOR_DEBUG=1.
    """
    try:
        _check_outputs(common)
        result = body()
    except (KeyboardInterrupt, GpudoctorError, Exception) as error:  # noqa: BLE001 - the last stop before the user
        message, hint, exit_code = describe(error)
        say_error(message, hint)
        if common.wanted != "human" or common.output:
            with contextlib.suppress(GpudoctorError):
                deliver(Result(envelope=failed(command, message, exit_code)), common, said=common.wanted == "human")
        raise typer.Exit(exit_code) from None
    raise typer.Exit(finish(result, common))


def finish(result: Result, common: Common) -> int:
    """Print errors and notes, deliver the result, and give the exit code."""
    envelope = result.envelope
    for error in envelope.errors:
        say_error(error)
    if common.level >= 0:
        for text in envelope.notes:
            note(text)
    try:
        deliver(result, common)
    except GpudoctorError as error:
        say_error(error.message, error.hint)
        return error.exit_code
    return envelope.exit_code


def deliver(result: Result, common: Common, *, said: bool = False) -> None:
    """Write the files of -o, and the result to stdout all the same where one of them cannot be written.

    said: what stdout would get was said on stderr.
    """
    from gpudoctor.report import render, write_files

    fail_on = common.threshold(result.envelope.command)
    unwritten: GpudoctorError | None = None
    try:
        write_files(result.envelope, common.output or (), fail_on=fail_on)
    except GpudoctorError as error:
        unwritten = error
    if not said:
        look = style(sys.stdout, common.level)
        if common.wanted == "human" and result.human is not None:
            text = result.human(look)
        else:
            text = render(
                result.envelope,
                common.wanted,
                width=look.width,
                unicode=look.unicode,
                color=look.color,
                fail_on=fail_on,
                verbose=look.verbose,
            )
        write(text)
    if unwritten is not None:
        raise unwritten


def write(text: str) -> None:
    """Text to stdout; a closed pipe ends quietly, a character the terminal cannot show becomes an escape."""
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding or "ascii"
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        quiet_stdout()


def quiet_stdout() -> None:
    """Nobody reads stdout any more: let the flush at exit go nowhere in place of failing."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe(error: BaseException) -> tuple[str, str | None, int]:
    """Message, hint and exit code for whatever ended a command."""
    if isinstance(error, KeyboardInterrupt):
        code = interrupted_exit_code(error)
        return ("terminated" if code == EXIT_TERMINATED else "interrupted"), None, code
    if isinstance(error, GpudoctorError):
        return error.message, error.hint, error.exit_code
    if os.environ.get("GPUDOCTOR_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}gpudoctor{os.sep}" in frame.filename] or list(frames)
    where = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    text = " ".join(str(error).split())
    message = f"this is a bug in gpudoctor: {type(error).__name__}{where}" + (f": {text}" if text else "")
    return message, "run again with GPUDOCTOR_DEBUG=1 for the traceback, and report it", EXIT_USAGE


def failed(command: str, message: str, exit_code: int) -> Envelope:
    """The envelope of a command that has nothing else to tell."""
    from gpudoctor import __version__
    from gpudoctor.model import Envelope

    return Envelope(version=__version__, command=command, status="failed", exit_code=exit_code, errors=(message,))


def say_error(message: str, hint: str | None = None) -> None:
    """`gpudoctor: message` and an indented hint on stderr."""
    _say(f"gpudoctor: {_safe(message)}")
    if hint:
        _say(f"  {_safe(hint)}")


def note(text: str) -> None:
    """A note on stderr."""
    _say(f"note: {_safe(text)}")


def _safe(text: str) -> str:
    from gpudoctor.report.text import printable

    return printable(text, unicode=has_unicode(sys.stderr))


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def style(stream: TextIO, level: int = 0) -> Style:
    """Width, glyphs and colour for a stream: none of them without a terminal; NO_COLOR and FORCE_COLOR are honoured."""
    from gpudoctor.report.text import Style

    terminal = _is_terminal(stream)
    width = shutil.get_terminal_size().columns if terminal else None
    return Style(width=width, unicode=has_unicode(stream), color=_has_colour(terminal), verbose=level)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _has_colour(terminal: bool) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return terminal and os.environ.get("TERM") != "dumb"


def has_unicode(stream: TextIO) -> bool:
    """Whether box characters can be shown.

    Under LC_ALL=C Python writes UTF-8 all the same (its UTF-8 mode), but the terminal was said not to know it.
    """
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "").replace("_", "")
    if not encoding.startswith("utf"):
        return False
    if os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8") == "1":
        return True
    locale = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "")
    return locale not in ("C", "POSIX")


class Update(Protocol):
    """Call with what is done so far, the total (None: unknown), and a short text about the present piece of work."""

    def __call__(self, done: float, total: float | None = None, text: str = "") -> None: ...


def _silent(done: float, total: float | None = None, text: str = "") -> None:
    del done, total, text


@contextlib.contextmanager
def progress(title: str, *, total: float | None = None, quiet: bool = False) -> Iterator[Update]:
    """A progress bar on stderr; nothing at all when stderr is no terminal, or with -q.

    with progress("copies", total=8) as update:
        update(3, 8, "gpu:0 d2h")
    """
    if quiet or not _is_terminal(sys.stderr) or os.environ.get("TERM") == "dumb":
        yield _silent
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, no_color=not _has_colour(terminal=True), highlight=False)
    plain = not has_unicode(sys.stderr)
    bar = Progress(
        TextColumn("{task.description}"),
        TextColumn("{task.completed:.0f}") if plain else BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task(escape(_safe(title)), total=total, text="")

        def update(done: float, total: float | None = None, text: str = "") -> None:
            bar.update(task, completed=done, total=total, text=escape(_safe(text)))

        yield update


def install_sigterm() -> Callable[[], None]:
    """Let SIGTERM raise Terminated where the program stands; the answer puts the old handler back."""
    _received.clear()

    def handler(_number: int, _frame: FrameType | None) -> None:
        _received.append(signal.SIGTERM)
        raise Terminated

    try:
        old = signal.signal(signal.SIGTERM, handler)
    except ValueError:  # not the main thread: embedding programs keep their own handler
        return lambda: None

    def restore() -> None:
        signal.signal(signal.SIGTERM, old)
        _received.clear()

    return restore


def interrupted_exit_code(error: BaseException | None = None) -> int:
    """143 after SIGTERM, 130 after Ctrl-C: for bodies that kept their partial result and must still say so."""
    return EXIT_TERMINATED if _received or isinstance(error, Terminated) else EXIT_INTERRUPTED


def interrupted(envelope: Envelope) -> Envelope:
    """The envelope of what was measured before Ctrl-C or SIGTERM: failed, 130 or 143."""
    import dataclasses

    code = interrupted_exit_code()
    word = "terminated" if code == EXIT_TERMINATED else "interrupted"
    errors = (*envelope.errors, f"{word}: the result holds what was done until then")
    return dataclasses.replace(envelope, status="failed", exit_code=code, errors=errors)


def _check_outputs(common: Common) -> None:
    """A suffix without a format, or a folder that does not exist, is a usage error before any work is done."""
    if common.output:
        from gpudoctor.report import form_of

        for path in common.output:
            form_of(path)
            folder = Path(path).parent
            if not folder.is_dir():
                raise GpudoctorError(f"-o {path}: there is no folder {str(folder)!r}", "make it, or give another path")


def document(value: object) -> int:
    """A JSON document that is no envelope (schema, rules, explain) to stdout."""
    import json

    write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    return EXIT_OK
