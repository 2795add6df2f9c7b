"""SQLite exports of Nsight Systems (`nsys export --type sqlite`) into Recordings, one for each process.

The schema changes between versions and tables are made only when they have rows, so tables and columns are looked up
first (NVIDIA's "SQLite Export Schema Reference" of Nsight Systems is the guide). The numbers of copy and memory kinds
come from the file's own ENUM tables, else from CUPTI. Times are nanoseconds.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from gpudoctor.errors import GpudoctorError
from gpudoctor.read import kineto_names as names
from gpudoctor.read.recording import COPY, MEMSET, Mark, Recording, rounded_up

KIND = "nsys-sqlite"

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSETS = "CUPTI_ACTIVITY_KIND_MEMSET"
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_RANGES = "NVTX_EVENTS"
_ROWS = 20_000  # fetched at a time
_PUSH_POP, _START_END = 59, 60  # NVTX_EVENTS.eventType
# CUPTI's numbers, for exports without ENUM_CUDA_MEMCPY_OPER and ENUM_CUDA_MEM_KIND.
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_MEMORY_KINDS = {1: "Pageable", 2: "Pinned", 3: "Device", 5: "Managed"}
_LABELS = {"host-to-device": "HtoD", "device-to-host": "DtoH", "device-to-device": "DtoD", "peer-to-peer": "PtoP"}

_VERSION = re.compile(r"_v\d+$|_ptsz$|_ptds$")
_STEP = re.compile(
    r"(?:ProfilerStep#|(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?|batch)[ _:#=-]*)\d+", re.IGNORECASE
)
_STEP_WORD = re.compile(r"(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?)", re.IGNORECASE)
_LOADER = re.compile(r"data[ _-]?load|dataloader|load[ _-]?batch|next[ _-]?batch|get[ _-]?batch", re.IGNORECASE)


def read_nsys(path: Path, *, name: str) -> list[tuple[Recording, int | None]]:
    """(Recording of a process, device) for each device that a process used, processes in the order of their number.

    GpudoctorError when it is no SQLite database, a damaged one, or no export of Nsight Systems.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            return _Export(connection, name).recordings()
    except sqlite3.Error as error:
        raise GpudoctorError(
            f"cannot read {name}: {' '.join(str(error).split())}", "export the report again: nsys export --type sqlite"
        ) from None


