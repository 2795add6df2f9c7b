"""`gpudoctor tune`: the closed loop on the user's own command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudoctor.cli import options

if TYPE_CHECKING:
    from gpudoctor.model import ChangeClass

# On the bundled example the whole tune stays under 90 s on 2 busy cores.
EXAMPLE_BUDGET_S = 80.0
BUDGET_S = 600.0
MOST_RANKS = 1024


def command(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]",
            help="python train.py ..., torchrun ..., sh run.sh; SCRIPT.py is short for python SCRIPT.py. "
            "Without a command: the bundled example.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the files go; default: gpudoctor-out/.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into an --out that exists.")] = False,
    budget: Annotated[
        float | None, typer.Option("--budget", metavar="S", min=10, help="Seconds for all runs; default 600.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", min=2, help="Steps of every run.")] = None,
    step_at: options.StepAt = None,
    allow: Annotated[
        str | None,
        typer.Option("--allow", metavar="CLASSES", help="Also try changes of these classes: logging,numerics."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Use the trials of the tune in --out again where nothing has changed.")
    ] = False,
    nproc: Annotated[
        str | None,
        typer.Option(
            "--nproc", metavar="N[,N...]", help="First a table of the rate by ranks; changes are tried at the largest."
        ),
    ] = None,
    allow_writes: Annotated[
        bool, typer.Option("--allow-writes", help="Let trials write the command's files where no overlay is possible.")
    ] = False,
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
    """Try changes on your own training command, keep what gains, and prove it."""
    from gpudoctor.cli.output import Result, execute, interrupted_exit_code, progress

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
        import dataclasses
        import time

        from gpudoctor.collect import collect_case
        from gpudoctor.errors import EXIT_INTERRUPTED
        from gpudoctor.examples import copy_example
        from gpudoctor.tune import outputs
        from gpudoctor.tune.commands import as_command
        from gpudoctor.tune.rank_commands import with_ranks
        from gpudoctor.tune.session import Options, tune

        classes, counts = _classes(allow), _counts(nproc)
        words = as_command(command) if command else None
        if words is not None:
            for count in counts:
                with_ranks(words, count)  # refused before anything is made
        cwd = Path.cwd()
        folder = outputs.latest(out, below=cwd) if resume else outputs.choose(out, force=force, below=cwd)
        folder = folder.absolute()
        if words is None:
            cwd, words = copy_example(folder)
        chosen = Options(
            command=tuple(words),
            cwd=cwd.resolve(),
            out=folder,
            budget_s=budget or (BUDGET_S if command else EXAMPLE_BUDGET_S),
            steps=steps,
            step_at=step_at,
            allow=classes,
            allow_writes=allow_writes,
            nproc=counts,
            resume=resume,
            select=tuple(select or ()),
            ignore=tuple(ignore or ()),
            fail_on=fail_on.value if fail_on else "never",
            require_gpu=require_gpu,
        )
        begun = time.monotonic()  # looking at the machine counts as well
        with progress("tune", quiet=quiet) as update:
            done = 0

            def stage(text: str) -> None:
                nonlocal done
                done += 1
                update(done, None, text)

            machine = collect_case(timeout_s=timeout)
            envelope = tune(chosen, machine, begun=begun, on_stage=stage)
        if envelope.exit_code == EXIT_INTERRUPTED:
            envelope = dataclasses.replace(envelope, exit_code=interrupted_exit_code())
        return Result(envelope=envelope)

    execute("tune", common, body)


def _counts(nproc: str | None) -> tuple[int, ...]:
    from gpudoctor.errors import GpudoctorError

    words = (nproc or "").replace(",", " ").split()
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= MOST_RANKS for word in words):
        raise GpudoctorError(f"--nproc: {nproc!r} is no list of counts", "give numbers of ranks such as 1,2,4,8")
    if nproc is not None and not words:
        raise GpudoctorError("--nproc: no count was given", "give numbers of ranks such as 1,2,4,8")
    return tuple(sorted({int(word) for word in words}))


def _classes(allow: str | None) -> frozenset[ChangeClass]:
    from gpudoctor.errors import GpudoctorError
    from gpudoctor.model import CHANGE_CLASSES

    wanted = {"exact", "stochastic"}
    for word in (allow or "").replace(",", " ").split():
        if word not in CHANGE_CLASSES:
            raise GpudoctorError(
                f"--allow: {word!r} is no class of changes", f"the classes are {', '.join(CHANGE_CLASSES)}"
            )
        wanted.add(word)
    return frozenset(name for name in CHANGE_CLASSES if name in wanted)
