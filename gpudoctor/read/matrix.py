"""From the text of ``nvidia-smi topo -m``, as people paste it, to labelled cells; what the damage hides stays unknown.

Known damage: ANSI codes (also without their ESC byte), lost tabs and lost leading tab, cells printed over or jammed
into each other (``NODEPXB``, ``PH0-115``), Markdown tables, a prompt before the header, tabs expanded or collapsed
to blanks, trailing blanks, lines wrapped or cut, rows missing.

Two things keep damage from becoming a wrong cell. The X of a row must stand in the row's own column, else the row is
dropped. And text that stops without a line end may stop inside a word, so its last cell is marked uncertain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Column = Literal["cpu", "numa", "gpu_numa"]

_CLASS = r"(?:PIX|PXB|PHB|NODE|SYS|SOC|NV\d{1,3}|X|N/A|ERR!)"
_CLASSES = re.compile(rf"{_CLASS}+")
_ONE_CLASS = re.compile(_CLASS)
_WITH_TAIL = re.compile(rf"({_CLASS}*?)(PIX|PXB|PHB|NODE|SYS|SOC|X|PI|PX|PH|NO|NOD|SY|SO)(\d[\d,-]*)")
_OVERPRINTED = {"PI": "PIX", "PX": "PXB", "PH": "PHB", "NO": "NODE", "NOD": "NODE", "SY": "SYS", "SO": "SYS"}
_P2P = re.compile(r"(?:OK|CNS|GNS|TNS|NS|DR|U)")
_LABEL = r"(?:GPU(?:0|[1-9]\d{0,2})|NIC\d{1,3}|mlx\d_bond_\d{1,3}|mlx\d_\d{1,3})"
_LABELS = re.compile(rf"{_LABEL}+")
_ONE_LABEL = re.compile(_LABEL)
_OTHER_NIC = re.compile(r"(?!GPU|NIC)(?=[A-Za-z_.-]*\d)[A-Za-z][\w.-]{1,31}")  # rocep4s0f0, bnxt_re0, hfi1_0
_COLUMNS = re.compile(r"(CPU\s*Affinity)|(NUMA\s*Affinity|NUMA(?!\s*(?:ID|Affinity)))|(GPU\s*NUMA\s*ID)", re.IGNORECASE)
_COLUMN_NAMES: tuple[Column, ...] = ("cpu", "numa", "gpu_numa")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.?|\[(?:\d{1,2}(?:;\d{1,2})*)?m")
_LEGEND = re.compile(r"\s*(?:X|SYS|SOC|NODE|PHB|PXB|PIX|NV#)\s*=\s*\S|\s*(?:NIC\s+)?Legend:\s*$")
_NIC_NAME = re.compile(r"(?<![\w.-])(NIC\d{1,3})\s*[:=]\s*([A-Za-z][\w.-]{0,31})[\s|]*$")
_AFFINITY = re.compile(r"\d[\d,-]*|N/A")
_COMMAND = re.compile(r"\bsmi\s+topo\s[^\n]{0,60}?(?:-m\b|--matrix)")
_PROMPT_HOST = re.compile(r"[\w.-]{1,32}@([A-Za-z0-9][\w.-]{0,63})[: ][^#$>]{0,200}[#$>]\s{0,4}\S{0,80}smi\b")
_LONGEST = 10_000  # characters of a line; a hundred devices take about 1000
_STOP = 8  # nvidia-smi's own tab stops, still visible where a terminal expanded them


@dataclass(slots=True, kw_only=True)
class Row:
    """One row. A cell or column that is None is not known; "" is a cell that was printed empty."""

    label: str
    line: int
    cells: list[str | None]
    tail: dict[Column, str] = field(default_factory=dict)
    uncertain_cell: int | None = None  # position of the cell in which the text stopped
    uncertain_column: Column | None = None


@dataclass(slots=True, kw_only=True)
class Matrix:
    """One matrix: column labels, the affinity columns that it has, and its rows."""

    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    header_line: int | None
    rows: list[Row] = field(default_factory=list)
    nic_names: dict[str, str] = field(default_factory=dict)
    hostname: str | None = None
    windows: bool = False

    @property
    def truncated(self) -> bool:
        """True when rows, cells or names are missing that a whole text would have."""
        shown = {row.label: row for row in self.rows}
        return (
            self.header_line is None
            or any(label not in shown or None in shown[label].cells for label in self.labels)
            or any(set(self.columns) - set(row.tail) for row in self.rows if row.label.startswith("GPU"))
            or any(label.startswith("NIC") and label not in self.nic_names for label in self.labels)
        )


@dataclass(slots=True, kw_only=True)
class Matrices:
    """All matrices of one text."""

    found: list[Matrix]
    lines: int
    not_understood: int


def read_matrices(text: str) -> Matrices:
    """Every GPU topology matrix in `text`. `found` is empty when there is none; never raises."""
    raw = [line.rstrip("\r") if len(line) <= _LONGEST else "..." for line in text.split("\n")]
    lines = [_clean(line) for line in raw]
    ended = text.endswith("\n")
    if ended or not text:
        lines.pop()
        raw.pop()
    stops = _stops(raw, None if ended else len(lines) - 1)
    understood = {number for number, line in enumerate(lines) if not line.strip() or _is_around(line)}
    headers = [(number, header) for number, line in enumerate(lines) if (header := _header(line, cut=number in stops))]
    found: list[Matrix] = []
    for position, (number, (labels, columns)) in enumerate(headers):
        begin = 0 if position == 0 else number + 1
        end = headers[position + 1][0] if position + 1 < len(headers) else len(lines)
        matrix = Matrix(labels=labels, columns=columns, header_line=number + 1)
        used = _fill(matrix, lines, range(begin, end), stops)
        if used:
            understood |= used | {number}
            _describe(matrix, lines, range(begin, end), number, stops)
            found.append(matrix)
    if not found:
        headless = _without_header(lines, stops)
        if headless is not None:
            understood |= {row.line - 1 for row in headless.rows}
            found.append(headless)
    return Matrices(found=found, lines=len(lines), not_understood=len(lines) - len(understood))


def _clean(line: str) -> str:
    line = _ANSI.sub("", line).replace("\\t", "\t").replace("\u00a0", " ").replace("\u2013", "-").rstrip("\r\n \v\f")
    stripped = line.strip()
    if stripped.startswith(("|", "\u2502")) and re.search(r"(?:^|\W)(?:GPU|NIC|mlx)\d", stripped):
        # One bar a column: keeps empty cells apart from lost ones.
        return "|" + "|".join(cell.strip() for cell in re.split("[|\u2502]", stripped.strip("|\u2502")))
    return line


def _stops(lines: Sequence[str], unended: int | None) -> frozenset[int]:
    """Numbers of the lines that may stop inside a word: cut at the edge of a screen, or by the end of the text.

    A legend line and rows of one length that nothing exceeds were cut there.
    """
    edge = max(map(len, lines), default=0)
    cut = any(len(line) == edge and _LEGEND.match(line) for line in lines)
    at_edge = {number for number, line in enumerate(lines) if len(line) == edge and not line[-1:].isspace()}
    return frozenset((at_edge if cut else set()) | (set() if unended is None else {unended}))


def _is_around(line: str) -> bool:
    """Lines that belong to the output but hold no cells."""
    return bool(
        _LEGEND.match(line)
        or _NIC_NAME.search(line)
        or _COMMAND.search(line)
        or re.fullmatch(r"[\s|:+=`~\u2500-\u257f-]*", line)  # rules of a table, a code fence
    )


def _header(line: str, *, cut: bool) -> tuple[tuple[str, ...], tuple[Column, ...]] | None:
    """Labels and affinity columns of a header line; whatever stands before the first label is not looked at."""
    first = re.search(r"GPU\d", line)
    if first is None:
        return None
    text = line[first.start() :]
    columns: list[Column] = []
    start = len(text)
    for match in _COLUMNS.finditer(text):
        columns.append(_COLUMN_NAMES[next(number for number in range(3) if match[number + 1])])
        start = min(start, match.start())
    tokens = text[:start].replace("|", " ").split()
    if cut and not columns and tokens:
        tokens.pop()  # it may stop inside a name
    labels: list[str] = []
    for token in tokens:
        if _LABELS.fullmatch(token):
            labels += _ONE_LABEL.findall(token)
        elif _OTHER_NIC.fullmatch(token) and not _CLASSES.fullmatch(token):
            labels.append(token)
        else:
            return None
    if _COLUMNS.sub("", text[start:]).replace("|", " ").strip() and not cut:
        return None
    known = len(set(labels)) == len(labels) and len(set(columns)) == len(columns)
    return (tuple(labels), tuple(columns)) if known and (len(labels) > 1 or (labels and columns)) else None


def _fill(matrix: Matrix, lines: Sequence[str], numbers: range, stops: frozenset[int]) -> set[int]:
    """Put the rows found in `numbers` into the matrix; returns the line numbers used, none if it is another matrix."""
    label = re.compile("|".join(rf"{re.escape(name)}(?!\w)" for name in sorted(matrix.labels, key=len, reverse=True)))
    used: set[int] = set()
    for number in numbers:
        line = lines[number]
        for match in label.finditer(line):
            if match.start() and re.match(r"\w", line[match.start() - 1]):
                continue
            rest = line[match.end() :]
            if _CLASSES.match(rest.strip(" \t|")) is None:
                break
            words = rest.replace("|", " ").split()
            if any(_P2P.fullmatch(word) for word in words):
                return set()  # nvidia-smi topo -p2p: the same labels, another meaning
            taken = {number}
            # A terminal that wrapped the row left its end on the next line, without a label.
            while number + 1 in numbers and _goes_on(matrix, words, lines[number + 1]):
                number += 1
                taken.add(number)
                rest += " " + lines[number]
                words = rest.split()
            row = _row(matrix, match[0], rest, cut=number in stops, offset=match.start())
            if row is not None:
                row.line = min(taken) + 1
                matrix.rows.append(row)
                used |= taken
            break
    return used


def _goes_on(matrix: Matrix, words: Sequence[str], line: str) -> bool:
    """Whether `line` holds the cells, or the affinity columns, that the row with `words` still lacks."""
    more = line.split()
    if not more or len(words) > len(matrix.labels):
        return False
    if len(words) < len(matrix.labels):
        return _CLASSES.fullmatch(more[0]) is not None and "=" not in more[1:2]
    return len(more) == len(matrix.columns) and all(_AFFINITY.fullmatch(word) for word in more)


def _row(matrix: Matrix, label: str, rest: str, *, cut: bool, offset: int) -> Row | None:
    """Cells of the text after a row label; None when the X does not stand in the row's own column."""
    own = matrix.labels.index(label)
    exact = rest.lstrip().startswith("|")
    separator = "|" if exact else "\t"
    parts = rest.split(separator) if separator in rest else None
    if parts is not None and not parts[0].strip():
        parts = parts[1:]
    attempts = [parts, [part for part in parts if part.strip()]] if parts is not None else [rest.split()]
    for attempt in attempts:
        cells, tail = _device_cells(attempt or [], len(matrix.labels), placed=parts is not None)
        if own < len(cells) and cells[own] == "X" and cells.count("X") == 1:
            row = Row(label=label, line=0, cells=cells)
            if cut and not tail:
                row.uncertain_cell = max((number for number, cell in enumerate(cells) if cell), default=None)
            if label.startswith("GPU") and matrix.columns and None not in cells:
                blank = None if parts is not None else _cpu_cell_is_blank(label, rest, len(cells), offset)
                _tail(row, matrix.columns, tail, exact=exact, tabbed=parts is not None, blank=blank, cut=cut)
            return row
    return None


