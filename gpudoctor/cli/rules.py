"""`gpudoctor rules`: the catalogue of rules."""

from __future__ import annotations

import typer

from gpudoctor.cli import options, output


def command(json: options.Json = False) -> None:
    """List the rules: code, name, severity, the facts they need."""
    from gpudoctor.rules import all_rules

    rules = [module.RULE for module in all_rules()]
    if json:
        from gpudoctor import __version__
        from gpudoctor.model import SCHEMA

        entries = [
            {"code": r.code, "name": r.name, "severity": r.severity, "needs": list(r.needs), "since": r.since}
            for r in rules
        ]
        head = {"schema": SCHEMA, "version": __version__, "command": "rules", "status": "clean", "exit_code": 0}
        raise typer.Exit(output.document({**head, "rules": entries, "errors": []}))
    import sys

    style = output.style(sys.stdout)
    lines = style.table([(r.code, r.name, r.severity, ", ".join(r.needs)) for r in rules])
    if style.width is not None and max(map(len, lines), default=0) > style.width:
        lines = style.table([(r.code, r.name, r.severity) for r in rules])
    output.write("\n".join(lines) + "\n")
