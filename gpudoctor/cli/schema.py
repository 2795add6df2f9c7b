"""`gpudoctor schema`: the JSON Schema of what commands print."""

from __future__ import annotations

import typer

from gpudoctor.cli import output


def command() -> None:
    """Print the JSON Schema of the envelope that every command writes with --json."""
    from gpudoctor.codec import schema

    raise typer.Exit(output.document(schema()))
