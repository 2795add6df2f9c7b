"""Which kind of artifact is this?"""

from __future__ import annotations

from gpudoctor.read import case, smi_topo, texts
from gpudoctor.read.matrix import read_matrices

UNKNOWN = "unknown"
UNDERSTOOD = (
    "a Case or --json output of gpudoctor, the text of nvidia-smi topo or nvlink, of lspci -vv, numactl --hardware and "
    "of bandwidth tools, a trace of torch.profiler or nsys"
)


def identify(text: str, name: str = "") -> str:
    """The kind of an artifact by its content: "case", "nvidia-smi-topo", one of `texts`, or "unknown".

    `name` decides only where the content cannot: a damaged .json file that is named like our own.
    """
    if case.is_case(text):
        return case.KIND
    if text.lstrip("\ufeff \t\r\n").startswith("{") and name.endswith("case.json"):
        return case.KIND
    kind = texts.kind_of(text)
    if kind is not None:
        return kind
    return smi_topo.KIND if "GPU" in text and read_matrices(text).found else UNKNOWN