class _Export:
    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self._columns = {
            str(table): [str(row[1]) for row in connection.execute(f"PRAGMA table_info({_quoted(str(table))})")]
            for (table,) in rows
        }
        if not any(table in self._columns for table in (_KERNELS, _COPIES, _MEMSETS, _CALLS, _RANGES)):
            raise GpudoctorError(
                f"{name} is a SQLite database, but no export of Nsight Systems: it has no CUPTI or NVTX table",
                "nsys export --type sqlite REPORT.nsys-rep",
            )
        self._strings: dict[int, str] = {}
        self._copy_kinds = self._enum("ENUM_CUDA_MEMCPY_OPER", _COPY_KINDS)
        self._memory_kinds = self._enum("ENUM_CUDA_MEM_KIND", _MEMORY_KINDS)
        self._kinds = names.Kinds()
        self._call_kinds = names.Calls()

    def recordings(self) -> list[tuple[Recording, int | None]]:
        found: list[tuple[Recording, int | None]] = []
        for process in self._processes():
            recording = Recording(base_ns=self._session_start())
            self._kernels(recording, process)
            self._copied(recording, process)
            self._memsets(recording, process)
            self._called(recording, process)
            self._ranges(recording, process)
            self._devices(recording, process)
            devices: Sequence[int | None] = sorted(set(recording.activities.ints("device").tolist())) or [None]
            if recording.events:
                found += [(recording, device) for device in devices]
        if not found:
            raise GpudoctorError(f"{self._name} is an export without events", "profile with --trace=cuda,nvtx")
        return found

    def _has(self, table: str, *columns: str) -> bool:
        return all(column in self._columns.get(table, ()) for column in columns)

    def _rows(self, table: str, wanted: Sequence[str], process: int | None, owner: str) -> Iterator[list[Any]]:
        """Blocks of rows with the wanted columns (NULL for one that the table lacks), of one process."""
        have = self._columns.get(table)
        if have is None or not {"start", "end"} <= set(have):
            return
        fields = ", ".join(_quoted(column) if column in have else "NULL" for column in wanted)
        query = f"SELECT {fields} FROM {_quoted(table)} WHERE start IS NOT NULL"  # noqa: S608 - names come from the schema
        arguments: tuple[int, ...] = ()
        if process is not None and owner in have:
            query += f" AND ({_quoted(owner)} >> 24) & 16777215 = ?"
            arguments = (process,)
        cursor = self._connection.execute(query, arguments)
        while rows := cursor.fetchmany(_ROWS):
            yield rows

    def _processes(self) -> list[int | None]:
        """Process numbers that own device work or calls; [None] where no table tells the process."""
        found: set[int] = set()
        for table, owner in ((_KERNELS, "globalPid"), (_COPIES, "globalPid"), (_CALLS, "globalTid")):
            if self._has(table, owner):
                query = f"SELECT DISTINCT ({owner} >> 24) & 16777215 FROM {table} WHERE {owner} IS NOT NULL"  # noqa: S608
                found |= {int(row[0]) for row in self._connection.execute(query)}
        known: list[int | None] = [*sorted(found)]
        return known or [None]

    def _string(self, number: object) -> str:
        if isinstance(number, str):
            return number
        if not isinstance(number, int):
            return ""
        if number not in self._strings:
            row = None
            if self._has("StringIds", "id", "value"):
                row = self._connection.execute("SELECT value FROM StringIds WHERE id = ?", (number,)).fetchone()
            self._strings[number] = str(row[0]) if row else ""
        return self._strings[number]

    def _enum(self, table: str, known: dict[int, str]) -> dict[int, str]:
        """The words of an ENUM table by number."""
        column = next((name for name in ("label", "name") if self._has(table, "id", name)), None)
        if column is None:
            return known
        words = self._connection.execute(f"SELECT id, {column} FROM {table}").fetchall()  # noqa: S608
        return {int(number): _LABELS.get(str(word).lower(), str(word)) for number, word in words if number is not None}

    def _add(self, recording: Recording, rows: Sequence[Any], kind: list[int], names_: list[str]) -> None:
        """Rows of (start, end, correlation, stream, device, bytes); rows without an end are cut off and left out."""
        kept = [place for place, row in enumerate(rows) if isinstance(row[1], int) and row[1] >= row[0]]
        ids = recording.names
        recording.events += len(rows)
        recording.not_understood += len(rows) - len(kept)
        recording.activities.add(
            start=[rows[place][0] for place in kept],
            end=[rows[place][1] for place in kept],
            correlation=[_number(rows[place][2]) for place in kept],
            stream=[_number(rows[place][3]) for place in kept],
            device=[_number(rows[place][4]) for place in kept],
            bytes=[_number(rows[place][5]) for place in kept],
            name=[ids[names_[place]] for place in kept],
            kind=[kind[place] for place in kept],
        )

    def _kernels(self, recording: Recording, process: int | None) -> None:
        have = self._columns.get(_KERNELS, ())
        column = next((name for name in ("demangledName", "shortName", "mangledName", "name") if name in have), "name")
        wanted = ("start", "end", "correlationId", "streamId", "deviceId", "bytes", column)
        for rows in self._rows(_KERNELS, wanted, process, "globalPid"):
            words = [self._string(row[6]) for row in rows]
            self._add(recording, rows, [self._kinds[word] for word in words], words)

    def _copied(self, recording: Recording, process: int | None) -> None:
        wanted = ("start", "end", "correlationId", "streamId", "deviceId", "bytes", "copyKind", "srcKind", "dstKind")
        for rows in self._rows(_COPIES, wanted, process, "globalPid"):
            self._add(recording, rows, [COPY] * len(rows), [self._copy_name(row) for row in rows])

    def _copy_name(self, row: Sequence[Any]) -> str:
        """As kineto writes it: Memcpy HtoD (Pageable -> Device)."""
        kind = self._copy_kinds.get(_number(row[6]), "Unknown")
        source, target = (self._memory_kinds.get(_number(row[place]), "Unknown") for place in (7, 8))
        return f"Memcpy {kind} ({source} -> {target})"

    def _memsets(self, recording: Recording, process: int | None) -> None:
        wanted = ("start", "end", "correlationId", "streamId", "deviceId", "bytes")
        for rows in self._rows(_MEMSETS, wanted, process, "globalPid"):
            self._add(recording, rows, [MEMSET] * len(rows), ["Memset (Device)"] * len(rows))

    def _called(self, recording: Recording, process: int | None) -> None:
        wanted = ("start", "end", "correlationId", "globalTid", "nameId")
        for rows in self._rows(_CALLS, wanted, process, "globalTid"):
            recording.events += len(rows)
            words = [_VERSION.sub("", self._string(row[4])) for row in rows]
            kinds = [self._call_kinds[word] for word in words]
            for kind, table in ((names.LAUNCH, recording.launches), (names.CALL, recording.launches)):
                chosen = [row for row, own in zip(rows, kinds, strict=True) if own == kind]
                table.add(start=[row[0] for row in chosen], correlation=[_number(row[2]) for row in chosen])
            calls = [
                (row, word)
                for row, word, kind in zip(rows, words, kinds, strict=True)
                if kind == names.CALL and isinstance(row[1], int)
            ]
            recording.calls.add(
                start=[row[0] for row, _ in calls],
                end=[row[1] for row, _ in calls],
                correlation=[_number(row[2]) for row, _ in calls],
                thread=[_number(row[3]) & 0x7FFF for row, _ in calls],
                name=[recording.names[word] for _, word in calls],
            )

    def _ranges(self, recording: Recording, process: int | None) -> None:
        import numpy as np

        wanted = ("start", "end", "globalTid", "text", "textId", "eventType")
        steps: dict[str, list[Mark]] = {}
        for rows in self._rows(_RANGES, wanted, process, "globalTid"):
            recording.events += len(rows)
            kept = []
            for row in rows:
                ranged = row[5] in (None, _PUSH_POP, _START_END) and isinstance(row[1], int) and row[1] >= row[0]
                word = self._string(row[3]) or self._string(row[4])
                if not ranged or not word:
                    continue
                mark = Mark(name=word, start=row[0], end=row[1])
                if _STEP.fullmatch(word):
                    steps.setdefault("numbered", []).append(mark)
                elif _STEP_WORD.fullmatch(word):
                    steps.setdefault(word, []).append(mark)
                elif word.startswith("Optimizer.step#"):
                    recording.optimizer_steps.append(mark)
                else:
                    if _LOADER.search(word):
                        recording.loader_waits.append(mark)
                    kept.append((row, word))
            recording.operators.add(
                start=[row[0] for row, _ in kept],
                length=rounded_up(np.array([row[1] - row[0] for row, _ in kept], dtype=np.int64)),
                thread=[_number(row[2]) & 0x7FFF for row, _ in kept],
                name=[recording.names[word] for _, word in kept],
            )
        # One family of ranges marks the steps: numbered ones, else the word that occurs most.
        recording.steps = steps.pop("numbered", []) or max(steps.values(), key=len, default=[])

    def _devices(self, recording: Recording, process: int | None) -> None:
        names_: dict[int, str] = {}
        if self._has("TARGET_INFO_GPU", "id", "name"):
            names_ = {
                int(number): str(word)[:200]
                for number, word in self._connection.execute("SELECT id, name FROM TARGET_INFO_GPU")
                if number is not None and word
            }
        if self._has("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid"):
            query = "SELECT cudaId, gpuId FROM TARGET_INFO_CUDA_DEVICE WHERE pid = ? OR ? IS NULL"
            mapped = dict(self._connection.execute(query, (process, process)).fetchall())
            if mapped:
                names_ = {int(cuda): names_[gpu] for cuda, gpu in mapped.items() if gpu in names_}
        recording.device_names = names_

    def _session_start(self) -> int:
        table = "TARGET_INFO_SESSION_START_TIME"
        if self._has(table, "utcEpochNs"):
            row = self._connection.execute(f"SELECT utcEpochNs FROM {table}").fetchone()  # noqa: S608
            if row and isinstance(row[0], int):
                return row[0]
        return 0


def _number(value: object) -> int:
    return value if isinstance(value, int) and -(2**31) <= value < 2**62 else -1


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
