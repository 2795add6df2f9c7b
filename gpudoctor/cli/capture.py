"""`gpudoctor capture`: a redacted Case to attach to an issue."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from gpudoctor.cli import load, options, output
from gpudoctor.errors import GpudoctorError


def command(
    out: Annotated[
        list[str] | None, typer.Option("-o", "--output", metavar="FILE", help="Write FILE.json in place of stdout.")
    ] = None,
    source: options.From = None,
    timeout: options.Timeout = 10.0,
    quiet: options.Quiet = False,
) -> None:
    """Write what is known of this machine as JSON, without names, serials and addresses.

    The file can be read on any machine: gpudoctor checkup --from FILE.
    """
    form = options.Format.HUMAN if out else options.Format.JSON
    common = options.Common(source=source, output=out, form=form, timeout_s=timeout, quiet=quiet)

    def body() -> output.Result:
        from gpudoctor.checkup import examine_all
        from gpudoctor.redact import redact_case

        for path in out or ():
            if not path.lower().endswith(".json"):
                raise GpudoctorError(f"cannot write {path!r}: a capture is JSON", "give a file that ends in .json")
        loaded = load.load(common)
        if not loaded.cases:
            load.only_case(loaded)
        # judged after redaction, so that no message repeats what was taken out
        cases = [redact_case(case) for case in loaded.cases]
        notes = [f"look into {path} before you share it" for path in out or ()]
        envelope = examine_all(cases, command="capture", fail_on="never", errors=loaded.errors)
        envelope = dataclasses.replace(envelope, notes=(*envelope.notes, *notes))
        return output.Result(envelope=envelope, human=lambda _style: "")

    output.execute("capture", common, body)
