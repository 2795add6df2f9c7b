"""Asks NVML from a thread, so that the driver answers while this process still imports the rest of itself.

Loading the driver library takes longer than everything else that a quick look needs. The command line begins the
question before it imports anything heavy; collect takes the answer when it comes to it.
"""

from __future__ import annotations

import threading
from typing import Any

from gpudoctor import child

TARGET = "gpudoctor.collect.nvml_child:query"
_begun: list[Question] = []


class Question:
    """One call of the NVML child. `heard` are the messages it sent on the way; the child is gone afterwards."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.heard: list[dict[str, Any]] = []
        self._result: child.ChildResult | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._ask, name="nvml", daemon=True)
        self._thread.start()

    def answer(self) -> child.ChildResult:
        """Wait for the end of the call; it ends at its deadline at the latest."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._result is not None
        return self._result

    def _ask(self) -> None:
        try:
            with child.Server() as server:
                self._result = server.call(TARGET, deadline_s=self.timeout_s, on_progress=self.heard.append)
        except BaseException as error:  # noqa: BLE001  # told to the thread that waits
            self._failure = error


def begin(timeout_s: float) -> None:
    """Ask now; the next `question` of this process is this one."""
    _begun.append(Question(timeout_s))


def question(timeout_s: float) -> Question:
    """The question that was begun early with the same deadline, or a new one."""
    while _begun:
        early = _begun.pop()
        if early.timeout_s == timeout_s:
            return early
    return Question(timeout_s)
