"""The texts of tools that each tell a part of a machine: which kind is it, and who reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpudoctor.read import (
    bandwidth_test,
    lspci,
    lspci_tree,
    nccl_tests,
    numactl,
    nvbandwidth,
    osu_bw,
    p2p_bandwidth,
    simple_p2p,
    smi_nvlink,
    smi_p2p,
    superbench_copy,
    torch_errors,
)
from gpudoctor.read.parts import Parts


@dataclass(frozen=True, slots=True)
class Reader:
    """`is_kind` sees the whole text and never raises; `read` gives what it understood of one file."""

    kind: str
    is_kind: Callable[[str], bool]
    read: Callable[[str, str], Parts]


# The first that knows the text takes it: narrow marks before wide ones.
READERS = (
    Reader(nvbandwidth.KIND_JSON, nvbandwidth.is_kind_json, nvbandwidth.read_json),
    Reader(nvbandwidth.KIND, nvbandwidth.is_kind, nvbandwidth.read_text),
    Reader(p2p_bandwidth.KIND, p2p_bandwidth.is_kind, p2p_bandwidth.read_text),
    Reader(bandwidth_test.KIND, bandwidth_test.is_kind, bandwidth_test.read_text),
    Reader(simple_p2p.KIND, simple_p2p.is_kind, simple_p2p.read_text),
    Reader(nccl_tests.KIND, nccl_tests.is_kind, nccl_tests.read_text),
    Reader(superbench_copy.KIND, superbench_copy.is_kind, superbench_copy.read_text),
    Reader(osu_bw.KIND, osu_bw.is_kind, osu_bw.read_text),
    Reader(numactl.KIND, numactl.is_kind, numactl.read_text),
    Reader(lspci.KIND, lspci.is_kind, lspci.read_text),
    Reader(lspci_tree.KIND, lspci_tree.is_kind, lspci_tree.read_text),
    Reader(lspci.KIND_ACS, lspci.is_kind_acs, lspci.read_acs),
    Reader(smi_p2p.KIND, smi_p2p.is_kind, smi_p2p.read_text),
    Reader(smi_nvlink.KIND, smi_nvlink.is_kind, smi_nvlink.read_text),
    Reader(torch_errors.KIND, torch_errors.is_kind, torch_errors.read_text),
)
_BY_KIND = {reader.kind: reader for reader in READERS}


def kind_of(text: str) -> str | None:
    """The kind of a text that one of the readers takes, or None."""
    return next((reader.kind for reader in READERS if reader.is_kind(text)), None)


def read(kind: str, text: str, file: str) -> Parts | None:
    """What the reader of this kind finds; None when no reader here is meant."""
    reader = _BY_KIND.get(kind)
    return None if reader is None else reader.read(text, file)
