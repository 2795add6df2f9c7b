"""What a person types after tune or profile, as a command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def as_command(words: Sequence[str]) -> list[str]:
    """The command to run: as typed, or, when it begins with a Python file, that file under this interpreter."""
    if words[0].endswith(".py"):
        return [sys.executable, *words]
    return list(words)
