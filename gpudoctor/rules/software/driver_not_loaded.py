"""The PCI bus shows an NVIDIA GPU, and no driver works for it.

What it means
    The kernel module is not loaded (no /proc/driver/nvidia/version), or it is and NVML cannot talk to it. No program
    can use the GPU, whatever is installed.
Why it costs
    The GPU is idle. Frameworks fall back to the CPU without a word, or stop with "no CUDA device".
How we know
    The bus lists a display or 3D controller of NVIDIA, and NVML found no driver. Where NVML was not asked, or lacks
    permission, the rule is not checked.
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
    if not case.host.gpus_on_bus or case.gpus or "microsoft" in (case.host.kernel or "").lower():
        return
    gap = case.gap("gpus") or case.gap("software.driver")
    if gap is None or gap.reason not in ("not present", "not supported"):
        yield Unchecked(reason=f"NVML was not asked: {gap.reason if gap else 'unknown'}")
        return
    detail = " ".join((gap.detail or "").split())
    inside = case.host.container not in (None, "none")
    loaded = case.software.driver is not None
    state = f"driver {case.software.driver} is loaded but does not answer" if loaded else "no driver is loaded"
    start = Remedy(kind="config", text="docker run --gpus all, or the device plugin in Kubernetes")
    load = Remedy(kind="command", text="sudo modprobe nvidia", undo="sudo modprobe -r nvidia")
    yield Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=RULE.severity,
        subject="host",
        message=f"{_count(case.host.gpus_on_bus)} on the PCI bus, and {state}" + (f" ({detail})" if detail else ""),
        evidence=(
            evidence(case, "host.gpus_on_bus", case.host.gpus_on_bus),
            evidence(case, "software.driver", case.software.driver or gap.reason, "a driver that answers NVML"),
        ),
        remedies=(
            *((start,) if inside else ()),
            load,
            Remedy(
                kind="command",
                text="install the driver that fits the running kernel; dmesg | grep -i nvrm says why not",
            ),
        ),
        confidence="likely" if inside or loaded else "certain",
    )


def _count(number: int) -> str:
    return "one NVIDIA GPU is" if number == 1 else f"{number} NVIDIA GPUs are"


_NO_DRIVER = Gap(path="gpus", reason="not present", detail="NVML: driver not loaded")

EXAMPLES = (
    Example(
        name="module not loaded",
        kind="fires",
        case=Case(host=Host(gpus_on_bus=2, kernel="6.8.0-45-generic"), gaps=(_NO_DRIVER,)),
        subjects=("host",),
    ),
    Example(
        name="module loaded, library of another version",
        kind="fires",
        case=Case(
            host=Host(gpus_on_bus=1),
            software=Software(driver="570.124.06"),
            gaps=(Gap(path="gpus", reason="not present", detail="NVML: driver/library version mismatch"),),
        ),
        subjects=("host",),
    ),
    Example(name="no GPU", kind="quiet", case=Case(host=Host(gpus_on_bus=0), gaps=(_NO_DRIVER,))),
    Example(name="it answers", kind="quiet", case=Case(host=Host(gpus_on_bus=1), gpus=(Gpu(index=0),))),
    Example(
        name="WSL",
        kind="quiet",
        case=Case(host=Host(gpus_on_bus=1, kernel="5.15.90.1-microsoft-standard-WSL2"), gaps=(_NO_DRIVER,)),
    ),
    Example(
        name="NVML was not asked",
        kind="lacks",
        case=Case(host=Host(gpus_on_bus=1), gaps=(Gap(path="gpus", reason="not probed"),)),
    ),
    Example(name="the bus was not read", kind="lacks", case=Case(gaps=(_NO_DRIVER,))),
)
