"""Versions and environment variables, without importing what they describe."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from gpudoctor.collect.files import Files, Notebook
from gpudoctor.model import Software

# Only variables that steer GPUs, ranks and threads, by full name: no pattern may let a secret through.
ENVIRONMENT = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("CUDA_MODULE_LOADING", "CUDA_MPS_PIPE_DIRECTORY", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY", "MALLOC_CONF", "MALLOC_ARENA_MAX"),
    *(
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
    ),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    *("TORCH_NCCL_HIGH_PRIORITY", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDNN_V8_API_DISABLED", "CUBLAS_WORKSPACE_CONFIG"),
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"),
    *("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_SL", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"),
    *("NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"),
    *("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_NET_GDR_LEVEL"),
    *("NCCL_NET_GDR_READ", "NCCL_NET_SHARED_BUFFERS", "NCCL_DMABUF_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_ALGO"),
    *("NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS"),
    *("NCCL_MAX_CTAS", "NCCL_CROSS_NIC", "NCCL_TOPO_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_FILE"),
    *("NCCL_IGNORE_CPU_AFFINITY", "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_MNNVL_ENABLE"),
    *("NCCL_LAUNCH_MODE", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_CHECKS_DISABLE"),
    *("NCCL_SET_THREAD_NAME", "NCCL_TUNER_PLUGIN", "NCCL_PXN_DISABLE", "NCCL_COLLNET_ENABLE"),
    *("GLOO_SOCKET_IFNAME", "UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_LOCALID"),
    *("SLURM_CPU_BIND", "SLURM_PROCID", "SLURM_NNODES"),
)
_VERSION_FILE = "proc/driver/nvidia/version"
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def driver(files: Files) -> tuple[str | None, Literal["open", "proprietary"] | None]:
    """Version and flavour of the loaded kernel module, (None, None) when none is loaded."""
    text = files.read(_VERSION_FILE).text
    line = re.search(r"^NVRM version:\s*(.*)$", text or "", re.MULTILINE)
    if line is None:
        return None, None
    version = re.search(r"\s(\d{2,4}(?:\.\d+){1,3})\s", line[1] + " ")
    flavour: Literal["open", "proprietary"] = "open" if "open kernel module" in line[1].lower() else "proprietary"
    return (version[1] if version else None), flavour


def software(files: Files, notebook: Notebook) -> Software:
    """What NVML does not tell. Python, torch, NCCL and the environment are this process's: not of a recorded tree."""
    version, flavour = driver(files)
    if version is None:
        reason = files.read(_VERSION_FILE).reason or "not supported"
        notebook.gap("software.driver", reason, f"/{_VERSION_FILE} does not name a loaded NVIDIA driver")
        notebook.gap("software.driver_flavour", reason)
    else:
        notebook.source("software.driver", f"/{_VERSION_FILE}")
    if not files.live:
        for name in ("python", "torch", "torch_cuda", "nccl", "environment"):
            notebook.gap(f"software.{name}", "not probed", "belongs to a process on the recorded machine")
        return Software(driver=version, driver_flavour=flavour)
    torch, cuda = torch_version()
    nccl = nccl_version(cuda)
    if torch is None:
        notebook.gap("software.torch", "not present", "no package torch in this Python environment")
    if cuda is None:
        notebook.gap("software.torch_cuda", "not present", "torch is absent, or a build without CUDA")
    if nccl is None:
        notebook.gap("software.nccl", "not present", "no NCCL package in this Python environment")
    notebook.source("software", "this Python environment")
    return Software(
        driver=version,
        driver_flavour=flavour,
        nccl=nccl,
        torch=torch,
        torch_cuda=cuda,
        python=platform.python_version(),
        environment=environment(os.environ),
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The allow-listed variables that are set."""
    return {name: variables[name] for name in ENVIRONMENT if name in variables}


def torch_version() -> tuple[str | None, str | None]:
    """Version of torch and of the CUDA it was built for, from its files: importing it takes seconds."""
    try:
        version: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = None
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return version, None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(errors="replace")
    except OSError:
        return version, None
    own = re.search(r"^__version__\s*(?::[^=]+)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\s*(?::[^=]+)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return version or (own[1] if own else None), cuda[1] if cuda else None


def nccl_version(torch_cuda: str | None) -> str | None:
    """The NCCL that pip installed beside torch; of several, the one for torch's CUDA."""
    major = torch_cuda.partition(".")[0] if torch_cuda else None
    names = sorted(_NCCL_PACKAGES, key=lambda name: major is None or not name.endswith(f"cu{major}"))
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
