"""Joins what NVML and /sys say about GPUs and pairs, on BDF; where they disagree both are kept."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from gpudoctor.collect.files import Files, Notebook, list_text
from gpudoctor.collect.nvml import GapEntry, NvmlFacts, NvmlGpu, NvmlPair
from gpudoctor.collect.sysfs import PciDevice, path_class, pci_device, pcie_path
from gpudoctor.model import Gpu, Nic, NumaNode, Pair, PathClass, PcieLink, gpu_path

_NO_PORT = "no port above the GPU is visible"


def gpus(
    files: Files, notebook: Notebook, facts: NvmlFacts | None, on_bus: tuple[str, ...] | None, host: HostFacts
) -> tuple[Gpu, ...]:
    """The GPUs of the machine, by NVML's index. `facts` is None when NVML was not asked.

    A GPU that the bus shows but NVML does not serve is listed as lost, with the reason.
    """
    if facts is None or facts.failure is not None:
        listed = [_unserved(number, bdf, facts) for number, bdf in enumerate(on_bus or ())]
    else:
        listed = _place_lost(facts.gpus, on_bus or ())
        listed += _unlisted(files, listed, on_bus or (), host)
    found = []
    for answer in listed:
        gpu, device = answer.gpu, None
        if gpu.bdf is not None:
            device = pci_device(files, gpu.bdf)
            gpu = _with_place(files, notebook, gpu, device)
            gpu = _with_locality(notebook, gpu, answer, device, host)
            gpu = _with_link(notebook, gpu, answer)
        else:
            gpu = replace(gpu, local_cpus=answer.cpus, numa_nodes=answer.nodes or ())
        _note_gaps(notebook, gpu, answer)
        found.append(gpu)
    if found:
        notebook.source("gpus", "NVML" if facts and not facts.failure else "/sys/bus/pci/devices")
    return tuple(found)


class HostFacts:
    """What the judgement of one GPU needs to know about the machine."""

    def __init__(self, nodes: tuple[NumaNode, ...], container: str | None) -> None:
        # Memory-only nodes (a GPU's own memory on Grace) are no places for CPUs.
        self.cpu_nodes = tuple(node.node for node in nodes if node.cpus)
        self.container = container


def _unserved(number: int, bdf: str, facts: NvmlFacts | None) -> NvmlGpu:
    if facts is None or facts.failure is None:
        return NvmlGpu(gpu=Gpu(index=number, bdf=bdf), gaps=[("", "not probed", "NVML was not asked")])
    reason, text = facts.failure
    return NvmlGpu(gpu=Gpu(index=number, bdf=bdf, lost=True, lost_reason=text), gaps=[("", reason, text)])


def _place_lost(answers: list[NvmlGpu], on_bus: tuple[str, ...]) -> list[NvmlGpu]:
    """Give lost GPUs their BDF: NVML's order is bus order, which holds if it holds for those that answer."""
    lost = [answer for answer in answers if answer.gpu.bdf is None]
    if not lost:
        return list(answers)
    in_order = len(on_bus) == len(answers) and all(
        answer.gpu.bdf in (None, on_bus[answer.gpu.index]) for answer in answers if answer.gpu.index < len(on_bus)
    )
    left = [bdf for bdf in on_bus if bdf not in {answer.gpu.bdf for answer in answers}]
    for number, answer in enumerate(lost):
        if in_order:
            answer.gpu = replace(answer.gpu, bdf=on_bus[answer.gpu.index])
        elif len(left) == len(lost):
            answer.gpu = replace(answer.gpu, bdf=left[number])
    return list(answers)


def _unlisted(files: Files, listed: list[NvmlGpu], on_bus: tuple[str, ...], host: HostFacts) -> list[NvmlGpu]:
    """GPUs that the NVIDIA driver holds but NVML does not list: lost. In a container they may only be hidden."""
    if host.container != "none" or any(answer.gpu.bdf is None for answer in listed):
        return []
    known = {answer.gpu.bdf for answer in listed}
    index = max((answer.gpu.index for answer in listed), default=-1)
    missing = []
    for bdf in on_bus:
        if bdf not in known and pci_device(files, bdf).driver == "nvidia":
            index += 1
            text = "on the bus and held by the driver, but not listed by NVML"
            gpu = Gpu(index=index, bdf=bdf, lost=True, lost_reason=text)
            missing.append(NvmlGpu(gpu=gpu, gaps=[("", "not probed", text)]))
    return missing


