"""A GPU slows down because it is too hot.

What it means
    The driver lowers the clocks to keep the chip below its temperature limit. That is protection, not wear, but the
    cooling of this GPU does not suffice for the load, or the platform set the limit low.
Why it costs
    A hot GPU runs below its clocks, and in a job with several GPUs all others wait for it at every collective.
How we know
    NVML reports a thermal slowdown (software or hardware) among the clock event reasons while the GPU works, or its
    counter of thermal violation time has grown, or the slowdown temperature is unusually low. Reasons read at idle
    do not count, nor does a temperature of 75 C by itself (https://github.com/stas00/ml-engineering).
Fix
    Airflow and fans first: filters, missing blanking panels, a passively cooled card in a desktop case. Then the
    thermal settings of the platform (BMC, thermal daemon) when the limit itself is low.
When to ignore
    A power cap or a power brake lowers clocks too and is another finding.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpudoctor.model import Case, Evidence, Example, Finding, Gpu, Remedy, Rule, Severity, Unchecked
from gpudoctor.model import gpu_path as path
from gpudoctor.rules.evidence import answering, evidence, subject

RULE = Rule(code="HLT012", name="thermal-limit", severity="error", needs=("gpus",), since="0.1")

THERMAL = ("sw_thermal_slowdown", "hw_thermal_slowdown")
REMEDIES = (
    Remedy(kind="hardware", text="check fans, filters and airflow of this GPU; a passive card needs a server chassis"),
    Remedy(kind="bios", text="fan profile and thermal limits in the BMC or the platform's thermal daemon"),
    Remedy(kind="measure", text="nvidia-smi -q -d TEMPERATURE,PERFORMANCE while the job runs"),
)


def check(case: Case) -> Iterator[Finding | Unchecked]:
    for gpu in answering(case):
        reasons = gpu.throttle_reasons
        hot = [reason for reason in reasons or () if reason in THERMAL]
        violation = gpu.thermal_violation_ms
        slowdown = gpu.temperature_slowdown_c
        if hot and gpu.throttle_state == "load":
            fact = evidence(case, path(gpu, "throttle_reasons"), f"{', '.join(hot)} (load)", "none")
            yield _finding(gpu, RULE.severity, f"slows down under load: {', '.join(hot)}{_celsius(gpu)}", fact)
        elif hot and gpu.throttle_state == "unknown":
            fact = evidence(case, path(gpu, "throttle_reasons"), ", ".join(hot), "none")
            message = f"reported {', '.join(hot)}; whether it worked at that moment is unknown"
            yield _finding(gpu, "warning", message, fact)
        elif violation is not None and violation >= case.threshold(RULE.code, "violation_ms"):
            fact = evidence(case, path(gpu, "thermal_violation_ms"), f"{violation / 1000:.1f} s", "0 s")
            message = (
                f"was held back by heat for {violation / 1000:.1f} s in all; the counter does not say when, so a "
                "reading under load must decide"
            )
            yield _finding(gpu, "warning", message, fact)
        elif slowdown is not None and 0 < slowdown < case.threshold(RULE.code, "low_slowdown_c"):
            fact = evidence(case, path(gpu, "temperature_slowdown_c"), f"{slowdown} C")
            message = f"slows down at {slowdown} C already, an unusually low limit; it is not slowed down now"
            yield _finding(gpu, "warning", message, fact)
        elif violation is None and (reasons is None or gpu.throttle_state != "load"):
            yield Unchecked(
                reason="the clock event reasons were not read under load (`gpudoctor bench-pcie` does)",
                subject=subject(gpu),
            )


def _finding(gpu: Gpu, severity: Severity, message: str, fact: Evidence) -> Finding:
    return Finding(
        rule=RULE.code,
        name=RULE.name,
        severity=severity,
        subject=subject(gpu),
        message=f"the GPU {message}",
        evidence=(fact,),
        remedies=REMEDIES,
        confidence="certain" if severity == RULE.severity else "possible",
    )


def _celsius(gpu: Gpu) -> str:
    return "" if gpu.temperature_c is None else f" at {gpu.temperature_c} C"


EXAMPLES = (
    Example(
        name="thermal slowdown under load",
        kind="fires",
        case=Case(
            gpus=(
                Gpu(index=0, throttle_reasons=(), throttle_state="load"),
                Gpu(index=1, temperature_c=91, throttle_reasons=("hw_thermal_slowdown",), throttle_state="load"),
            )
        ),
        subjects=("gpu:1",),
    ),
    Example(
        name="only the counter since the driver was loaded",
        kind="fires",
        case=Case(gpus=(Gpu(index=0, thermal_violation_ms=64_000.0),)),
        subjects=("gpu:0",),
        severity="warning",
    ),
    Example(
        name="limit set low",
        kind="fires",
        case=Case(gpus=(Gpu(index=0, temperature_slowdown_c=60, thermal_violation_ms=0.0),)),
        subjects=("gpu:0",),
        severity="warning",
    ),
    Example(
        name="thermal slowdown in a paste that does not show the load",
        kind="fires",
        case=Case(gpus=(Gpu(index=0, throttle_reasons=("sw_thermal_slowdown",)),)),
        subjects=("gpu:0",),
        severity="warning",
    ),
    Example(
        name="75 C and busy",
        kind="quiet",
        case=Case(gpus=(Gpu(index=0, temperature_c=75, throttle_reasons=(), throttle_state="load"),)),
    ),
    Example(
        name="power cap is no heat",
        kind="quiet",
        case=Case(gpus=(Gpu(index=0, throttle_reasons=("sw_power_cap",), throttle_state="load"),)),
    ),
    Example(
        name="idle clocks",
        kind="lacks",
        case=Case(gpus=(Gpu(index=0, throttle_reasons=("gpu_idle",), throttle_state="idle"),)),
    ),
)
