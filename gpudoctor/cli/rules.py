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
    rows = [(r.code, r.name, r.severity) for r in rules]
    lines = style.table(rows)
    wide = [f"{line}  {', '.join(r.needs)}" for line, r in zip(lines, rules, strict=True)]
    if style.width is None or max(map(len, wide), default=0) <= style.width:
        lines = wide
    output.write("\n".join(lines) + "\n")
