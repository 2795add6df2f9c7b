"""`gpudoctor` and `gpudoctor checkup`: what is wrong with this machine."""

from __future__ import annotations

from typing import NoReturn

from gpudoctor.cli import load, options, output


def command(
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
    """Health check of this machine for CI: findings, exit code, JUnit.

    Nothing is loaded and nothing is changed. Exit code 0: nothing at or above --fail-on (default: error);
    1: findings, or --require-gpu not met; 2: something could not be read or done.
    """
    run(
        options.Common(
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
    )


def run(common: options.Common) -> NoReturn:
    """Look, judge, print."""
    output.execute(
        "checkup",
        common,
        lambda: output.Result(envelope=load.examined(load.load(common), common, command="checkup")),
    )
