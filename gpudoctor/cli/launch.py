"""`gpudoctor launch`: the launch configuration for a command on this machine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from gpudoctor.cli import load, options, output
from gpudoctor.errors import GpudoctorError

if TYPE_CHECKING:
    from gpudoctor.model import LaunchConfig


def command(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="Your training command.", show_default=False),
    ] = None,
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
    """Print a launch script for a command: ranks, CPUs, environment, each line with its reason.

    gpudoctor launch -- python train.py --epochs 3 > launch.sh. With --from the script is for that machine; a
    case.json that tune wrote brings its own command.
    """
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

    def body() -> output.Result:
        recorded = None if command else _recorded(source)
        if not command and recorded is None:
            raise GpudoctorError("there is no command to launch", "for example: gpudoctor launch -- python train.py")
        from gpudoctor.model import Prescription
        from gpudoctor.prescribe.launch import launch_config, render

        loaded = load.load(common)
        case = load.only_case(loaded)
        envelope = load.examined(loaded, common, command="launch")
        config = recorded or launch_config(case, command or [], findings=envelope.findings)
        envelope = dataclasses.replace(envelope, prescription=Prescription(launch=config))
        return output.Result(envelope=envelope, human=lambda _style: render(config))

    output.execute("launch", common, body)


def _recorded(source: list[str] | None) -> LaunchConfig | None:
    """The launch configuration that an envelope of --from holds."""
    for path in source or ():
        envelope = load.envelope(path)
        if envelope is not None and envelope.prescription is not None and envelope.prescription.launch is not None:
            return envelope.prescription.launch
    return None
