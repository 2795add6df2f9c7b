"""`gpudoctor read`: a checkup on files, with what each of them is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpudoctor.cli import load, options, output
from gpudoctor.errors import GpudoctorError

if TYPE_CHECKING:
    from gpudoctor.report.text import Style


def command(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files and folders to read; - is stdin.")],
    compare: Annotated[
        bool, typer.Option("--compare", help="Two traces, or two folders of traces, side by side.")
    ] = False,
    form: options.FormatOption = options.Format.HUMAN,
    json: options.Json = False,
    out: options.Out = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    fail_on: options.FailOnOption = None,
    require_gpu: options.RequireGpu = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Read files that you have: what each is, what it says, what is wrong.

    Case files that gpudoctor wrote, the text of `nvidia-smi topo -m`, profiler traces (torch.profiler, SQLite exports
    of nsys). Files of one machine make one Case, and so do the traces of one job.
    """
    common = options.Common(
        form=form,
        json=json,
        output=out,
        select=select,
        ignore=ignore,
        fail_on=fail_on,
        require_gpu=require_gpu,
        quiet=quiet,
        verbose=verbose,
    )
    output.execute("read", common, lambda: _compared(common, files) if compare else _examined(common, files))


def _examined(common: options.Common, files: list[str]) -> output.Result:
    return output.Result(envelope=load.examined(load.load(common, files), common, command="read"))


def _compared(common: options.Common, files: list[str]) -> output.Result:
    """The envelope holds both as Cases; people get the table."""
    import dataclasses

    if len(files) != 2 or "-" in files:
        raise GpudoctorError(
            "--compare takes two traces or two folders of traces", "gpudoctor read BEFORE AFTER --compare"
        )
    before, after = (load.load(common, [file]) for file in files)
    for file, loaded in zip(files, (before, after), strict=True):
        if sum(1 for case in loaded.cases if case.traces) != 1:
            reason = loaded.errors[0] if loaded.errors else "it must hold the trace or traces of one job"
            raise GpudoctorError(f"cannot compare {file}: {reason}", "gpudoctor read BEFORE AFTER --compare")
    loaded = dataclasses.replace(
        before,
        cases=tuple(case for side in (before, after) for case in side.cases if case.traces),
        artifacts=(*before.artifacts, *after.artifacts),
        errors=(*before.errors, *after.errors),
    )
    envelope = load.examined(loaded, common, command="read")

    def human(style: Style) -> str:
        from gpudoctor.report.trace_compare import compare

        return compare(loaded.cases[0].traces, loaded.cases[1].traces, style)

    return output.Result(envelope=envelope, human=human)