def _device_cells(parts: Sequence[str], count: int, *, placed: bool) -> tuple[list[str | None], list[str]]:
    """The first `count` cells (None where unknown, also where the row stops early), and what is left for the tail."""
    cells: list[str | None] = []
    sure: int | None = None  # cells before the first gap: behind it they may have moved
    left: list[str] = []
    for position, part in enumerate(parts):
        if len(cells) >= count:
            left = list(parts[position:])
            break
        words = part.split()
        read, rest = _classes(words)
        cells += read
        if rest is not None and len(cells) == count:
            left = [rest, *parts[position + 1 :]]
            break
        if rest is not None and (read or not placed or len(words) > 1 or rest[0].isdigit()):
            break  # from here on nothing has a place
        if not read:
            sure = len(cells) if sure is None else sure
            cells.append(None)  # empty or damaged, but in a place of its own
    if len(cells) > count or any(_classes(" ".join(left).split())[0]):
        return [None] * count, []  # more cells than the header has columns: no place is sure
    if sure is not None and len(cells) < count:
        return cells[:sure] + [None] * (count - sure), []
    return cells + [None] * (count - len(cells)), left


def _classes(words: Sequence[str]) -> tuple[list[str | None], str | None]:
    """The classes that `words` begin with, jammed and overprinted ones too, and the words left, None when none are."""
    cells: list[str | None] = []
    for place, word in enumerate(words):
        rest = " ".join(words[place:])
        if _CLASSES.fullmatch(word):
            cells += [_canonical(one) for one in _ONE_CLASS.findall(word)]
        elif (jammed := _WITH_TAIL.fullmatch(word)) is not None:
            # The last class and the CPU list were printed into one cell.
            end = _OVERPRINTED.get(jammed[2], jammed[2])
            cells += [_canonical(one) for one in [*_ONE_CLASS.findall(jammed[1]), end]]
            return cells, rest[len(word) - len(jammed[3]) :]
        else:
            return cells, rest
    return cells, None


