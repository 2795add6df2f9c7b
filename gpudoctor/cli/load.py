"""Where a command gets its Cases: this machine, or what --from names."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpudoctor.cli.options import Common
from gpudoctor.errors import GpudoctorError

if TYPE_CHECKING:
    from gpudoctor.model import Artifact, Case, Envelope, Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    cases: tuple[Case, ...]
    artifacts: tuple[Artifact, ...] = ()
    errors: tuple[str, ...] = ()
    live: bool = False


def load(common: Common, paths: list[str] | None = None) -> Loaded:
    """The Cases of --from (or of `paths`), else this machine. GpudoctorError when nothing at all could be read."""
    paths = [*(paths or ()), *(common.source or ())]
    if not paths:
        from gpudoctor.collect import collect_case
        from gpudoctor.rules import all_rules

        all_rules()  # needed in any case; NVML is being asked meanwhile
        return Loaded(cases=(collect_case(timeout_s=common.timeout_s),), live=True)
    from gpudoctor.read import read_artifacts

    stdin = sys.stdin.buffer if "-" in paths else None
    result = read_artifacts(paths, stdin)
    return Loaded(cases=result.cases, artifacts=result.artifacts, errors=result.errors)


def only_case(loaded: Loaded) -> Case:
    """The one Case that a command can work on. GpudoctorError when there are none or several."""
    if not loaded.cases:
        reason = loaded.errors[0] if loaded.errors else "nothing that could be read"
        raise GpudoctorError(f"there is no machine to look at: {reason}", "give a file that `gpudoctor capture` wrote")
    if len(loaded.cases) > 1:
        raise GpudoctorError(
            f"the files come from {len(loaded.cases)} machines, this command takes one", "give the files of one machine"
        )
    return loaded.cases[0]


def examined(
    loaded: Loaded,
    common: Common,
    *,
    command: str,
    case: Case | None = None,
    measurements: tuple[Measurement, ...] = (),
    errors: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Envelope:
    """The envelope of what was loaded, judged with the common options; `case` stands in for the loaded one."""
    from gpudoctor.checkup import examine_all

    return examine_all(
        loaded.cases if case is None else (case,),
        command=command,
        select=common.select or (),
        ignore=common.ignore or (),
        fail_on=common.threshold(command),
        require_gpu=common.require_gpu,
        artifacts=loaded.artifacts,
        measurements=measurements,
        errors=(*loaded.errors, *errors),
        notes=notes,
    )


def envelope(path: str) -> Envelope | None:
    """The envelope in a file, or None when the file is a bare Case or an artifact. GpudoctorError when unreadable."""
    from pathlib import Path

    from gpudoctor import codec
    from gpudoctor.model import Envelope

    try:
        text = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise GpudoctorError(f"cannot read {path!r}: {reason}", "give a file that gpudoctor wrote") from None
    if b'"schema"' not in text:
        return None
    return codec.decode(text, Envelope, what=path)
