"""One renderer per format; they get the envelope and nothing else, and let nothing from outside act on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from gpudoctor import codec
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Envelope, LoaderStudy
from gpudoctor.report.text import Style
from gpudoctor.report.topo import render_svg, render_topo

Form = Literal["human", "json", "markdown", "junit", "sarif", "github"]
SUFFIXES: dict[str, Form] = {".json": "json", ".xml": "junit", ".md": "markdown", ".sarif": "sarif"}

__all__ = [
    "SUFFIXES",
    "Form",
    "form_of",
    "render",
    "render_loader_svg",
    "render_svg",
    "render_topo",
    "write_files",
    "write_text",
]


def render(
    envelope: Envelope,
    form: Form,
    *,
    width: int | None = None,
    unicode: bool = True,
    color: bool = False,
    fail_on: str = "error",
    verbose: int = 0,
) -> str:
    """The envelope as text, with a final newline.

    width: columns to fold at, None for never. unicode: False keeps human text in ASCII. color: ANSI colours.
    fail_on: the severity from which a finding is a JUnit failure. verbose: -1 quiet, 1 all evidence.
    """
    if form == "json":
        return codec.encode_envelope(envelope) + "\n"
    if form == "junit":
        from gpudoctor.report.junit import render_junit

        return render_junit(envelope, fail_on=fail_on)
    if form == "sarif":
        from gpudoctor.report.sarif import render_sarif

        return render_sarif(envelope)
    if form == "github":
        from gpudoctor.report.github import render_github

        return render_github(envelope)
    if form == "markdown":
        from gpudoctor.report.markdown import render_markdown

        return render_markdown(envelope)
    if envelope.command == "sync":
        from gpudoctor.report.source import render_source

        return render_source(envelope, Style(width=width, unicode=unicode, color=color, verbose=verbose))
    from gpudoctor.report.human import render_human

    return render_human(envelope, Style(width=width, unicode=unicode, color=color, verbose=verbose))


def render_loader_svg(study: LoaderStudy) -> str:
    """The curve of a loader study as SVG; ValueError when no trial gave a rate."""
    from gpudoctor.report import loader_svg

    return loader_svg.render_loader_svg(study)


def form_of(path: str) -> Form:
    """The format of an output file by its suffix; GpudoctorError (usage) for a suffix that has no format."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        known = " ".join(sorted(SUFFIXES))
        raise GpudoctorError(f"cannot write {path!r}: no format has the suffix {suffix!r}", f"known suffixes: {known}")
    return SUFFIXES[suffix]


def write_files(envelope: Envelope, paths: Iterable[str], *, fail_on: str = "error") -> None:
    """Write each file in the format of its suffix; GpudoctorError names the file that could not be written."""
    for path in paths:
        write_text(path, render(envelope, form_of(path), fail_on=fail_on))


def write_text(path: str, text: str) -> None:
    """GpudoctorError names the file that could not be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise GpudoctorError(f"cannot write {path!r}: {reason}", "give a path in a folder that exists") from None