def _canonical(word: str) -> str | None:
    if word in ("N/A", "ERR!"):
        return None
    return "SYS" if word == "SOC" else word  # SOC: the name before 2017


def _cpu_cell_is_blank(label: str, rest: str, count: int, offset: int) -> bool | None:
    """Whether the CPU cell is empty in a row whose tabs became blanks; None when it is not on nvidia-smi's grid."""
    text = label + rest
    words = [(match.start(), match[0]) for match in re.finditer(r"\S+", text)]
    on_grid = len(words) > count + 1 and all(
        start - _STOP * (number + 1) == (1 if word == "X" else 0)
        for number, (start, word) in enumerate(words[1 : count + 1])
    )
    if not on_grid or offset % _STOP:
        return None
    return words[count + 1][0] >= _STOP * (count + 2)


def _tail(
    row: Row,
    columns: tuple[Column, ...],
    tail: Sequence[str],
    *,
    exact: bool,
    tabbed: bool,
    blank: bool | None,
    cut: bool,
) -> None:
    """Assign the cells after the last device to the affinity columns, as far as their places are sure."""
    cells = [re.sub(r",\s+", ",", cell.strip()) for cell in tail]
    if cut and cells:
        row.uncertain_column = columns[min(sum(1 for cell in cells if cell), len(columns)) - 1]
        if not cells[-1]:
            cells.pop()  # an empty cell at the end of cut text may have had a value
            row.uncertain_column = None
    words = [word for cell in cells for word in cell.split()]
    values: dict[Column, str] = {}
    if exact and len(cells) >= len(columns):
        values = dict(zip(columns, cells, strict=False))
    elif len(words) == len(columns) and (cells[0] or columns[0] != "cpu"):
        values = dict(zip(columns, words, strict=True))
    elif columns[0] == "cpu" and cells and (tabbed or (blank is not None and words)):
        empty = not cells[0] if tabbed else bool(blank)
        left = words if empty else words[1:]
        if len(left) == len(columns) - 1:
            values = dict(zip(columns, [("" if empty else words[0]), *left], strict=True))
        elif empty or cut:
            # A CPU list with too few cells after it may be two cells in one (0-63 and 0 read 0-630): left out.
            values["cpu"] = "" if empty else words[0]
    row.tail = values
    if row.uncertain_column not in values:
        row.uncertain_column = None


