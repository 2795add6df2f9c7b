"""``nvidia-smi topo -p2p r|w|n|a|p``: whether the driver grants each GPU access to the other's memory."""

from __future__ import annotations

import re

from gpudoctor.model import Case, Gpu, P2PStatus, Pair, Source
from gpudoctor.read.parts import Part, Parts, line_count

KIND = "nvidia-smi-topo-p2p"
_WORDS: dict[str, P2PStatus] = {
    "OK": "OK",
    "CNS": "CNS",
    "GNS": "GNS",
    "TNS": "TNS",
    "DR": "DR",
    "NS": "NS",
    "U": "U",
}
_HEADER = re.compile(r"\s*(?:GPU\d{1,4}\s+)*GPU\d{1,4}\s*$")
_ROW = re.compile(rf"\s*GPU(\d{{1,4}})\s+((?:(?:X|{'|'.join(_WORDS)})\s+)*(?:X|{'|'.join(_WORDS)}))\s*$")
_COMMAND = re.compile(r"topo\s+(?:-p2p|--p2pstatus)\s+([rwnap]{1,2})\b")
_LEGEND = re.compile(r"\s*(?:X|OK|CNS|GNS|TNS|NS|DR|U)\s*=\s*\S|\s*Legend:")
_ANSI = re.compile(r"\x1b\[[0-9;]*m|\[(?:4|0)m")


def is_kind(text: str) -> bool:
    """A row of P2P words behind a GPU; a row of path classes makes it the other matrix."""
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    rows = [match for line in lines if (match := _ROW.match(line))]
    words = {word for row in rows for word in row[2].split()}
    legend = "Status Ok" in text or "Chipset not supported" in text
    return bool(words - {"X"}) or bool(rows and legend)


def read_text(text: str, file: str) -> Parts:
    """All matrices of one text are of one machine; the letter of the command says which access each tells."""
    lines = text.splitlines()
    understood = 0
    facts: dict[tuple[int, int], dict[str, P2PStatus]] = {}
    gpus: set[int] = set()
    sources: list[Source] = []
    fact = "p2p_read"
    facts_of = {"r": "p2p_read", "w": "p2p_write", "n": "p2p_nvlink"}
    listed = 0
    for number, raw in enumerate(lines, start=1):
        line = _ANSI.sub("", raw)
        if command := _COMMAND.search(line):
            fact = facts_of.get(command[1][0], "p2p_read" if command[1] == "p" else "")
            understood += 1
            continue
        if _HEADER.match(line):
            listed = max(listed, len(line.split()))
            understood += 1
            continue
        row = _ROW.match(line)
        if row is None:
            understood += not line.strip() or _LEGEND.match(line) is not None or "smi" in line
            continue
        understood += 1
        a = int(row[1])
        gpus.add(a)
        words = row[2].split()
        if words.count("X") != 1 or words.index("X") != a or not fact:
            continue  # a row of another shape says nothing about who is meant
        for b, word in enumerate(words):
            if b == a:
                continue
            gpus.add(b)
            key = (min(a, b), max(a, b))
            facts.setdefault(key, {}).setdefault(fact, _WORDS[word])
            sources.append(Source(path=f"pairs[gpu:{key[0]},gpu:{key[1]}].{fact}", origin=file, line=number))
    case = Case(
        gpus=tuple(Gpu(index=index) for index in sorted(gpus)),
        pairs=tuple(
            Pair(
                a=f"gpu:{a}",
                b=f"gpu:{b}",
                p2p_read=found.get("p2p_read"),
                p2p_write=found.get("p2p_write"),
                p2p_nvlink=found.get("p2p_nvlink"),
            )
            for (a, b), found in sorted(facts.items())
        ),
        sources=tuple(sources),
    )
    whole = len(gpus) >= listed
    return Parts(
        parts=(Part(case=case, complete=whole),) if gpus else (),
        lines=line_count(text),
        not_understood=len(lines) - understood,
        truncated=not whole,
    )
