"""`gpudoctor sync`: host-device synchronisation and copies that run in each step, from source text."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudoctor.cli import options, output
from gpudoctor.errors import GpudoctorError

if TYPE_CHECKING:
    from gpudoctor.model import Envelope, Finding
    from gpudoctor.source import Scanned, Suppression

_VERSION = re.compile(r"\d+\.\d+")
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@")


def command(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Scripts, notebooks and folders.")],
    torch: Annotated[
        str | None,
        typer.Option("--torch", metavar="VERSION", help="The torch that the code runs with; default: installed."),
    ] = None,
    diff: Annotated[
        str | None, typer.Option("--diff", metavar="BASE", help="Only lines that changed since this git revision.")
    ] = None,
    form: options.FormatOption = options.Format.HUMAN,
    json: options.Json = False,
    out: options.Out = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    fail_on: options.FailOnOption = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Find lines that make the host wait for the GPU in each step, in source text.

    The code is read, never imported or run. `# gpudoctor: ignore[SYN001]` silences a line.
    """
    common = options.Common(
        form=form, json=json, output=out, select=select, ignore=ignore, fail_on=fail_on, quiet=quiet, verbose=verbose
    )
    output.execute("sync", common, lambda: _run(common, paths, torch, diff))


def _run(common: options.Common, paths: Sequence[str], torch: str | None, base: str | None) -> output.Result:
    from gpudoctor import checkup
    from gpudoctor.model import Case, Software
    from gpudoctor.source import scan

    if torch is not None and not _VERSION.match(torch):
        raise GpudoctorError(f"--torch {torch!r} is no version", "for example: --torch 2.4")
    select = _select(common)
    changed = _changed(base) if base is not None else None
    version, origin = (torch, "--torch") if torch is not None else (_installed(), "the installed package")
    scanned = scan(paths, torch=version, torch_from=origin if version else None, on_progress=_progress(common))
    case = Case(source=scanned.facts, software=Software(torch=version))
    envelope = checkup.examine(
        case,
        command="sync",
        select=select,
        ignore=common.ignore or (),
        fail_on=common.threshold("sync"),
        errors=scanned.errors,
    )
    return output.Result(envelope=_kept(envelope, scanned, changed, common))


def _select(common: options.Common) -> Sequence[str]:
    """The rules that judge source, unless some are chosen."""
    from gpudoctor import rules

    if common.select:
        return common.select
    return [
        module.RULE.code
        for module in rules.all_rules()
        if any("source" in need.split("|") for need in module.RULE.needs)
    ]


def _installed() -> str | None:
    """The version of torch beside gpudoctor; torch itself is not imported."""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _progress(common: options.Common) -> Callable[[int, int], None] | None:
    if common.level < 0 or not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        if total > 200 and (done % 50 == 0 or done == total):
            sys.stderr.write(f"\r{done} of {total} files" + ("\n" if done == total else ""))
            sys.stderr.flush()

    return show


def _kept(
    envelope: Envelope, scanned: Scanned, changed: dict[str, set[int]] | None, common: options.Common
) -> Envelope:
    """Without the findings that a comment silences, and without those on lines that did not change."""
    import dataclasses

    from gpudoctor.checkup import outcome

    ranges = _ranges(scanned)
    used: set[Suppression] = set()
    comments: dict[tuple[str, int], Suppression] = {(item.file, item.line): item for item in scanned.suppressions}
    kept = []
    for finding in envelope.findings:
        silencing = _silencing(finding, ranges, comments)
        if silencing is not None:
            used.add(silencing)
        elif changed is None or _is_changed(finding, ranges, changed):
            kept.append(finding)
    notes = list(envelope.notes)
    if not common.select and not common.ignore:
        notes += [
            f"{item.file}:{item.line}: this comment silences nothing ({', '.join(item.codes or ('any rule',))})"
            for item in scanned.suppressions
            if item.ours and item not in used
        ]
    if used:
        notes.append(f"{len(used)} comment{'s' if len(used) > 1 else ''} silenced findings")
    status, exit_code = outcome(kept, envelope.errors, common.threshold("sync"))
    return dataclasses.replace(envelope, findings=tuple(kept), notes=tuple(notes), status=status, exit_code=exit_code)


def _ranges(scanned: Scanned) -> dict[str, tuple[int, int]]:
    """The first and last line of the statement of each site."""
    found: dict[str, tuple[int, int]] = {}
    lines: list[tuple[str, int | None, int | None]] = [
        *((item.site, item.first_line, item.last_line) for item in scanned.facts.sites),
        *((item.site, item.first_line, item.last_line) for item in scanned.facts.loaders),
    ]
    for site, begins, ends in lines:
        line = _place(site)[1]
        first, last = found.get(site, (line, line))
        found[site] = (min(first, begins or line), max(last, ends or line))
    return found


def _place(subject: str) -> tuple[str, int]:
    file, _, line = subject.rpartition(":")
    return file, int(line) if line.isdigit() else 0


def _silencing(
    finding: Finding, ranges: dict[str, tuple[int, int]], comments: dict[tuple[str, int], Suppression]
) -> Suppression | None:
    file, line = _place(finding.subject)
    first, last = ranges.get(finding.subject, (line, line))
    for number in range(first, last + 1):
        comment = comments.get((file, number))
        if comment is not None and (comment.codes is None or finding.rule in comment.codes):
            return comment
    return None


def _is_changed(finding: Finding, ranges: dict[str, tuple[int, int]], changed: dict[str, set[int]]) -> bool:
    file, line = _place(finding.subject)
    first, last = ranges.get(finding.subject, (line, line))
    lines = changed.get(str(Path(file).absolute()))
    return lines is not None and (not lines or any(number in lines for number in range(first, last + 1)))


def _changed(base: str) -> dict[str, set[int]]:
    """Changed lines by absolute path since a git revision; an empty set: the whole file is new."""
    if base.startswith("-"):
        raise GpudoctorError(f"--diff {base!r} is no git revision", "for example: --diff origin/main")
    top = Path(_git("rev-parse", "--show-toplevel").strip())
    text = _git(
        "diff",
        "--unified=0",
        "--no-color",
        "--no-ext-diff",
        "--no-renames",
        "--src-prefix=a/",
        "--dst-prefix=b/",
        base,
        "--",
    )
    found: dict[str, set[int]] = {}
    lines: set[int] = set()
    for line in text.split("\n"):
        if line.startswith("+++ "):
            name = line[4:].removeprefix("b/").rstrip("\t")
            lines = found.setdefault(str(top / _unquoted(name)), set())
        elif (hunk := _HUNK.match(line)) is not None:
            start, count = int(hunk[1]), int(hunk[2] or "1")
            lines.update(range(start, start + count) or (-1,))
    for name in _git("ls-files", "--others", "--exclude-standard", "--full-name", "-z", str(top)).split("\0"):
        if name:
            found[str(top / name)] = set()
    return found


def _unquoted(name: str) -> str:
    """git quotes names with unusual characters like C."""
    if not name.startswith('"'):
        return name
    return name[1:-1].encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, errors="surrogateescape", check=False, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise GpudoctorError(f"cannot run git: {reason}", "--diff needs git") from None
    if done.returncode:
        reason = " ".join(done.stderr.split())[:200]
        raise GpudoctorError(f"git {arguments[0]} failed: {reason}", "--diff BASE takes a revision of this repository")
    return done.stdout
