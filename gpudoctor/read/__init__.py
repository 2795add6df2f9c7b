"""Artifacts in, Cases out: what people already have becomes the same facts that live probes give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, TextIO

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Artifact, Case
from gpudoctor.read import case, smi_topo
from gpudoctor.read.files import load, one_line
from gpudoctor.read.sniff import UNDERSTOOD, identify

__all__ = ["ReadResult", "identify", "read_artifacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """`errors` has one line for each input that could not be (wholly) read; the others are read all the same."""

    cases: tuple[Case, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    errors: tuple[str, ...] = ()


def read_artifacts(paths: Sequence[str], stdin: TextIO | BinaryIO | None = None) -> ReadResult:
    """Read files ("-" is `stdin`) of any kind that gpudoctor understands.

    Topology texts of one machine (same GPUs and NICs, no contradiction) become one Case; everything else stays apart,
    in the order of the inputs. Never raises for a bad input: it becomes a line in `errors`.
    """
    found: list[Case | smi_topo.Topology] = []
    artifacts: list[Artifact] = []
    errors: list[str] = []
    for path in paths:
        try:
            text, warning = load(path, stdin)
        except GpudoctorError as error:
            errors.append(str(error))
            continue
        if warning:
            errors.append(warning)
        name = "stdin" if path == "-" else path
        kind = identify(text, name)
        lines, not_understood, truncated = text.count("\n") + (not text.endswith("\n")), 0, False
        if kind == case.KIND:
            try:
                found += case.read_cases(text, one_line(name))
            except GpudoctorError as error:
                errors.append(str(error))
                not_understood = lines
        elif kind == smi_topo.KIND:
            topologies, lines, not_understood = smi_topo.read_topologies(text, name)
            truncated = any(topology.truncated for topology in topologies)
            for topology in topologies:
                _add(found, topology)
        else:
            errors.append(f"cannot tell what {one_line(name)} is: understood are {UNDERSTOOD}")
            not_understood = lines
        artifacts.append(
            Artifact(file=name, kind=kind, lines=lines, lines_not_understood=not_understood, truncated=truncated)
        )
    cases = tuple(item if isinstance(item, Case) else smi_topo.build_case(item) for item in found)
    return ReadResult(cases=cases, artifacts=tuple(artifacts), errors=tuple(errors))


def _add(found: list[Case | smi_topo.Topology], topology: smi_topo.Topology) -> None:
    """Merge a topology into the first one that may be of the same machine, or keep it apart."""
    for place, known in enumerate(found):
        if isinstance(known, smi_topo.Topology) and smi_topo.same_machine(known, topology):
            found[place] = smi_topo.merge(known, topology)
            return
    found.append(topology)
