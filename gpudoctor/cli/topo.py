"""`gpudoctor topo`: the machine as a tree and as a matrix, with what is wrong in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpudoctor.cli import load, options, output
from gpudoctor.errors import GpudoctorError

if TYPE_CHECKING:
    from gpudoctor.model import Envelope
    from gpudoctor.report.text import Style


def command(
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Only the matrix, in the words of nvidia-smi topo -m.")
    ] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Plain lines in place of boxes; always so in a pipe.")] = False,
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FILE", help="Also write the picture as SVG, light and dark.")
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
    """The machine as a picture and as a matrix, with what is wrong in it.

    NUMA nodes, host bridges, switches, GPUs, NICs and drives of this machine, of a Case, or of pasted texts (--from):
    each link with what it does and could do, measured rates where the Case holds them, faults numbered as listed.
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
        envelope = load.examined(load.load(common), common, command="topo")
        if svg is not None:
            _write_svg(envelope, svg)
        return output.Result(envelope=envelope, human=lambda style: _human(envelope, style, matrix=matrix, tree=tree))

    output.execute("topo", common, body)


def _write_svg(envelope: Envelope, path: str) -> None:
    """The picture of the machine to a file. GpudoctorError when there are several, or it cannot be written."""
    from gpudoctor.report import render_svg, write_text

    cases = envelope.cases or ((envelope.case,) if envelope.case is not None else ())
    if len(cases) != 1:
        raise GpudoctorError(f"one machine makes one picture, these are {len(cases)}", "give the files of one machine")
    write_text(path, render_svg(cases[0], envelope.findings))


def _human(envelope: Envelope, style: Style, *, matrix: bool, tree: bool) -> str:
    from gpudoctor.report import render_topo
    from gpudoctor.report.human import header, summary_lines

    blocks: list[str] = []
    for case in envelope.cases or ((envelope.case,) if envelope.case is not None else ()):
        blocks.append("\n".join(header(case, style)))
        # one device has no pairs: its matrix is shown only to who asks for it
        kinds = [True] if matrix else [False, True] if len(case.gpus) + len(case.nics) > 1 else [False]
        for kind in kinds:
            picture = render_topo(
                case,
                matrix=kind,
                width=style.width,
                unicode=style.unicode,
                color=style.color,
                findings=envelope.findings if envelope.case is not None else (),
                boxes=style.width is not None and not tree,
            )
            blocks.append(picture.rstrip("\n"))
    boxed = style.width is not None and not tree and envelope.case is not None
    blocks.append("\n".join(summary_lines(envelope.findings, style, numbered=boxed)))
    return "\n\n".join(block for block in blocks if block) + "\n"
