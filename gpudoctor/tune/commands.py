"""What a person types after tune or profile, as a command."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from gpudoctor.errors import GpudoctorError


def as_command(words: Sequence[str]) -> list[str]:
    """The command to run: as typed, or, when it begins with a Python file, that file under this interpreter.

    GpudoctorError when there is no such program.
    """
    if words[0].endswith(".py"):
        return [sys.executable, *words]
    if shutil.which(words[0]) is None:
        raise GpudoctorError(
            f"there is no program {words[0]!r} to run", "give the command as you type it in this directory"
        )
    return list(words)
