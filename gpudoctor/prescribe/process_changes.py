"""Settings of the process, put into the environment of the command: the allocator's, and the number of CPU threads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from gpudoctor.model import Change
from gpudoctor.prescribe.proposal import Proposal
from gpudoctor.prescribe.workers import usable_cpus

THREADS, ALLOCATOR = "threads", "allocator"
_OMP = "OMP_NUM_THREADS"
_ALLOC = "PYTORCH_CUDA_ALLOC_CONF"
_THREADS_DECIDED = re.compile(r"\bset_num_threads\s*\(|\bOMP_NUM_THREADS\b|\bthreadpool_limits\b")
_ALLOC_DECIDED = re.compile(r"\bPYTORCH_(CUDA_|HIP_)?ALLOC_CONF\b|\b_?set_allocator_settings\b")
_EXPANDABLE_SINCE = (2, 1)
_RETRIES_A_STEP = 0.02  # each one waits for the GPU and calls the driver; fewer are warm-up


def allocator_changes(proposal: Proposal) -> Iterator[Change]:
    """Segments that grow, where the allocator was seen to run out of fitting blocks again and again."""
    worst = max(proposal.records, key=lambda record: record.alloc_retries or 0, default=None)
    if worst is None or not worst.alloc_retries:
        return
    least = max(2.0, _RETRIES_A_STEP * len(worst.steps))
    version = re.match(r"(\d+)\.(\d+)", worst.torch or "")
    if worst.alloc_retries < least or version is None or (int(version[1]), int(version[2])) < _EXPANDABLE_SINCE:
        return
    known = proposal.case.software.environment or {}
    if _ALLOC in known or "PYTORCH_ALLOC_CONF" in known or any(map(_ALLOC_DECIDED.search, proposal.texts.values())):
        return
    yield Change(
        id="",
        rule="SYN006",
        site="command",
        mechanism=ALLOCATOR,
        title=f"{_ALLOC}=expandable_segments:True",
        change_class="exact",
        environment={_ALLOC: "expandable_segments:True"},
        reason=f"{worst.alloc_retries} allocations found room only after the cache was given back to the driver",
    )


def thread_changes(proposal: Proposal) -> Iterator[Change]:
    """Other counts of CPU threads for a command that trains on CPUs: alternatives of one setting, the fewest first.

    Sums are split over the threads, so that results may differ in the last digits. A script on a GPU does too little
    on its CPU threads, and a count that the person or the script chose is left alone.
    """
    case, records = proposal.case, proposal.records
    if not records or any(record.cuda for record in records):
        return
    if _OMP in (case.software.environment or {}) or any(map(_THREADS_DECIDED.search, proposal.texts.values())):
        return
    ranks = max([len(records), *(record.world_size or 1 for record in records)])
    cpus = math.floor(usable_cpus(case))
    share = max(1, cpus // ranks)
    # torchrun gives each of several ranks one thread, a lone process takes every CPU that it sees
    present = 1 if ranks > 1 else cpus
    workers = max((loader.num_workers for _, loader in proposal.train_loaders()), default=0)
    counts = {1, share // 2, share - workers, share}
    for count in sorted(value for value in counts if 1 <= value != present):
        where = f"{cpus} CPUs for {ranks} ranks" if ranks > 1 else f"{cpus} CPUs"
        beside = f", {workers} loader workers a rank beside it" if workers else ""
        yield Change(
            id="",
            rule="LCH006",
            site="command",
            mechanism=THREADS,
            title=f"{_OMP}={count}",
            change_class="numerics",
            environment={_OMP: str(count)},
            reason=f"{where}{beside}; unset it is {present}",
        )
