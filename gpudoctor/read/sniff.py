"""Which kind of artifact is this?"""

from __future__ import annotations

from gpudoctor.read import case, smi_topo
from gpudoctor.read.matrix import read_matrices

UNKNOWN = "unknown"
UNDERSTOOD = "a Case or --json output of gpudoctor, the text of `nvidia-smi topo -m`, a trace of torch.profiler or nsys"


def identify(text: str, name: str = "") -> str:
    """The kind of an artifact by its content: "case", "nvidia-smi-topo" or "unknown".

    `name` decides only where the content cannot: a damaged .json file that is named like our own.
    """
    if case.is_case(text):
        return case.KIND
    if text.lstrip("\ufeff \t\r\n").startswith("{") and name.endswith("case.json"):
        return case.KIND
    return smi_topo.KIND if "GPU" in text and read_matrices(text).found else UNKNOWN
