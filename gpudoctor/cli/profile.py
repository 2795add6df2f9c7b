"""`gpudoctor profile`: where the step time of an unedited command goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpudoctor.cli import options


def command(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="python train.py ..., torchrun ..., sh run.sh; SCRIPT.py is short for python SCRIPT.py.",
            show_default=False,
        ),
    ],
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=2, help="Watch N steps; with a GPU five more follow.")
    ] = 50,
    budget: Annotated[
        float, typer.Option("--budget", metavar="S", min=1, help="End the command after this many seconds.")
    ] = 120.0,
    step_at: options.StepAt = None,
    form: options.FormatOption = options.Format.HUMAN,
    json: options.Json = False,
    output: options.Out = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    fail_on: options.FailOnOption = None,
    require_gpu: options.RequireGpu = None,
    timeout: options.Timeout = 10.0,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Run a command unedited for N steps: what limits a step, what that can win, and what waits, by source line."""
    from gpudoctor.cli.output import Result, execute, interrupted, progress

    common = options.Common(
        form=form,
        json=json,
        output=output,
        select=select,
        ignore=ignore,
        fail_on=fail_on,
        require_gpu=require_gpu,
        timeout_s=timeout,
        quiet=quiet,
        verbose=verbose,
    )

    def body() -> Result:
        from gpudoctor.checkup import examine
        from gpudoctor.collect import collect_case
        from gpudoctor.tune.commands import as_command
        from gpudoctor.tune.profiling import profile

        with progress("profile", total=steps, quiet=quiet) as update:
            seen = profile(
                as_command(command),
                collect_case(timeout_s=timeout),
                cwd=Path.cwd(),
                steps=steps,
                budget_s=budget,
                step_at=step_at,
                on_progress=lambda done, total, seconds: update(done, total, f"{seconds:.0f} s"),
            )
        envelope = examine(
            seen.case,
            command="profile",
            select=select or (),
            ignore=ignore or (),
            fail_on=fail_on.value if fail_on else "never",
            require_gpu=require_gpu,
            measurements=seen.case.measurements,
            errors=(seen.error,) if seen.error else (),
            notes=seen.notes,
        )
        return Result(envelope=interrupted(envelope) if seen.interrupted else envelope)

    execute("profile", common, body)
