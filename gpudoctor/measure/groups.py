"""Copies that need more than one GPU or NUMA node: all GPUs at once, pairs on one uplink, far memory, peers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gpudoctor import child
from gpudoctor.measure import copies
from gpudoctor.measure.copies import Run, described, merge_readings
from gpudoctor.model import Gpu, Measurement, NumaNode, Setting

PREPARE = "gpudoctor.measure.gpu_together:prepare"
WINDOW = "gpudoctor.measure.gpu_together:window"
PAIR = "gpudoctor.measure.gpu_peers:pair"
START_IN_S = 0.15  # from the call to the common start: every child has its request by then
SHARED_LOSS = 0.90  # of its rate alone: below this a GPU shares something with another
_ENOUGH_TIMES = 8  # chunks in the window below which no rate can be told
_DIRECTIONS = ("h2d", "d2h")


@dataclass(frozen=True, slots=True)
class Trace:
    """The moments at which chunks of `size` bytes were done, in order, by the clock of the machine."""

    times: Sequence[float]
    size: int


def window_rates(traces: Sequence[Trace]) -> list[float] | None:
    """GB/s of each trace in the time in which all of them copied; None when that time is too short to tell.

    The window reaches from the moment at which the last one had its first chunk done to that at which the first one
    had its last. Chunks that straddle its ends count with the part that lies inside.
    """
    if any(len(trace.times) < _ENOUGH_TIMES for trace in traces):
        return None
    begin = max(trace.times[0] for trace in traces)
    end = min(trace.times[-1] for trace in traces)
    if end <= begin:
        return None
    rates = []
    for trace in traces:
        chunks = 0.0
        for left, right in itertools.pairwise(trace.times):
            inside = min(right, end) - max(left, begin)
            if inside > 0 and right > left:
                chunks += inside / (right - left)
        if chunks < _ENOUGH_TIMES / 2:
            return None
        rates.append(chunks * trace.size / (end - begin) / 1e9)
    return rates


def together(run: Run, gpus: Sequence[Gpu], seconds: float, *, always_pairs: bool = False) -> None:
    """Every GPU at once, each direction, against alone; where that costs a GPU its rate, the pairs that share."""
    subjects = [f"gpu:{gpu.index}" for gpu in gpus]
    with ExitStack() as stack:
        servers = [stack.enter_context(child.Server()) for _ in gpus]
        for direction in _DIRECTIONS:
            run.step(f"all GPUs at once, {direction}")
            rates = _at_once(run, gpus, servers, direction, seconds)
            if rates is None:
                continue
            alone = {item.subject: item.value for item in run.measurements if item.metric == direction}
            for subject, rate in zip(subjects, rates, strict=True):
                run.measurements.append(_share(f"{direction}_all", subject, rate, alone.get(subject), len(gpus)))
            slow = [
                gpu
                for gpu, rate in zip(gpus, rates, strict=True)
                if f"gpu:{gpu.index}" in alone and rate < SHARED_LOSS * alone[f"gpu:{gpu.index}"]
            ]
            if len(slow) > 1 or always_pairs:
                _pairs(run, gpus if always_pairs else slow, dict(zip(subjects, servers, strict=True)), direction, alone)


def _share(metric: str, subject: str, rate: float, alone: float | None, count: int) -> Measurement:
    settings: dict[str, Setting] = {"gpus": count, "alone": alone}
    return Measurement(metric=metric, subject=subject, value=rate, unit="GB/s", settings=settings)


def _at_once(
    run: Run, gpus: Sequence[Gpu], servers: Sequence[child.Server], direction: str, seconds: float
) -> list[float] | None:
    """Rates in the common window, or None (with an error in `run`)."""
    payloads = [run.payload(gpu, direction, seconds) for gpu in gpus]
    answers = _call_all(servers, PREPARE, payloads, run.deadline_s)
    refused = [(gpu, a) for gpu, a in zip(gpus, answers, strict=True) if a.status != "ok" or "unusable" in a.value]
    if refused:
        gpu, answer = refused[0]
        reason = answer.error or answer.value["unusable"]
        run.errors.append(f"all GPUs at once, {direction}: gpu:{gpu.index}: {reason}")
        return None
    start = time.monotonic() + START_IN_S
    for payload in payloads:
        payload["start_at"] = start
    answers = _call_all(servers, WINDOW, payloads, seconds + 30)
    for gpu, answer in zip(gpus, answers, strict=True):
        if answer.status != "ok":
            run.errors.append(f"all GPUs at once, {direction}: gpu:{gpu.index}: {answer.error}")
            return None
    rates = window_rates([Trace(answer.value["times"], answer.value["bytes"]) for answer in answers])
    if rates is None:
        run.errors.append(f"all GPUs at once, {direction}: they did not copy at the same time long enough")
    return rates


def _call_all(
    servers: Sequence[child.Server], target: str, payloads: Sequence[dict[str, Any]], deadline_s: float
) -> list[child.ChildResult]:
    with ThreadPoolExecutor(max_workers=len(servers)) as pool:
        calls = [
            pool.submit(server.call, target, payload, deadline_s=deadline_s)
            for server, payload in zip(servers, payloads, strict=True)
        ]
        return [call.result() for call in calls]


def _pairs(
    run: Run, gpus: Sequence[Gpu], servers: dict[str, child.Server], direction: str, alone: dict[str, float]
) -> None:
    """The sum of two GPUs that copy at once: two that share an uplink together get little more than one."""
    for a, b in itertools.combinations(gpus, 2):
        names = f"gpu:{a.index}", f"gpu:{b.index}"
        rates = _at_once(run, (a, b), [servers[name] for name in names], direction, 0.25)
        if rates is None:
            continue
        both = alone[names[0]] + alone[names[1]] if set(names) <= alone.keys() else None
        settings: dict[str, Setting] = {"alone": both, names[0]: rates[0], names[1]: rates[1]}
        run.measurements.append(
            Measurement(
                metric=f"{direction}_pair_sum",
                subject="-".join(names),
                value=sum(rates),
                unit="GB/s",
                settings=settings,
            )
        )


def nodes(run: Run, gpu: Gpu, places: Sequence[NumaNode], seconds: float) -> None:
    """Pinned copies with host memory and CPUs of each node in turn; the place of the pages is verified."""
    allowed = run.case.limits.allowed_cpus
    for place in places:
        cpus = [cpu for cpu in place.cpus if allowed is None or cpu in set(allowed)]
        with child.Server() as server:
            for direction in _DIRECTIONS:
                run.step(f"gpu:{gpu.index} {direction}, memory of node {place.node}")
                payload = run.payload(gpu, direction, seconds / 2, cpus=cpus, node=place.node)
                answer = server.call(copies.TARGET, payload, deadline_s=run.deadline_s)
                if answer.status != "ok" or "unusable" in answer.value:
                    reason = answer.error or answer.value["unusable"]
                    run.errors.append(f"gpu:{gpu.index} {direction}, memory of node {place.node}: {reason}")
                    continue
                _take_node(run, gpu, place.node, direction, answer.value)


def _take_node(run: Run, gpu: Gpu, node: int, direction: str, answer: dict[str, Any]) -> None:
    placed = answer["placed"] or {"share": None, "reason": "not placed"}
    notes = list(answer["notes"])
    if placed["reason"]:
        notes.append(f"the place of the memory is not certain: {placed['reason']}")
    elif placed["share"] is not None and placed["share"] < 0.99:
        notes.append(f"only {placed['share']:.0%} of the pages lie on node {node}: no figure of that node alone")
    settings: dict[str, Setting] = {
        "node": node,
        "near": None if gpu.numa_node is None else gpu.numa_node == node,
        "on_node": placed["share"],
        "bytes": answer["bytes"],
        "backend": answer["engine"],
    }
    merge_readings(run, run.gpu(gpu.index), [answer["readings"]])
    run.measurements.append(described(f"{direction}_node", f"gpu:{gpu.index}", answer["samples"], settings, notes))


def usable_nodes(run: Run) -> list[NumaNode]:
    """Nodes with CPUs that this process may run on and memory that it may use."""
    limits = run.case.limits
    return [
        node
        for node in run.case.numa_nodes
        if node.cpus
        and (limits.allowed_nodes is None or node.node in limits.allowed_nodes)
        and (limits.allowed_cpus is None or set(node.cpus) & set(limits.allowed_cpus))
    ]


def peers(run: Run, gpus: Sequence[Gpu], seconds: float) -> None:
    """Every ordered pair: is access granted, does the data arrive, and the rates direct and through host memory."""
    with child.Server() as server:
        for source, target in itertools.permutations(gpus, 2):
            run.step(f"gpu:{source.index} to gpu:{target.index}")
            if not _pair(run, server, source, target, seconds):
                return


def _pair(run: Run, server: child.Server, source: Gpu, target: Gpu, seconds: float) -> bool:
    """False when no pair can be measured."""
    subject = f"gpu:{source.index}-gpu:{target.index}"
    payload = {
        "engine": run.engine,
        "source": source.bdf,
        "target": target.bdf,
        "seconds": seconds,
        "memory_bytes": run.case.limits.memory_bytes,
    }
    check = server.call(PAIR, payload | {"kind": "check"}, deadline_s=run.deadline_s)
    if check.status == "ok" and "unusable" in check.value:
        run.errors.append(f"copies between GPUs cannot be measured: {check.value['unusable']}")
        return False
    if check.status != "ok":
        granted = _granted(run, source, target)
        if check.status in ("timeout", "stuck", "crashed") and granted:
            _say_check(run, subject, False, f"the copy did not end: {check.error}", None)
        run.errors.append(f"{subject} check: {check.error}")
        return True
    answer = check.value
    kinds = _kinds(answer)
    wrong = [kind for kind in ("write", "read") if answer[kind] is False]
    if answer["access"]:
        reason = f"the target held other data after a peer {' and a peer '.join(wrong)}" if wrong else None
        _say_check(run, subject, not wrong, reason, answer["engine"])
    if not answer["staged"]:
        run.errors.append(f"{subject} staged: the target held other data; this is a fault of the machine or of us")
    for kind, metric, unit in kinds:
        result = server.call(PAIR, payload | {"kind": kind}, deadline_s=run.deadline_s)
        if result.status != "ok":
            run.errors.append(f"{subject} {metric}: {result.error}")
            continue
        settings: dict[str, Setting] = {
            "bytes": result.value["bytes"],
            "path": "staged" if kind == "staged" else "peer",
            "backend": answer["engine"],
        }
        item = described(metric, subject, result.value["samples"], settings, unit=unit)
        if kind in wrong:
            run.note(f"{subject}: no rate of {metric} is reported, its data did not arrive")
            continue
        run.add(item)
    return True


def _kinds(answer: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    if answer["access"]:
        yield ("write", "p2p_write", "GB/s")
        if answer["side"]:
            yield ("read", "p2p_read", "GB/s")
        yield ("latency", "p2p_latency", "us")
    yield ("staged", "p2p_staged", "GB/s")


def _say_check(run: Run, subject: str, passed: bool, reason: str | None, engine: str | None) -> None:
    run.measurements.append(
        Measurement(
            metric="p2p_check",
            subject=subject,
            value=1.0 if passed else 0.0,
            unit="passed",
            settings={"backend": engine},
            notes=(reason,) if reason else (),
        )
    )


def _granted(run: Run, a: Gpu, b: Gpu) -> bool:
    names = {f"gpu:{a.index}", f"gpu:{b.index}"}
    return any({pair.a, pair.b} == names and "OK" in (pair.p2p_read, pair.p2p_write) for pair in run.case.pairs)
