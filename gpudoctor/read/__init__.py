"""Artifacts in, Cases out: what people already have becomes the same facts that live probes give."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Artifact, Case
from gpudoctor.read import case, kineto, smi_topo, texts, traces
from gpudoctor.read.files import load, one_line
from gpudoctor.read.parts import Part, merge_parts
from gpudoctor.read.sniff import UNDERSTOOD, identify

__all__ = ["ReadResult", "identify", "read_artifacts"]

_MOST_FILES = 4096  # of one folder
_HEAD = 256 * 1024  # characters that tell what standard input is


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """`errors` has one line for each input that could not be (wholly) read; the others are read all the same."""

    cases: tuple[Case, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    errors: tuple[str, ...] = ()


def read_artifacts(paths: Sequence[str], stdin: TextIO | BinaryIO | None = None) -> ReadResult:
    """Read files ("-" is `stdin`), and the files of folders, of any kind that gpudoctor understands.

    Texts of one machine (same GPUs, no contradiction) become one Case, and so do the traces of one job; Cases of
    gpudoctor stay apart and come first, the traces last. Never raises for a bad input: it
    becomes a line in `errors`. In a folder, files of unknown kinds are listed and passed over.
    """
    cases: list[Case] = []
    topologies: list[smi_topo.Topology] = []
    parts: list[Part] = []
    artifacts: list[Artifact] = []
    errors: list[str] = []
    trace_files: list[Path] = []
    trace_stdin: BinaryIO | None = None
    paths, inside = _with_folders(paths, errors)
    for path in paths:
        if path != "-" and traces.sniff(path) is not None:
            trace_files.append(Path(path))
            continue
        try:
            text, warning = load(path, stdin)
        except GpudoctorError as error:
            if path in inside:
                artifacts.append(Artifact(file=path, kind="unknown", lines=0))
            else:
                errors.append(str(error))
            continue
        if path == "-" and traces.identify_trace(text[:_HEAD].encode()) == kineto.KIND:
            trace_stdin = io.BytesIO(text.encode())
            continue
        if warning:
            errors.append(warning)
        name = "stdin" if path == "-" else path
        kind = identify(text, name)
        lines, not_understood, truncated = text.count("\n") + (not text.endswith("\n")), 0, False
        if kind == case.KIND:
            try:
                cases += case.read_cases(text, one_line(name))
            except GpudoctorError as error:
                errors.append(str(error))
                not_understood = lines
        elif kind == smi_topo.KIND:
            seen, lines, not_understood = smi_topo.read_topologies(text, name)
            truncated = any(topology.truncated for topology in seen)
            for topology in seen:
                _add(topologies, topology)
        elif (read := texts.read(kind, text, name)) is not None:
            parts += read.parts
            lines, not_understood, truncated = read.lines, read.not_understood, read.truncated
        else:
            if path not in inside:
                errors.append(f"cannot tell what {one_line(name)} is: understood are {UNDERSTOOD}")
            not_understood = lines
        artifacts.append(
            Artifact(file=name, kind=kind, lines=lines, lines_not_understood=not_understood, truncated=truncated)
        )
    cases += merge_parts([*(_part(topology) for topology in topologies), *parts])
    if trace_files or trace_stdin is not None:
        jobs = traces.read_traces(trace_files, trace_stdin)
        cases += [traces.trace_case(job) for job in jobs.jobs]
        artifacts += jobs.artifacts
        errors += jobs.errors
    return ReadResult(cases=tuple(cases), artifacts=tuple(artifacts), errors=tuple(errors))


def _with_folders(paths: Sequence[str], errors: list[str]) -> tuple[list[str], set[str]]:
    """The paths with each folder replaced by the files in it, and which of them came from a folder."""
    found: list[str] = []
    inside: set[str] = set()
    named = set(paths)
    for path in paths:
        try:
            folder = path != "-" and Path(path).is_dir()
            files = sorted(str(file) for file in Path(path).iterdir() if _is_listed(file)) if folder else [path]
            files = [file for file in files if not folder or file not in named]
        except (OSError, ValueError) as error:
            errors.append(f"cannot read {one_line(path)}: {getattr(error, 'strerror', None) or error}")
            continue
        if folder and not files:
            found.append(path)  # its reader says that it is empty
        if len(files) > _MOST_FILES:
            errors.append(f"{one_line(path)} has {len(files)} files: only the first {_MOST_FILES} were read")
        found += files[:_MOST_FILES]
        inside |= set(files) if folder else set()
    return found, inside


def _is_listed(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".")


def _add(found: list[smi_topo.Topology], topology: smi_topo.Topology) -> None:
    """Merge a topology into the first one that may be of the same machine, or keep it apart."""
    for place, known in enumerate(found):
        if smi_topo.same_machine(known, topology):
            found[place] = smi_topo.merge(known, topology)
            return
    found.append(topology)


def _part(topology: smi_topo.Topology) -> Part:
    return Part(case=smi_topo.build_case(topology), complete=not topology.truncated, matrix=True)