def _with_place(files: Files, notebook: Notebook, gpu: Gpu, device: PciDevice) -> Gpu:
    path = pcie_path(files, device)
    state = gpu.pcie.state if gpu.pcie else "unknown"
    path = tuple(replace(hop, link=replace(hop.link, state=state)) if hop.link else hop for hop in path)
    if path:
        notebook.source(gpu_path(gpu, "pcie_path"), f"/sys/bus/pci/devices/{gpu.bdf}")
    else:
        notebook.gap(gpu_path(gpu, "pcie_path"), "not present", f"/sys/bus/pci/devices/{gpu.bdf} leads to no device")
    if device.root is None:
        notebook.gap(gpu_path(gpu, "root"), "not present", "no host bridge above the GPU in /sys")
    return replace(gpu, pcie_path=path, root=device.root)


def _with_locality(notebook: Notebook, gpu: Gpu, answer: NvmlGpu, device: PciDevice, host: HostFacts) -> Gpu:
    """The kernel knows the NUMA node; where it says -1, NVML's single node counts if there are others to choose."""
    node, nodes = device.numa_node, answer.nodes or ()
    path = gpu_path(gpu, "numa_node")
    if node is not None:
        notebook.source(path, f"/sys/bus/pci/devices/{gpu.bdf}/numa_node")
        if nodes and node not in nodes:
            notebook.conflict(path, (node, "/sys"), (list_text(nodes), "NVML memory affinity"))
    elif len(nodes) == 1 and len(host.cpu_nodes) > 1 and nodes[0] in host.cpu_nodes:
        node = nodes[0]
        notebook.source(path, "NVML memory affinity")
    else:
        notebook.gap(path, "not present", "/sys says -1 or nothing: locality cannot be seen from here")
    cpus, told = device.local_cpus, answer.cpus
    if cpus is None:
        cpus = told
    # NVML leaves out CPUs that this process may not use, so a shorter list agrees.
    elif told and not set(told) <= set(cpus):
        notebook.conflict(gpu_path(gpu, "local_cpus"), (list_text(cpus), "/sys"), (list_text(told), "NVML"))
    if gpu.memory_node in host.cpu_nodes:  # a node with CPUs is not the GPU's own memory
        gpu = replace(gpu, memory_node=None)
    return replace(gpu, numa_node=node, numa_nodes=nodes or (() if node is None else (node,)), local_cpus=cpus)


def _with_link(notebook: Notebook, gpu: Gpu, answer: NvmlGpu) -> Gpu:
    """One link, two witnesses. The generation moves with the load, so that only width and maxima can disagree."""
    told = gpu.pcie or PcieLink()
    seen = (gpu.pcie_path[0].link if gpu.pcie_path else None) or PcieLink()
    for fact in ("width", "max_generation"):
        values = getattr(told, fact), getattr(seen, fact)
        if None not in values and values[0] != values[1]:
            notebook.conflict(gpu_path(gpu, f"pcie.{fact}"), (values[0], "NVML"), (values[1], "/sys"))
    link = PcieLink(
        generation=told.generation or seen.generation,
        width=told.width or seen.width,
        max_generation=told.max_generation or seen.max_generation,
        # NVML's is what card and slot allow together, the kernel's is the card's own
        max_width=seen.max_width or told.max_width,
        port_max_generation=seen.port_max_generation,
        port_max_width=seen.port_max_width,
        state=told.state,
    )
    limit = answer.system_max_generation
    if link.port_max_generation is None and limit and link.max_generation and limit < link.max_generation:
        link = replace(link, port_max_generation=limit)
    for fact in ("generation", "width", "max_generation", "max_width"):
        if getattr(link, fact) is None and not gpu.lost and gpu.name is not None:
            notebook.gap(gpu_path(gpu, f"pcie.{fact}"), "not supported", "neither NVML nor /sys tells")
    for fact in ("port_max_generation", "port_max_width"):
        if getattr(link, fact) is None:
            notebook.gap(gpu_path(gpu, f"pcie.{fact}"), "not present", _NO_PORT)
    if link == PcieLink(state=told.state):
        return replace(gpu, pcie=None)
    return replace(gpu, pcie=link)


