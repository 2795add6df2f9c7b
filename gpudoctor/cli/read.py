"""`gpudoctor read`: a checkup on files, with what each of them is."""

from __future__ import annotations

from typing import Annotated

import typer

from gpudoctor.cli import load, options, output


def command(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files to read; - is stdin.")],
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

    Case files that gpudoctor wrote, and the text of `nvidia-smi topo -m`. Files of one machine make one Case.
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
    output.execute(
        "read",
        common,
        lambda: output.Result(envelope=load.examined(load.load(common, files), common, command="read")),
    )
