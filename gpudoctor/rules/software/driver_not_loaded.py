"""The PCI bus shows an NVIDIA GPU, and no driver works for it.

What it means
    The kernel module is not loaded (no /proc/driver/nvidia/version), or it is and NVML cannot talk to it. No program
    can use the GPU, whatever is installed.
Why it costs
    The GPU is idle. Frameworks fall back to the CPU without a word, or stop with "no CUDA device".
How we know
    The bus lists a display or 3D controller of NVIDIA. Either the kernel names no loaded driver, or it does and NVML
    reaches none of the GPUs. Without the right to ask, or without the package that asks, the rule is not checked.
Fix
    Load the module (`modprobe nvidia`), or install the driver for the running kernel; after a kernel update rebuild
    the module. In a container: start it with the GPU (`docker run --gpus all`), the driver belongs to the host.
When to ignore
    The GPU is given to a virtual machine (vfio-pci owns it), or WSL, where the driver lives in Windows.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Example, Finding, Gap, Gpu, Host, Remedy, Rule, Software, Unchecked
from gpudoctor.rules.evidence import evidence

RULE = Rule(code="SWV005", name="driver-not-loaded", severity="critical", needs=("host.gpus_on_bus",), since="0.1")


def check(case: Case) -> Iterator[Finding | Unchecked]:
    if not case.host.gpus_on_bus or "microsoft" in (case.host.kernel or "").lower():
        return
    if case.software.nvml is not None or any(gpu.name and not gpu.lost for gpu in case.gpus):
        return  # it answers
    loaded, absent, silent = case.software.driver, case.gap("software.driver"), case.gap("software.nvml")
    detail = " ".join((silent.detail or "").split()) if silent else ""
    if loaded is None and absent is not None and absent.reason == "not present":
        yield _finding(case, case.host.gpus_on_bus, "no driver is loaded", detail)
    elif loaded is not None and _nvml_failed(case, silent):
        yield _finding(case, case.host.gpus_on_bus, f"driver {loaded} is loaded but does not answer", detail)
    else:
        gap = silent or absent
        yield Unchecked(reason=f"whether a driver works is unknown: {detail or (gap.reason if gap else 'not asked')}")


def _nvml_failed(case: Case, silent: Gap | None) -> bool:
    """Whether NVML was asked and reached no GPU, for a reason of the driver and not of whoever asks."""
    if silent is None or silent.reason == "no permission" or "nvidia-ml-py" in (silent.detail or ""):
        return False
    return bool(case.gpus) and all(gpu.lost for gpu in case.gpus)


def _finding(case: Case, count: int, state: str, detail: str) -> Finding:
    inside = case.host.container not in (None, "none")
    start = Remedy(kind="config", text="docker run --gpus all, or the device plugin in Kubernetes")
    load = Remedy(kind="command", text="sudo modprobe nvidia", undo="sudo modprobe -r nvidia")
    loaded = case.software.driver is not None
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"{_count(count)} on the PCI bus, and {state}" + (f" ({detail})" if detail else ""),
        evidence=(
            evidence(case, "host.gpus_on_bus", count),
            evidence(case, "software.driver", case.software.driver or "not loaded", "a driver that answers NVML"),
        ),
        remedies=(
            *((start,) if inside else ()),
            *(() if loaded else (load,)),
            Remedy(kind="command", text="dmesg | grep -i nvrm says why; install the driver for the running kernel"),
        ),
        confidence="likely" if inside or loaded else "certain",
    )


def _count(number: int) -> str:
    return "one NVIDIA GPU is" if number == 1 else f"{number} NVIDIA GPUs are"


_ABSENT = Gap(path="software.driver", reason="not present", detail="no /proc/driver/nvidia/version")
_SILENT = Gap(path="software.nvml", reason="not probed", detail="NVML: Driver/library version mismatch")
_LOST = (Gpu(index=0, bdf="0000:01:00.0", lost=True, lost_reason="NVML: Driver/library version mismatch"),)

EXAMPLES = (
    Example(
        name="module not loaded",
        kind="fires",
        case=Case(host=Host(gpus_on_bus=2, kernel="6.8.0-45-generic"), gpus=_LOST, gaps=(_ABSENT, _SILENT)),
        subjects=("host",),
    ),
    Example(
        name="module loaded, library of another version",
        kind="fires",
        case=Case(host=Host(gpus_on_bus=1), gpus=_LOST, software=Software(driver="570.124.06"), gaps=(_SILENT,)),
        subjects=("host",),
    ),
    Example(name="no GPU", kind="quiet", case=Case(host=Host(gpus_on_bus=0), gaps=(_ABSENT,))),
    Example(
        name="it answers",
        kind="quiet",
        case=Case(host=Host(gpus_on_bus=1), gpus=(Gpu(index=0, name="NVIDIA A10"),), software=Software(driver="570")),
    ),
    Example(
        name="WSL",
        kind="quiet",
        case=Case(host=Host(gpus_on_bus=1, kernel="5.15.90.1-microsoft-standard-WSL2"), gaps=(_ABSENT,)),
    ),
    Example(
        name="NVML was not asked",
        kind="lacks",
        case=Case(host=Host(gpus_on_bus=1), gpus=(Gpu(index=0),), software=Software(driver="570")),
    ),
    Example(
        name="the package that asks is missing",
        kind="lacks",
        case=Case(
            host=Host(gpus_on_bus=1),
            gpus=_LOST,
            software=Software(driver="570.124.06"),
            gaps=(Gap(path="software.nvml", reason="not present", detail="nvidia-ml-py is not installed"),),
        ),
    ),
    Example(name="the bus was not read", kind="lacks", case=Case(gaps=(_ABSENT,))),
)
