"""Several ranks of a machine run on one GPU.

What it means
    Each rank should have a GPU of its own. Ranks that all say "cuda", or that do not use LOCAL_RANK, meet on GPU 0, and
    the other GPUs stay idle.
Why it costs
    The ranks take turns on one GPU and share its memory; NCCL refuses such a job ("Duplicate GPU detected",
    https://github.com/facebookresearch/fairchem/issues/597), but with gloo, or without any process group, it runs and
    is only slow.
How we know
    The ranks were watched: torch told the UUID of the GPU on which each has most of its memory, and how many it sees.
Fix
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of the GPU.
When to ignore
    Ranks that share a GPU on purpose: tests of distributed code on a machine with one.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Remedy, Rule, Unchecked, Watched, WatchRecord
from gpudoctor.rules.evidence import evidence

RULE = Rule(code="LCH018", name="ranks-share-a-gpu", severity="warning", needs=("watched",), since="0.2")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    assert case.watched is not None  # `needs`
    ranks = [record for record in case.watched.records if record.rank is not None and record.cuda]
    if len(ranks) < 2:
        return
    known = [record for record in ranks if record.gpu is not None]
    if len(known) < 2:
        yield Unchecked(reason="this torch does not tell which GPU a rank uses")
        return
    for gpu in dict.fromkeys(record.gpu for record in known):
        here = sorted((record for record in known if record.gpu == gpu), key=lambda record: record.rank or 0)
        visible = max(record.gpus_visible or 1 for record in here)
        # a rank that sees one GPU was given it by whoever started it
        if len(here) < 2 or visible < 2:
            continue
        names = ", ".join(str(record.rank) for record in here)
        idle = visible - len({record.gpu for record in known})
        beside = f", and {idle} of {visible} GPUs are not used" if idle > 0 else f" of {visible}"
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject="host",
            message=f"ranks {names} run on one GPU{beside}",
            evidence=tuple(
                evidence(case, f"watched.records[{record.pid}].gpu", str(record.gpu), "a GPU of its own")
                for record in here
            ),
            remedies=(
                Remedy(
                    kind="code",
                    text='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), before the first use of the GPU',
                ),
            ),
            confidence="certain",
        )


def _case(*gpus: str | None, visible: int = 2) -> Case:
    records = tuple(
        WatchRecord(pid=100 + rank, rank=rank, world_size=len(gpus), cuda=True, gpu=gpu, gpus_visible=visible)
        for rank, gpu in enumerate(gpus)
    )
    return Case(watched=Watched(command=("torchrun", "train.py"), cwd="/job", records=records))


EXAMPLES = (
    Example(name="both on the first", kind="fires", case=_case("GPU-a", "GPU-a"), subjects=("host",)),
    Example(name="two and two", kind="fires", case=_case("GPU-a", "GPU-a", "GPU-b", "GPU-b", visible=4),
            subjects=("host", "host")),
    Example(name="one each", kind="quiet", case=_case("GPU-a", "GPU-b")),
    Example(name="a machine with one GPU", kind="quiet", case=_case("GPU-a", "GPU-a", visible=1)),
    Example(name="one rank", kind="quiet", case=_case("GPU-a")),
    Example(name="an old torch", kind="lacks", case=_case(None, None)),
    Example(name="nothing was watched", kind="lacks", case=Case()),
)  # fmt: skip
