"""The tokenizers library tells that it was forked after use.

What it means
    A fast tokenizer ran in the parent with its threads before the loader forked its workers. It turns its threads off
    in the children, to be safe, and says so once a worker.
Why it costs
    Nothing but lines in the log; tokenising in a worker runs with one thread, as everything does there
    (https://github.com/huggingface/transformers/issues/5486).
How we know
    The message stands in the log. It tells of no deadlock: it says that one is avoided.
Fix
    TOKENIZERS_PARALLELISM=false; or tokenise before training; or make the tokenizer in the worker.
When to ignore
    Always, but for the noise.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, LoaderFault, Remedy, Rule
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.studies import case_of, faults

RULE = Rule(code="LDR014", name="tokenizers-fork-notice", severity="info", needs=("loader",), since="0.2")


def check(case: Case) -> Iterator[Finding]:
    study = case.loader
    assert study is not None  # `needs`
    for fault in [item for item in faults(study) if item.kind == "tokenizers"][:1]:
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject=fault.site or study.site,
            message="a tokenizer was used before the workers were forked: it turned its threads off in them",
            evidence=(evidence(case, "loader.faults", fault.text, "no message"),),
            remedies=(
                Remedy(kind="env", text="TOKENIZERS_PARALLELISM=false", undo="unset it"),
                Remedy(kind="code", text="tokenise before training, or make the tokenizer in the worker"),
            ),
            confidence="certain",
        )


EXAMPLES = (
    Example(
        name="its words",
        kind="fires",
        case=case_of(faults=(LoaderFault(kind="tokenizers", text="The current process just got forked", site="a:1"),)),
        subjects=("a:1",),
    ),
    Example(name="nothing said", kind="quiet", case=case_of()),
    Example(name="no loader was studied", kind="lacks", case=Case()),
)
