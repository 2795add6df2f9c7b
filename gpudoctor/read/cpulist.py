"""CPU and node lists as the kernel and nvidia-smi print them."""

from __future__ import annotations

import re

_LIST = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*")
_MOST = 65536  # far above the kernel's NR_CPUS; keeps a hostile list from filling the memory


def parse_list(text: str) -> tuple[int, ...] | None:
    """The numbers of a list such as ``0-3,8,10-11``, ascending; None when `text` is no such list."""
    if not _LIST.fullmatch(text):
        return None
    numbers: list[int] = []
    for part in text.split(","):
        first, _, end = part.partition("-")
        low, high = int(first), int(end or first)
        if high < low or high >= _MOST or (numbers and low <= numbers[-1]):
            return None
        numbers.extend(range(low, high + 1))
    return tuple(numbers)
