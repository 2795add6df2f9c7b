"""`gpudoctor bench-pcie`: host-device copies, measured and judged."""

from __future__ import annotations

from typing import Annotated

import typer

from gpudoctor.cli import load, options, output
from gpudoctor.errors import GpudoctorError


def command(
    gpu: Annotated[
        list[int] | None, typer.Option("--gpu", "-i", metavar="INDEX", help="Only this GPU; repeatable.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", min=0.1, help="Copying time per GPU.")] = 3.0,
    allow_busy: Annotated[
        bool, typer.Option("--allow-busy", help="Also load GPUs on which other processes run.")
    ] = False,
    source: options.From = None,
    form: options.FormatOption = options.Format.HUMAN,
    json: options.Json = False,
    out: options.Out = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    fail_on: options.FailOnOption = None,
    require_gpu: options.RequireGpu = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1, help="Seconds that one GPU may take.")
    ] = 60.0,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Copies between host and GPU: pinned and pageable, both directions.

    Median, spread and the link as it was during the copy. GPUs on which another process runs are left alone. With
    --from the measurements that a Case holds are judged again.
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
        timeout_s=10.0,
        quiet=quiet,
        verbose=verbose,
    )

    def body() -> output.Result:
        loaded = load.load(common)
        case = load.only_case(loaded)
        if not loaded.live:
            if not case.measurements:
                raise GpudoctorError(
                    "a recorded machine cannot be loaded, and this one holds no measurements",
                    "run `gpudoctor bench-pcie -o case.json` on that machine",
                )
            return output.Result(envelope=load.examined(loaded, common, command="bench-pcie"))
        from gpudoctor.measure import bench_copies

        with output.progress("copies", quiet=quiet) as update:
            result = bench_copies(
                case,
                seconds_per_gpu=seconds,
                allow_busy=allow_busy,
                indices=gpu or None,
                deadline_s=timeout,
                on_progress=update,
            )
        envelope = load.examined(
            loaded,
            common,
            command="bench-pcie",
            case=result.case,
            measurements=result.measurements,
            errors=result.errors,
            notes=result.notes,
        )
        return output.Result(envelope=output.interrupted(envelope) if result.interrupted else envelope)

    output.execute("bench-pcie", common, body)