def _describe(matrix: Matrix, lines: Sequence[str], numbers: range, header: int, stops: frozenset[int]) -> None:
    """NIC names from the legend, and what the prompt tells about the host."""
    for number in numbers:
        match = _NIC_NAME.search(lines[number])
        if (
            match
            and match[1] in matrix.labels
            and (number not in stops or _follows(matrix.nic_names, match[1], match[2]))
        ):
            matrix.nic_names[match[1]] = match[2]
    for number in range(header, numbers.start - 1 if numbers.start == 0 else max(numbers.start - 8, -1), -1):
        match = _PROMPT_HOST.search(lines[number])
        if match and matrix.hostname is None:
            matrix.hostname = match[1]
        matrix.windows = matrix.windows or re.match(r"\s*(?:PS\s+)?[A-Z]:\\", lines[number]) is not None


def _follows(names: dict[str, str], label: str, name: str) -> bool:
    """Whether `name` counts on from the NIC before it; then a text that stops here did not stop inside the name."""
    before = names.get(f"NIC{int(label[3:]) - 1}")
    match = re.fullmatch(r"(.*?)(\d+)", before or "")
    return match is not None and name == f"{match[1]}{int(match[2]) + 1}"


def _without_header(lines: Sequence[str], stops: frozenset[int]) -> Matrix | None:
    """A matrix whose header was cut off: the X of each row tells its column, if the columns are complete."""
    places: dict[int, str] = {}
    for line in lines:
        words = line.replace("|", " ").split()
        if len(words) > 1 and _ONE_LABEL.fullmatch(words[0]) and words.count("X") == 1:
            place = words.index("X") - 1
            if places.setdefault(place, words[0]) != words[0]:
                return None
    labels = tuple(places[place] for place in sorted(places))
    if (
        sorted(places) != list(range(len(places)))
        or len(labels) < 2
        or labels[0] != "GPU0"
        or len(set(labels)) < len(labels)
    ):
        return None
    matrix = Matrix(labels=labels, columns=(), header_line=None)
    return matrix if _fill(matrix, lines, range(len(lines)), stops) else None
