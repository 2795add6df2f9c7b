"""Builds the command line and runs it. Each command lives in its own file and imports its work when it runs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from gpudoctor.cli import (
    bench_pcie,
    capture,
    checkup,
    explain,
    launch,
    options,
    output,
    patch,
    profile,
    read,
    rules,
    schema,
    sync,
    topo,
    tune,
    tune_loader,
)
from gpudoctor.errors import EXIT_OK, EXIT_USAGE, GpudoctorError

# Sections of --help would need rich: plain help starts faster. Errors are worded here, not by typer.
app = typer.Typer(
    name="gpudoctor",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def bare(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    source: options.From = None,
    form: options.FormatOption = options.Format.HUMAN,
    json: options.Json = False,
    out: options.Out = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    fail_on: options.FailOnOption = None,
    require_gpu: options.RequireGpu = None,
    timeout: options.Timeout = 10.0,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Find why GPUs are slow, and prove the fix on your own script.

    Without a command: a checkup of this machine in about a second, which loads nothing and changes nothing.
    Options stand after the command.
    """
    if version:
        from gpudoctor import __version__

        output.write(f"gpudoctor {__version__}\n")
        raise typer.Exit(EXIT_OK)
    common = options.Common(
        source=source,
        form=form,
        json=json,
        output=out,
        select=select,
        ignore=ignore,
        fail_on=fail_on,
        require_gpu=require_gpu,
        timeout_s=timeout,
        quiet=quiet,
        verbose=verbose,
    )
    if context.invoked_subcommand is None:
        checkup.run(common)
    elif common != options.Common():
        raise GpudoctorError(
            "options stand after the command", f"for example: gpudoctor {context.invoked_subcommand} --json"
        )


# One line each in `gpudoctor --help`; the docstring of the command is its own help.
for _name, _command, _line in (
    ("checkup", checkup.command, "Health check for CI: findings, exit code, JUnit."),
    ("topo", topo.command, "The machine as a tree and as a matrix."),
    ("bench-pcie", bench_pcie.command, "Host-device copies, measured and judged."),
    ("tune", tune.command, "Speed up your training command, proven."),
    ("tune-loader", tune_loader.command, "The best DataLoader settings, by short trials."),
    ("profile", profile.command, "Where the step time of a command goes."),
    ("sync", sync.command, "Waits and copies in each step, from source."),
    ("launch", launch.command, "Print a launch script for a command."),
    ("patch", patch.command, "The changes that tune kept, as a diff."),
    ("read", read.command, "Checkup on files that you have."),
    ("capture", capture.command, "A redacted Case to attach to an issue."),
    ("explain", explain.command, "What a rule means and what to do."),
    ("rules", rules.command, "List the rules."),
    ("schema", schema.command, "The JSON Schema of the output."),
):
    app.command(name=_name, short_help=_line)(_command)


def run(argv: list[str] | None = None) -> int:
    """Run one command line (default: sys.argv) and give the exit code; never raises for what a user can do wrong."""
    restore = output.install_sigterm()
    try:
        code = app(args=sys.argv[1:] if argv is None else argv, prog_name="gpudoctor", standalone_mode=False)
        return code if isinstance(code, int) else EXIT_OK
    except SystemExit as end:  # typer's own way out when help goes into a closed pipe
        output.quiet_stdout()
        return EXIT_OK if end.code in (None, 0, 1) else EXIT_USAGE
    except BrokenPipeError:
        output.quiet_stdout()
        return EXIT_OK
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - the last stop before the user
        message, hint, exit_code = _usage(error) or output.describe(error)
        output.say_error(message, hint)
        return exit_code
    finally:
        restore()


def _usage(error: BaseException) -> tuple[str, str | None, int] | None:
    """A usage error that typer raised. Its classes move between versions, so it is known by its public methods."""
    reader: Any = getattr(error, "format_message", None)
    if reader is None:
        return None
    text = " ".join(str(reader()).split()).rstrip(".").replace("Value error, ", "")  # pydantic's words
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "gpudoctor"
    hint = f"see `{path} --help`"
    if path in ("gpudoctor tune", "gpudoctor profile", "gpudoctor launch") and text.startswith("No such option"):
        hint += f"; options of your own command stand after --: {path} -- python train.py --epochs 3"
    return text[:1].lower() + text[1:], hint, EXIT_USAGE
