"""`gpudoctor patch`: the prescribed source changes of one script as a diff."""

from __future__ import annotations

import dataclasses
import io
import os
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudoctor.cli import load, options, output
from gpudoctor.errors import GpudoctorError

if TYPE_CHECKING:
    from gpudoctor.model import Change, Envelope
    from gpudoctor.report.text import Style

_DEFAULT = "gpudoctor-out/case.json"


def command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to patch.")],
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the change; the reverse diff is saved beside it.")
    ] = False,
    revert: Annotated[bool, typer.Option("--revert", help="Take back what --apply wrote.")] = False,
    source: Annotated[
        str | None, typer.Option("--from", metavar="PATH", help=f"What tune wrote; default {_DEFAULT}.")
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show the changes that tune kept for a script, as a diff for git apply and patch -p1.

    Nothing is written without --apply.
    """
    common = options.Common(json=json, quiet=quiet)

    def body() -> output.Result:
        if apply and revert:
            raise GpudoctorError("--apply and --revert exclude each other", "give one of them")
        if revert:
            return _revert(script)
        return _patch(script, source or _DEFAULT, apply=apply, given=source is not None)

    output.execute("patch", common, body)


def reverse_path(script: str) -> Path:
    """Where the reverse diff of a script is kept."""
    return Path(f"{script}.gpudoctor-reverse.patch")


def _patch(script: str, source: str, *, apply: bool, given: bool) -> output.Result:
    from gpudoctor.prescribe.disk import apply_to_disk, unified_diff
    from gpudoctor.prescribe.patch import apply_edits

    if not given and not Path(source).exists():
        raise GpudoctorError(
            f"there is no prescription: {source} does not exist", "run `gpudoctor tune` first, or give --from case.json"
        )
    told = load.envelope(source)
    if told is None or told.prescription is None:
        raise GpudoctorError(f"{source} holds no prescription", "give a case.json that `gpudoctor tune` wrote")
    file = _below_cwd(script)
    old = _text(script)
    kept = [change for change in told.prescription.changes if change.kept and _is_about(change, script, told)]
    # the sites may be named from another folder: they are this script's all the same
    edits = [
        dataclasses.replace(edit, site=f"{file}:{edit.site.rpartition(':')[2]}")
        for change in kept
        for edit in change.edits
    ]
    if not edits:
        note = f"no change of {script} is prescribed in {source}"
        return output.Result(envelope=_envelope(note), human=lambda _style: "")
    reverse = reverse_path(script)
    if reverse.exists():
        note = f"{script} is patched already; gpudoctor patch {script} --revert takes it back"
        return output.Result(envelope=_envelope(note, kept), human=lambda _style: "")
    done = apply_edits(old, edits, file=file)
    errors = [f"{edit.site}: {edit.kind} cannot be applied: {reason}" for edit, reason in done.refused]
    diff = unified_diff(file, old, done.text)
    note = ""
    if apply and diff and not errors:
        apply_to_disk(Path.cwd(), {file: (old, done.text)}, reverse)
        note = f"{script} was changed; gpudoctor patch {script} --revert takes it back ({reverse})"
    return output.Result(envelope=_envelope(note, kept, errors), human=lambda style: _shown(diff, style))


def _shown(diff: str, style: Style) -> str:
    """The diff byte for byte for git apply; on a terminal without what the source may hold against it."""
    if style.width is None:
        return diff
    return "".join(style.text(line.rstrip("\r")).replace("\\t", "\t") + "\n" for line in diff.split("\n")[:-1])


def _revert(script: str) -> output.Result:
    from gpudoctor.prescribe.disk import revert

    reverse = reverse_path(script)
    if not reverse.exists():
        raise GpudoctorError(f"there is nothing to take back: {reverse} does not exist", "only --apply writes it")
    revert(reverse)
    reverse.unlink()
    return output.Result(envelope=_envelope(f"{script} is as it was before --apply"), human=lambda _style: "")


def _below_cwd(script: str) -> str:
    """The path that a diff can name: relative to this folder."""
    path = Path(script).absolute()
    cwd = Path.cwd()
    if not path.is_relative_to(cwd):
        raise GpudoctorError(f"{script!r} does not lie below this folder", "run patch in the folder of the script")
    return os.path.normpath(path.relative_to(cwd).as_posix())


def _text(script: str) -> str:
    """The source with its line ends and byte order mark, in the encoding that it declares."""
    try:
        raw = Path(script).read_bytes()
        encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
        return raw.decode("utf-8" if encoding == "utf-8-sig" else encoding)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise GpudoctorError(f"cannot read {script!r}: {reason}", "give the path of the script") from None
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise GpudoctorError(f"cannot read {script!r}: {error}", "the encoding of the script must be right") from None


def _is_about(change: Change, script: str, told: Envelope) -> bool:
    """Sites are relative to the folder where the tuned command ran."""
    file = change.site.rpartition(":")[0]
    if os.path.normpath(file) == os.path.normpath(script):
        return True
    watched = told.case.watched if told.case is not None else None
    return watched is not None and (Path(watched.cwd) / file).resolve() == Path(script).resolve()


def _envelope(note: str, kept: list[Change] | None = None, errors: list[str] | None = None) -> Envelope:
    from gpudoctor import __version__
    from gpudoctor.errors import EXIT_OK, EXIT_USAGE
    from gpudoctor.model import Envelope, Prescription

    return Envelope(
        version=__version__,
        command="patch",
        status="failed" if errors else "clean",
        exit_code=EXIT_USAGE if errors else EXIT_OK,
        prescription=Prescription(changes=tuple(kept or ())),
        errors=tuple(errors or ()),
        notes=(note,) if note else (),
    )
