"""The one error class that commands turn into a clear line and an exit code."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class GpudoctorError(Exception):
    """What was tried and what happened, with the next thing to do.

    message: one line that names what was tried and what happened.
    hint: one line that says what to do next, or None.
    exit_code: the process exit code; 2 (usage error or tool failure) unless told otherwise.
    """

    def __init__(self, message: str, hint: str | None = None, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"
