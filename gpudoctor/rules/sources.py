"""Sites from source text as findings; shared by the rules that judge source facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gpudoctor.model import (
    Case,
    Evidence,
    Finding,
    Remedy,
    Rule,
    Severity,
    SourceFacts,
    SourceKind,
    SourceLoader,
    SourceSite,
)

NEEDS = ("watched|source",)  # a rule that judges both what was watched and what stands in the source
# What `gpudoctor tune` tries with an edit, in words.
_EDITS = {
    "device-accumulator": "add the value up on the device and read the sum once after the loop",
    "drop-call": "drop the call",
    "non-blocking": "non_blocking=True",
    "loader-arguments": "other loader arguments",
}


def sites(case: Case, *kinds: SourceKind) -> tuple[SourceSite, ...]:
    """The sites of these kinds, one a line and operation; nothing when no source was read."""
    return tuple(site for site in case.source.sites if site.kind in kinds) if case.source is not None else ()


def loaders(case: Case) -> tuple[SourceLoader, ...]:
    return case.source.loaders if case.source is not None else ()


def by_line(found: Sequence[SourceSite]) -> Iterator[tuple[SourceSite, ...]]:
    """Sites of one line together."""
    lines: dict[str, list[SourceSite]] = {}
    for site in found:
        lines.setdefault(site.site, []).append(site)
    yield from (tuple(group) for group in lines.values())


def source_finding(
    rule: Rule,
    site: SourceSite,
    message: str,
    remedies: Sequence[Remedy],
    *,
    severity: Severity | None = None,
    waits: bool = True,
    certain: bool = False,
) -> Finding:
    """A finding about one line, with why it is hot and why its value is on a GPU. No gain: source alone promises none.

    waits: the line makes the host wait; several rules may say so of one line, and it is one wait.
    """
    told = list(remedies)
    if site.edit is not None:
        what = _EDITS.get(site.edit, site.edit)
        told.append(
            Remedy(kind="measure", text=f"gpudoctor tune tries it on your command ({what}); gpudoctor patch writes it")
        )
    where = f" (cell {site.cell}, line {site.cell_line})" if site.cell is not None else ""
    return Finding(
        rule=rule.code,
        name=rule.name,
        severity=severity or rule.severity,
        subject=site.site,
        message=message + where,
        evidence=evidence_of(site),
        remedies=tuple(told),
        confidence="certain" if certain else "likely" if site.sure else "possible",
        symptoms=(f"{site.site}: the host waits for the GPU",) if waits else (),
    )


def evidence_of(site: SourceSite) -> tuple[Evidence, ...]:
    """The line, the loop with the calls that lead from it to the line, and what puts the value on the GPU."""
    found = [Evidence(fact="source", value=site.text, source=site.site)]
    if site.hot is not None:
        found.append(Evidence(fact="runs in each step", value=site.hot, source=site.hot_site))
    found += [_call(text) for text in site.chain]
    if site.device is not None:
        found.append(Evidence(fact="on the GPU", value=site.device, source=site.device_site))
    return tuple(found)


def _call(text: str) -> Evidence:
    where, _, what = text.partition(" ")
    return Evidence(fact="called by", value=what, source=where)


def loader_evidence(loader: SourceLoader) -> tuple[Evidence, ...]:
    found = [
        Evidence(fact="source", value=loader.text, source=loader.site),
        Evidence(fact="runs in each step", value=loader.hot, source=loader.hot_site),
    ]
    if loader.moved is not None:
        found.append(Evidence(fact="batches go to the GPU", value=loader.device or "copied", source=loader.moved))
    elif loader.device is not None:
        found.append(Evidence(fact="on the GPU", value=loader.device, source=loader.device_site))
    return tuple(found)


def loader_remedy() -> Remedy:
    return Remedy(
        kind="measure", text="gpudoctor tune tries loader arguments on your command; gpudoctor patch writes them"
    )


def loader_finding(rule: Rule, loader: SourceLoader, message: str, remedies: Sequence[Remedy]) -> Finding:
    where = f" (cell {loader.cell}, line {loader.cell_line})" if loader.cell is not None else ""
    return Finding(
        rule=rule.code,
        name=rule.name,
        severity=rule.severity,
        subject=loader.site,
        message=message + where,
        evidence=loader_evidence(loader),
        remedies=(*remedies, loader_remedy()),
        confidence="likely" if loader.sure else "possible",
    )


def torch_version(case: Case) -> tuple[int, int] | None:
    """Major and minor of the torch that the source is judged for; None when it is unknown."""
    text = (case.source.torch if case.source is not None else None) or case.software.torch or ""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def in_versions(case: Case, since: tuple[int, int] | None, until: tuple[int, int] | None) -> bool:
    """Whether the version lies in [since, until). An unknown version counts as a current one."""
    version = torch_version(case) or (99, 0)
    return (since is None or version >= since) and (until is None or version < until)


# for the examples of the rules


def example_case(*found: SourceSite, loaders: tuple[SourceLoader, ...] = (), torch: str | None = None) -> Case:
    return Case(source=SourceFacts(files=1, lines=30, sites=found, loaders=loaders, torch=torch))


def example_site(kind: SourceKind, operation: str, text: str, *, line: int = 21, **more: object) -> SourceSite:
    values: dict[str, object] = {
        "hot": "`for x, y in loader` is a training loop",
        "hot_site": "train.py:15",
        "device": "model.to(device)",
        "device_site": "train.py:5",
        **more,
    }
    return SourceSite(site=f"train.py:{line}", kind=kind, operation=operation, text=text, **values)  # type: ignore[arg-type]


def example_loader(**more: object) -> SourceLoader:
    values: dict[str, object] = {
        "site": "train.py:12",
        "text": "DataLoader(data, batch_size=64)",
        "hot": "`for x, y in loader` is a training loop",
        "hot_site": "train.py:15",
        "num_workers": 2,
        "pin_memory": False,
        "persistent_workers": True,
        "moved": "train.py:16",
        "device": "x.to(device)",
        "device_site": "train.py:16",
        "trains": True,
        **more,
    }
    return SourceLoader(**values)  # type: ignore[arg-type]