def _note_gaps(notebook: Notebook, gpu: Gpu, answer: NvmlGpu) -> None:
    for fact, reason, text in answer.gaps:
        if not fact:
            notebook.gap(re.sub(r"\.$", "", gpu_path(gpu, "")), reason, text)
            continue
        value: object = gpu
        for part in fact.split("."):
            value = getattr(value, part, None)
        if value is None or value == ():
            notebook.gap(gpu_path(gpu, fact), reason, text)


def pairs(
    files: Files,
    notebook: Notebook,
    found: tuple[Gpu, ...],
    nics: tuple[Nic, ...],
    facts: NvmlFacts | None,
    nodes: int | None,
) -> tuple[Pair, ...]:
    """Every GPU with every other and with every NIC. `nodes` is the number of NUMA nodes with CPUs."""
    devices = {gpu.index: pci_device(files, gpu.bdf) for gpu in found if gpu.bdf is not None}
    served = facts is not None and facts.failure is None
    if len(found) > 1 and not served:
        notebook.gap("pairs", "not probed", "NVML did not serve the GPUs")  # one for all of them
    told = {(pair.a, pair.b): pair for pair in (facts.pairs if facts else ())}
    between = []
    for a, b in itertools.combinations(found, 2):
        seen: PathClass | None = None
        if a.index in devices and b.index in devices:
            seen = path_class(devices[a.index], devices[b.index], nodes=nodes)
        between.append(_pair(notebook if served else Notebook(), a, b, told.get((a.index, b.index)), seen))
    for gpu, nic in itertools.product(found, nics):
        seen = None
        if gpu.index in devices and nic.bdf is not None:
            seen = path_class(devices[gpu.index], pci_device(files, nic.bdf), nodes=nodes)
        pair = Pair(a=f"gpu:{gpu.index}", b=f"nic:{nic.name}", path=seen)
        if seen is None:
            notebook.gap(f"pairs[{pair.a},{pair.b}].path", "not present", "/sys does not place both devices")
        between.append(pair)
    if between:
        notebook.source("pairs", "NVML, /sys/devices")
    return tuple(between)


def _pair(notebook: Notebook, a: Gpu, b: Gpu, told: NvmlPair | None, seen: PathClass | None) -> Pair:
    path = f"pairs[gpu:{a.index},gpu:{b.index}]"
    told_path = told.path if told else None
    if told_path is not None and seen is not None and told_path != seen:
        notebook.conflict(f"{path}.path", (told_path, "NVML"), (seen, "/sys"))
    p2p = told.p2p if told else {}
    pair = Pair(
        a=f"gpu:{a.index}",
        b=f"gpu:{b.index}",
        path=told_path or seen,
        nvlinks=_bonded(a, b),
        p2p_read=p2p.get("p2p_read"),
        p2p_write=p2p.get("p2p_write"),
        p2p_nvlink=p2p.get("p2p_nvlink"),
    )
    unserved: list[GapEntry] = [("", "not probed", "NVML did not serve both GPUs")]
    for fact, reason, text in told.gaps if told else unserved:
        if not fact or getattr(pair, fact) is None:
            notebook.gap(f"{path}.{fact}".rstrip("."), reason, text)
    if pair.nvlinks is None:
        notebook.gap(f"{path}.nvlinks", "not supported", "no NVLink states of both GPUs")
    return pair


def _bonded(a: Gpu, b: Gpu) -> int | None:
    """NV#: links that lead straight to the other GPU, or into a switch fabric that both hang on."""
    if not a.nvlinks or not b.nvlinks:
        return None
    up_a, up_b = ([link for link in gpu.nvlinks if link.active] for gpu in (a, b))
    direct = sum(1 for link in up_a if link.remote_type != "switch" and link.remote_bdf == b.bdf)
    fabric = min(sum(1 for link in links if link.remote_type == "switch") for links in (up_a, up_b))
    return direct or fabric
