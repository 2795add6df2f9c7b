"""Puts together what NVML, /sys and /proc say; see collect_case."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from gpudoctor.collect import bridges, network, os_limits, software, sysfs
from gpudoctor.collect import gpus as _gpus
from gpudoctor.collect import nvml as _nvml
from gpudoctor.collect.files import Files, Notebook
from gpudoctor.model import Case, Software


def collect(*, root: Path | None, nvml: bool, timeout_s: float) -> Case:
    """See collect_case."""
    files = Files(root if root is not None else Path(os.environ.get("GPUDOCTOR_SYSROOT") or "/"))
    notebook = Notebook()
    facts = _nvml.ask(timeout_s) if nvml else None
    on_bus = sysfs.nvidia_gpus(files, notebook)
    host = os_limits.host(files, notebook)
    nodes = sysfs.numa_nodes(files, notebook)
    place = _gpus.HostFacts(nodes, host.container)
    found = _gpus.gpus(files, notebook, facts, on_bus, place)
    nics = network.nics(files, notebook)
    pairs = _gpus.pairs(files, notebook, found, nics, facts, len(place.cpu_nodes) or None)
    bdfs = tuple(gpu.bdf for gpu in found if gpu.bdf is not None)
    host = replace(
        host,
        iommu=sysfs.iommu(files, bdfs, notebook),
        gpus_on_bus=None if on_bus is None else len(on_bus),
    )
    versions = software.software(files, notebook)
    versions = _with_nvml_versions(notebook, versions, facts)
    limits = os_limits.limits(files, notebook)
    return Case(
        host=host,
        gpus=found,
        pairs=pairs,
        numa_nodes=nodes,
        nics=nics,
        drives=bridges.drives(files),
        acs=bridges.acs(files, notebook, found),
        software=versions,
        limits=limits,
        gaps=tuple(notebook.gaps),
        # the most specific path first, so that the first match for a fact is the best one
        sources=tuple(sorted(notebook.sources, key=lambda source: (-len(source.path), source.path))),
        conflicts=tuple(notebook.conflicts),
    )


def _with_nvml_versions(notebook: Notebook, versions: Software, facts: _nvml.NvmlFacts | None) -> Software:
    if facts is None or facts.failure is not None:
        reason, text = facts.failure if facts and facts.failure else ("not probed", "NVML was not asked")
        for name in ("nvml", "cuda_driver"):
            notebook.gap(f"software.{name}", reason, text)
        if versions.driver is None:
            notebook.extend("software.driver", text)
        return versions
    for path, reason, text in facts.gaps:
        notebook.gap(path, reason, text)
    if versions.driver is None and facts.driver is not None:
        notebook.forget("software.driver")
        notebook.source("software.driver", "NVML")
    elif facts.driver is not None and facts.driver != versions.driver:
        notebook.conflict("software.driver", (versions.driver, "/proc/driver/nvidia/version"), (facts.driver, "NVML"))
    return replace(versions, driver=versions.driver or facts.driver, nvml=facts.nvml, cuda_driver=facts.cuda)
