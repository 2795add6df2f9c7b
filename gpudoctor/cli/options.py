"""The options that commands share, as types for their signatures, and `Common`, which carries their values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gpudoctor.report import Form


class Format(StrEnum):
    HUMAN = "human"
    JSON = "json"
    JUNIT = "junit"
    MARKDOWN = "markdown"
    SARIF = "sarif"
    GITHUB = "github"


class FailOn(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"
    NEVER = "never"


From = Annotated[
    list[str] | None,
    typer.Option(
        "--from", metavar="PATH", help="A Case or an artifact in place of this machine; repeatable; - is stdin."
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="Format of the result on stdout.")]
Json = Annotated[bool, typer.Option("--json", help="Short for --format json.")]
Out = Annotated[
    list[str] | None,
    typer.Option("-o", "--output", metavar="FILE", help="Also write FILE: .json .sarif .xml (JUnit) .md; repeatable."),
]
Select = Annotated[
    list[str] | None, typer.Option("--select", metavar="CODE", help="Only these rules: code, family or name.")
]
Ignore = Annotated[list[str] | None, typer.Option("--ignore", metavar="CODE", help="Not these rules.")]
FailOnOption = Annotated[
    FailOn | None, typer.Option("--fail-on", help="Exit with 1 for findings from this severity on.")
]
RequireGpu = Annotated[
    int | None, typer.Option("--require-gpu", metavar="N", min=1, help="Exit with 1 when fewer than N GPUs answer.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="S", min=0.1, help="Seconds that a probe of the machine may take.")
]
StepAt = Annotated[
    str | None,
    typer.Option("--step-at", metavar="FILE:LINE", help="The line that makes one step, where counting goes wrong."),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No notes and no progress.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="All evidence, all sites, all rules.")]


# These exit with 0 when they did their job, whatever the findings, unless --fail-on is given.
_JOBS = frozenset({"tune", "tune-loader", "profile", "patch", "launch", "capture", "explain"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Values of the common options; `fail_on` None leaves it to the command, see `threshold`."""

    source: list[str] | None = None
    form: Format = Format.HUMAN
    json: bool = False
    output: list[str] | None = None
    select: list[str] | None = None
    ignore: list[str] | None = None
    fail_on: FailOn | None = None
    require_gpu: int | None = None
    timeout_s: float = 10.0
    quiet: bool = False
    verbose: bool = False

    @property
    def wanted(self) -> Form:
        """The format of stdout."""
        return "json" if self.json else self.form.value

    def threshold(self, command: str) -> str:
        """The severity from which findings fail this command."""
        if self.fail_on is not None:
            return self.fail_on.value
        return "never" if command in _JOBS else "error"

    @property
    def level(self) -> int:
        """-1 quiet, 0, 1 verbose."""
        return int(self.verbose) - int(self.quiet)
