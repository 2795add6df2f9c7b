"""What TARGET means: a command to run until its loader is iterated, or a callable that gives a Dataset or a loader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpudoctor.errors import GpudoctorError
from gpudoctor.observe.candidates import target_command
from gpudoctor.source.loader_calls import loader_of
from gpudoctor.tune.commands import as_command

DEFAULT_BATCH = 32  # where the dataset alone is given and no call in its file says otherwise
_FILE = re.compile(r"^(?P<file>.+\.py):(?P<name>[A-Za-z_][\w.]*)$")
_MODULE = re.compile(r"^(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`site`: the line of the loader call, where the file shows it. `arguments`: the loader's, for a Dataset.
    `present_known`: those arguments are the user's own."""

    shown: str
    command: tuple[str, ...]
    is_callable: bool
    site: str | None = None
    arguments: dict[str, int | bool | str | None] = field(default_factory=dict)
    present_known: bool = True


def parse(words: Sequence[str], *, cwd: Path) -> Target:
    """The target of the words after `tune-loader`; GpudoctorError when the file does not exist or words are left."""
    if not words:
        raise GpudoctorError(
            "there is nothing to tune", "give a script, -- COMMAND, file.py:callable or module:callable"
        )
    first = words[0]
    by_file, by_module = _FILE.match(first), _MODULE.match(first)
    if by_file is None and (by_module is None or (cwd / first).exists()):
        command = as_command(words)
        if first.endswith(".py") and not (cwd / first).is_file():
            raise GpudoctorError(f"there is no file {first!r}", "give a script, -- COMMAND, or file.py:callable")
        return Target(shown=" ".join(words), command=tuple(command), is_callable=False)
    if len(words) > 1:
        raise GpudoctorError(
            f"{first} is a callable and takes no arguments", f"a command stands after --: -- {' '.join(words)}"
        )
    site, known = None, False
    arguments: dict[str, int | bool | str | None] = {"batch_size": DEFAULT_BATCH}
    if by_file is not None:
        path = cwd / by_file["file"]
        if not path.is_file():
            raise GpudoctorError(f"there is no file {by_file['file']!r}", "TARGET is file.py:callable")
        call = loader_of(_text(path), by_file["name"])
        if call is not None:
            site = f"{_relative(path, cwd)}:{call.line}"
            arguments = {"batch_size": 1, **call.arguments}
            known = call.workers_known
    return Target(
        shown=first,
        command=tuple(target_command(first, arguments)),
        is_callable=True,
        site=site,
        arguments=arguments,
        present_known=known,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""  # the interpreter will say what is wrong with it, in its own words


def _relative(path: Path, cwd: Path) -> str:
    """The site's file as everywhere: relative to the working directory when below it, else absolute."""
    real = path.resolve()
    try:
        return str(real.relative_to(cwd.resolve()))
    except ValueError:
        return str(real)
