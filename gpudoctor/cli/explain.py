"""`gpudoctor explain`: what a rule means, why it costs, how it knows, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpudoctor.cli import load, options, output

if TYPE_CHECKING:
    from gpudoctor.report.text import Style


def command(
    rule: Annotated[str, typer.Argument(metavar="CODE|NAME", help="A rule, such as PCI001.")],
    source: options.From = None,
    json: options.Json = False,
) -> None:
    """What a rule means, why it costs, how it knows, what to do.

    With --from FILE also what the rule says about that machine.
    """
    common = options.Common(source=source, json=json, select=[rule], fail_on=options.FailOn.NEVER)

    def body() -> output.Result:
        from gpudoctor.rules import find_rule, rule_documentation

        module = find_rule(rule)
        text = rule_documentation(module)
        loaded = load.load(common) if source else load.Loaded(cases=())
        envelope = load.examined(loaded, common, command="explain", notes=(text,) if json else ())

        def human(style: Style) -> str:
            from gpudoctor.report.human import finding_lines

            found = "\n".join(finding_lines(envelope.findings, style))
            if source and not found:
                reasons = [item.reason for item in envelope.not_checked]
                found = (
                    f" not checked: {style.text('; '.join(reasons))}" if reasons else " nothing found on this machine"
                )
            return f"{text.rstrip()}\n" + (f"\n{found}\n" if found else "")

        return output.Result(envelope=envelope, human=human)

    output.execute("explain", common, body)
