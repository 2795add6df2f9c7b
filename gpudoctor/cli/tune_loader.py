"""`gpudoctor tune-loader`: the best DataLoader settings for a script or a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudoctor.cli import options

if TYPE_CHECKING:
    from gpudoctor.model import LoaderStudy
    from gpudoctor.tune.loader.session import Session


def command(
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET | -- COMMAND...",
            help="SCRIPT.py, file.py:callable or module:callable (gives a Dataset or a DataLoader), or -- COMMAND.",
            show_default=False,
        ),
    ],
    budget: Annotated[
        float,
        typer.Option("--budget", metavar="S", min=5, help="Seconds for all trials; the start is extra."),
    ] = 60.0,
    step_ms: Annotated[
        float | None,
        typer.Option("--step-ms", metavar="MS", min=0.001, help="Time of a training step without its loader wait."),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, max=64, help="Loaders of N local ranks at once (callables).")
    ] = 1,
    loader: Annotated[
        str | None,
        typer.Option("--loader", metavar="FILE:LINE", help="The line that makes the loader, where there are several."),
    ] = None,
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FILE", help="Also write the curve as SVG, light and dark.")
    ] = None,
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
    """Find the best DataLoader settings by short trials over your own dataset, and say what limits it."""
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
        from gpudoctor.collect import collect_case
        from gpudoctor.errors import GpudoctorError
        from gpudoctor.tune.loader import result, targets
        from gpudoctor.tune.loader.session import Options, Session

        cwd = Path.cwd().resolve()
        chosen = Options(
            target=targets.parse(target, cwd=cwd),
            cwd=cwd,
            budget_s=budget,
            step_ms=step_ms,
            ranks=ranks,
            site=loader,
        )
        if ranks > 1 and not chosen.target.is_callable:
            raise GpudoctorError(
                "--ranks is for file.py:callable and module:callable targets",
                "start several ranks of a script with its own launcher: -- torchrun --nproc-per-node N train.py",
            )
        with progress("tune-loader", quiet=quiet) as update:
            done = 0

            def stage(text: str) -> None:
                nonlocal done
                done += 1
                update(done, None, text)

            session = Session(options=chosen, machine=collect_case(timeout_s=timeout), on_stage=stage)
            study = session.run()
        if svg is not None and study is not None:
            _write_svg(study, svg, session)
        envelope = result.envelope(
            study,
            session.machine,
            cwd=cwd,
            select=select or (),
            ignore=ignore or (),
            fail_on=fail_on.value if fail_on else "never",
            require_gpu=require_gpu,
            errors=session.errors,
            notes=session.notes,
        )
        return Result(envelope=interrupted(envelope) if session.interrupted else envelope)

    execute("tune-loader", common, body)


def _write_svg(study: LoaderStudy, path: str, session: Session) -> None:
    """The curve to a file. What was measured is told all the same where there is no curve, or no such folder."""
    from gpudoctor.errors import GpudoctorError
    from gpudoctor.report import render_loader_svg, write_text

    try:
        write_text(path, render_loader_svg(study))
    except ValueError as error:
        session.notes.append(f"there is no curve to write to {path}: {error}")
    except GpudoctorError as error:
        session.errors.append(str(error))
