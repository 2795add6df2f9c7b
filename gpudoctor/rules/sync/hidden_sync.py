"""An operation waits for the GPU although nothing in the line says so, in every step.

What it means
    Some operations read a value on the host inside: to check their input, to take a tensor where a Python number is
    expected, or to learn a size.
Why it costs
    One wait a call; an optimizer that was rid of them took half the time
    (https://github.com/pytorch/pytorch/issues/60691, https://github.com/pytorch/pytorch/issues/108968).
How we know
    The source was read: the tensor is on a GPU, the line runs once a step, and the operation is known to wait in the
    torch version that is assumed (installed, or given with --torch): clip_grad_norm_ with error_if_nonfinite (before
    torch 1.10 in any case), any and all before 1.13, multinomial up to 2.1, alpha= with a tensor, normal with a tensor
    as std, an index that is a 0-dim tensor, nanmedian, equal and allclose, functions of torch.linalg that check their
    result, and metrics of torchmetrics that look for NaN. Or the command was watched on a GPU: torch itself says that
    the line waits (sync debug mode) in about every step, and no call in it is one that is meant to.
Fix
    The spelling that stays on the device, named with each finding.
When to ignore
    The check is wanted. Run it every N steps then.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import (
    Case,
    Example,
    Finding,
    Remedy,
    Rule,
    SourceSite,
    Step,
    SyncSite,
    Unchecked,
    Watched,
    WatchRecord,
)
from gpudoctor.rules import sources
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.steps import Cost, a_step, bound_of_waits, function_of, per_step, records, spent, worst, worth

RULE = Rule(code="SYN007", name="operation-with-hidden-sync", severity="warning", needs=sources.NEEDS, since="0.2")

# Versions [since, until) in which an operation waits; None is open. Others wait in all versions.
_VERSIONS: dict[str, tuple[tuple[int, int] | None, tuple[int, int] | None]] = {
    "clip_grad_norm_": (None, (1, 10)),  # pytorch#61042
    "any": (None, (1, 13)),  # pytorch#84291
    "all": (None, (1, 13)),
    "multinomial": (None, (2, 2)),  # pytorch#108968; no wait in our run with 2.11
}
_FIXES = {
    "clip_grad_norm_ with error_if_nonfinite": "leave error_if_nonfinite at False; check the norm every N steps",
    "clip_grad_norm_": "torch 1.10 or newer",
    "0-dim index": "x.index_select(0, k.reshape(1)): the index stays on the device",
    "normal with a tensor as std": "torch.randn_like(std) * std + mean",
    "nanmedian": "torch.nanquantile(x, 0.5), or nanmedian(dim=...)",
    "multinomial": "torch.argmax(probs / torch.empty_like(probs).exponential_(1), -1), or a newer torch",
    "equal": "(a == b).all(), kept as a tensor",
    "allclose": "torch.isclose(a, b).all(), kept as a tensor",
    "histc without min and max": "give min= and max=",
    "torch.linalg.cholesky": "torch.linalg.cholesky_ex, which does not check",
    "torch.linalg.inv": "torch.linalg.inv_ex, which does not check; better solve_ex",
    "torch.linalg.solve": "torch.linalg.solve_ex, which does not check",
    "torch.linalg.lu_factor": "torch.linalg.lu_factor_ex, which does not check",
    "torch.linalg.ldl_factor": "torch.linalg.ldl_factor_ex, which does not check",
}


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if case.watched is not None and not records(case):
        yield Unchecked(reason="no step was seen in the watched command")
        return
    often = case.threshold(RULE.code, "calls_per_step")
    seen = [
        (sync, spent(record, sync))
        for record in records(case)
        for sync in record.syncs
        if _hidden(sync) and per_step(record, sync.calls_in_steps) >= often
    ]
    for sync, price in worst(seen):
        if price.share >= case.threshold(RULE.code, "wait_share"):
            yield _watched(case, sync, price)
    found = [
        site
        for site in sources.sites(case, "hidden-sync")
        if sources.in_versions(case, *_VERSIONS.get(site.operation, (None, None)))
    ]
    for group in sources.by_line(found):
        yield _finding(group[0])


def _hidden(sync: SyncSite) -> bool:
    """Not written in the line. GradScaler must read whether gradients overflowed: it waits by design."""
    if not sync.on_device or (sync.via is not None and ".grad_scaler." in sync.via):
        return False
    return sync.detected_by == "sync-debug-mode" or (
        sync.via is not None and function_of(sync) not in ("synchronize", "empty_cache")
    )


def _finding(site: SourceSite) -> Finding:
    fix = _FIXES.get(site.operation)
    if fix is None and "NaN check" in site.operation:
        fix = 'nan_strategy="disable", or check every N steps'
    if fix is None and site.operation.startswith("tensor given as"):
        fix = "multiply first (x - w * alpha): the tensor stays on the device"
    told = site.operation
    since, until = _VERSIONS.get(site.operation, (None, None))
    if until is not None:
        told += f" (before torch {until[0]}.{until[1]})"
    elif since is not None:
        told += f" (since torch {since[0]}.{since[1]})"
    if site.detail is not None and "NaN check" in site.operation:
        told += f", updated in each step at {site.detail}"
    return sources.source_finding(
        RULE,
        site,
        f"{told}: the host waits for the GPU in each step",
        (Remedy(kind="code", text=fix or "do it every N steps, or on the device"),),
    )


def _watched(case: Case, sync: SyncSite, price: Cost) -> Finding:
    severity, but = worth(case, price, RULE.severity, case.threshold(RULE.code, "wait_share"))
    rate = per_step(price.record, sync.calls_in_steps)
    inside = f"{sync.via}()" if sync.via is not None else "an operation here"
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=severity,
        subject=sync.site,
        message=f"{inside} waits for the GPU inside, {rate:.1f} times a step: {a_step(price)}{but}",
        evidence=(evidence(case, "watched", f"sync debug mode: {sync.calls} waits", "none in the loop"),),
        remedies=(
            Remedy(
                kind="code",
                text=(
                    "a spelling that stays on the device: torch.where for a mask, output_size=, tensors made on the GPU"
                    " or copied from pinned memory, no tensors where Python numbers are expected"
                ),
            ),
        ),
        gain=bound_of_waits(case, price),
        confidence="likely",
        symptoms=(f"{sync.site}: waits {a_step(price)}",),
    )


def _case(
    *,
    by: str = "sync-debug-mode",
    in_steps: int = 200,
    waited_ms: float = 1.5,
    steps: int = 100,
    via: str | None = None,
) -> Case:
    sync = SyncSite(
        site="train.py:9",
        function="sync" if by == "sync-debug-mode" else "item",
        calls=200,
        on_device=200,
        calls_in_steps=in_steps,
        waited_ms=waited_ms * 100,
        window_waited_ms=waited_ms,
        via=via,
        detected_by="sync-debug-mode" if by == "sync-debug-mode" else "both",
    )
    record = WatchRecord(pid=1, cuda=True, steps=(Step(wall_ms=20),) * steps, syncs=(sync,))
    return Case(watched=Watched(command=("python", "train.py"), cwd="", records=(record,)))


EXAMPLES = (
    Example(name="watched: a mask, twice a step", kind="fires", case=_case(), subjects=("train.py:9",)),
    Example(
        name="watched: item() in a metric",
        kind="fires",
        case=_case(by="wrapper", via="torchmetrics.metric.Metric.forward"),
        subjects=("train.py:9",),
    ),
    Example(name="watched: item() is SYN001", kind="quiet", case=_case(by="wrapper")),
    Example(
        name="watched: GradScaler waits by design",
        kind="quiet",
        case=_case(by="wrapper", via="torch.amp.grad_scaler.GradScaler.step"),
    ),
    Example(name="watched: every tenth step", kind="quiet", case=_case(in_steps=10)),
    Example(name="watched: no wait", kind="quiet", case=_case(waited_ms=0.1)),
    Example(name="no step seen", kind="lacks", case=_case(steps=0)),
    Example(
        name="alpha=, a 0-dim index, a metric, clipping with a check",
        kind="fires",
        case=sources.example_case(
            sources.example_site("hidden-sync", "tensor given as alpha=", "g.sub(w, alpha=proj)"),
            sources.example_site("hidden-sync", "0-dim index", "scores[k]", line=22),
            sources.example_site(
                "hidden-sync", "MeanMetric with a NaN check", "MeanMetric()", line=4, detail="train.py:23"
            ),
            sources.example_site(
                "hidden-sync",
                "clip_grad_norm_ with error_if_nonfinite",
                "clip_grad_norm_(p, 1.0, error_if_nonfinite=True)",
                line=24,
            ),
        ),
        subjects=("train.py:21", "train.py:22", "train.py:4", "train.py:24"),
    ),
    Example(
        name="clipping waits in an old torch",
        kind="fires",
        case=sources.example_case(
            sources.example_site("hidden-sync", "clip_grad_norm_", "clip_grad_norm_(p, 1.0)"), torch="1.9.1"
        ),
        subjects=("train.py:21",),
    ),
    Example(
        name="multinomial and clipping in a current torch",
        kind="quiet",
        case=sources.example_case(
            sources.example_site("hidden-sync", "multinomial", "torch.multinomial(p, 1)"),
            sources.example_site("hidden-sync", "clip_grad_norm_", "clip_grad_norm_(p, 1.0)", line=22),
            torch="2.11.0+cu128",
        ),
    ),
    Example(
        name="the version is not known",
        kind="quiet",
        case=sources.example_case(sources.example_site("hidden-sync", "multinomial", "torch.multinomial(p, 1)")),
    ),
    Example(name="nothing watched, no source read", kind="lacks", case=Case()),
)
