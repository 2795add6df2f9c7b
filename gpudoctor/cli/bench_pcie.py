"""`gpudoctor bench-pcie`: copies of the GPUs, measured and judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpudoctor.cli import load, options, output
from gpudoctor.errors import GpudoctorError

if TYPE_CHECKING:
    from gpudoctor.model import Case, Measurement


class Engine(StrEnum):
    AUTO = "auto"
    CUDA = "cuda"
    TORCH = "torch"


def command(
    gpu: Annotated[
        list[int] | None, typer.Option("--gpu", "-i", metavar="INDEX", help="Only this GPU; repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About 3 s per GPU: no pageable copies, no pairs.")] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also rate by size and every pair of GPUs at once; longer.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="METRIC", help="Only this copy of single GPUs (h2d, d2d, ...); repeatable."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="S", min=0.1, help="Copying time per GPU.")
    ] = None,
    engine: Annotated[
        Engine, typer.Option("--engine", help="How CUDA is called: cuda-bindings or torch; auto: the lightest.")
    ] = Engine.AUTO,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="FILE", help="Output of nvbandwidth or another tool, to set beside."),
    ] = None,
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
    """Copies between host and GPUs: alone, both ways, inside the GPU, all at once, per NUMA node, GPU to GPU.

    Median, spread, and the links as they were during the copies; each figure is judged against one with a source.
    GPUs on which another process runs are left alone. With --from the measurements that a Case or another tool's
    output holds are judged again.
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
        if quick and thorough:
            raise GpudoctorError("--quick and --thorough exclude each other", "give one of them, or none")
        if not source:
            from gpudoctor.measure import bench_copies  # while NVML is being asked
        loaded = load.load(common)
        case = load.only_case(loaded)
        others = _others(compare or ())
        if not loaded.live:
            if not case.measurements:
                raise GpudoctorError(
                    "a recorded machine cannot be loaded, and this one holds no measurements",
                    "run `gpudoctor bench-pcie -o case.json` on that machine",
                )
            case = dataclasses.replace(case, measurements=compared(case.measurements, others))
            return output.Result(envelope=load.examined(loaded, common, command="bench-pcie", case=case))
        with output.progress("copies", quiet=quiet) as update:
            result = bench_copies(
                case,
                level="quick" if quick else "thorough" if thorough else "default",
                seconds_per_gpu=seconds,
                allow_busy=allow_busy,
                indices=gpu or None,
                only=only or None,
                engine=None if engine is Engine.AUTO else engine.value,
                deadline_s=timeout,
                on_progress=update,
            )
        envelope = load.examined(
            loaded,
            common,
            command="bench-pcie",
            case=result.case,
            measurements=compared(result.measurements, others),
            errors=result.errors,
            notes=result.notes,
        )
        return output.Result(envelope=output.interrupted(envelope) if result.interrupted else envelope)

    output.execute("bench-pcie", common, body)


def _others(paths: Sequence[str]) -> tuple[tuple[str, Case], ...]:
    """The Cases of the files to compare with. GpudoctorError for a file without measurements."""
    from gpudoctor.read import read_artifacts

    found = []
    for path in paths:
        result = read_artifacts([path])
        if not any(case.measurements for case in result.cases):
            reason = result.errors[0] if result.errors else f"{path!r} holds no copy rates"
            raise GpudoctorError(reason, "give the output of nvbandwidth, bandwidthTest or gpudoctor bench-pcie")
        found += [(path, case) for case in result.cases]
    return tuple(found)


def compared(ours: Sequence[Measurement], others: Sequence[tuple[str, Case]]) -> tuple[Measurement, ...]:
    """Our figures, each with a note and two settings about the same metric and subject in the others' output."""
    result = []
    for item in ours:
        for path, case in others:
            key = (item.metric, item.subject, item.unit)
            for other in [one for one in case.measurements if (one.metric, one.subject, one.unit) == key][:1]:
                ratio = item.value / other.value - 1 if other.value else 0.0
                text = f"{path} says {other.value:.4g} {other.unit}: this is {ratio:+.1%}"
                item = dataclasses.replace(
                    item,
                    notes=(*item.notes, text),
                    settings={**item.settings, "compared_with": path, "compared_value": other.value},
                )
        result.append(item)
    return tuple(result)
