"""Each socket is divided into several NUMA nodes: whether that helps can only be measured.

What it means
    The firmware divides a socket into nodes per socket (NPS2, NPS4 on AMD) or clusters (SNC on Intel). Memory of a
    quarter is a little nearer, and a process that is bound to it has a quarter of the memory channels.
Why it costs
    Both directions are reported: traffic staged through host memory rose from 1.1 to about 9 GB/s with NPS4 on one host
    (https://github.com/NVIDIA/nccl-tests/issues/293); elsewhere NPS1 is advised.
How we know
    There are more NUMA nodes with CPUs than sockets.
Fix
    Measure with `gpudoctor bench-pcie` and with the job, then try the other setting.
When to ignore
    The machine is fast enough. Numbers such as node 3 on a DGX A100 are normal.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gpu, Host, NumaNode, Remedy, Rule, Unchecked
from gpudoctor.rules.evidence import evidence
from gpudoctor.rules.locality import cpu_nodes, is_guest

RULE = Rule(
    code="NUM009", name="numa-nodes-per-socket-setting", severity="unknown", needs=("gpus", "numa_nodes"), since="0.1"
)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    sockets, nodes = case.host.sockets, cpu_nodes(case)
    if is_guest(case):
        yield Unchecked(reason="a virtual machine shows the hypervisor's layout")
    elif not sockets:
        yield Unchecked(reason="the number of sockets is unknown")
    elif len(nodes) > sockets:
        yield Finding(
            rule=RULE.code,
            name=RULE.name,
            severity=RULE.severity,
            subject="host",
            message=f"{sockets} sockets are divided into {len(nodes)} NUMA nodes: whether the other setting is faster "
            "for this job, only a measurement tells",
            evidence=(evidence(case, "host.sockets", sockets, f"{len(nodes)} NUMA nodes with CPUs"),),
            remedies=(
                Remedy(kind="measure", text="gpudoctor bench-pcie shows the copy rate for memory of each node"),
                Remedy(kind="bios", text="nodes per socket (NPS) or sub-NUMA clustering (SNC)", undo="the old setting"),
            ),
            confidence="possible",
        )


def _case(sockets: int | None, nodes: int, **host: str) -> Case:
    return Case(
        host=Host(sockets=sockets, virtualization=host.get("virtualization", "none")),
        gpus=(Gpu(index=0),),
        numa_nodes=tuple(NumaNode(node=node, cpus=(node,)) for node in range(nodes)),
    )


EXAMPLES = (
    Example(name="NPS4 on two sockets", kind="fires", case=_case(2, 8), subjects=("host",)),
    Example(name="one node a socket", kind="quiet", case=_case(2, 2)),
    Example(name="sockets unknown", kind="lacks", case=_case(None, 8)),
    Example(name="guest", kind="lacks", case=_case(1, 2, virtualization="kvm")),
)
