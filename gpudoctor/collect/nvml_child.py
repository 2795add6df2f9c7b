"""Runs in a child process: asks NVML field by field. What is refused becomes a gap, a lost GPU keeps what it said."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the model takes longer to import than NVML to answer
    from gpudoctor.model import GapReason, P2PStatus, PathClass

_AFFINITY_WORDS = 16  # 64 CPUs or nodes each: NVML clips nothing up to 1024
_SCOPE_NODE = 0
_NVLINK_GET_SPEED = 164  # field id: MB/s of one link, one direction
_NVLINK_MOST = 36
# NVML numbers the versions 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0, 6.0 (nvmlNvlinkVersion_t in nvml.h)
_NVLINK_VERSIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
_LAST_SLOT = 31  # a virtual machine is told ffffffff:ff:ff for a switch that it cannot see
_CORE_TEMPERATURE = 0
_SLOWDOWN, _MAX_OPERATING = 1, 3  # temperature thresholds
_SM_CLOCK = 1
_THERMAL = 1  # performance policy
_IDLE_PSTATE = 8
_BUSY_PSTATE = 2

_ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_VIRTUALIZATION = {0: "none", 1: "passthrough", 2: "vgpu", 3: "host_vgpu", 4: "host_vsga"}
_REMOTE_TYPES = {0: "gpu", 1: "cpu", 2: "switch"}
_CLOCK_EVENTS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
# Two GPUs of one board (INTERNAL) meet at the switch of the board.
_ANCESTORS: dict[int, PathClass] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P: dict[int, P2PStatus] = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
_P2P_READ, _P2P_WRITE, _P2P_NVLINK = 0, 1, 2  # pynvml's own constant for READ is a tuple by mistake

# NVML error numbers (nvml.h), by what they mean for a fact
_NOT_SUPPORTED = {2, 3, 13, 21, 22, 25, 26}
_NO_PERMISSION = {4, 17}
_NOT_PRESENT = {6, 9, 12, 28}
_LOST = {15: "GPU is lost", 16: "GPU requires a reset"}
_NO_DATA = 21

Answer = dict[str, Any]


class _LostError(Exception):
    """The GPU does not answer any more; what it said so far stands."""

    def __init__(self, text: str, reason: GapReason = "not probed") -> None:
        super().__init__(text)
        self.reason = reason


class _Asker:
    """Calls NVML and turns refusals into gaps."""

    def __init__(self) -> None:
        import pynvml

        self.nvml: Any = pynvml
        self.gaps: list[list[str]] = []

    def get(self, fact: str | None, function: str, *arguments: Any) -> Any:
        """The value, or None with a gap for `fact` (no gap for None). Raises _LostError for a lost GPU."""
        try:
            return _text(getattr(self.nvml, function)(*arguments))
        except self.nvml.NVMLError as error:
            number = getattr(error, "value", None)
            if number in _LOST:
                raise _LostError(_LOST[number]) from None
            if fact is not None:
                self.gaps.append([fact, *_meaning(error)])
        except (AttributeError, UnicodeDecodeError, ValueError, OSError) as error:
            # an older pynvml without this function, or a struct it cannot decode
            if fact is not None:
                self.gaps.append([fact, "not supported", f"{function}: {type(error).__name__}"])
        return None


def _meaning(error: Any) -> tuple[GapReason, str]:
    number = getattr(error, "value", None)
    text = f"NVML: {error}"
    if number == _NO_DATA:
        return "not probed", text
    if number in _NOT_SUPPORTED:
        return "not supported", text
    if number in _NO_PERMISSION:
        return "no permission", text
    return ("not present" if number in _NOT_PRESENT else "not probed"), text


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def query(_payload: Answer, progress: Callable[[Any], None]) -> Answer:
    """Everything, told piece by piece, so that a later hang takes back nothing."""
    try:
        asker = _Asker()
    except ImportError:
        return {"failure": ["not present", "the package nvidia-ml-py is not installed"]}
    try:
        asker.nvml.nvmlInit()
        count = int(asker.nvml.nvmlDeviceGetCount())
    except asker.nvml.NVMLError as error:
        return {"failure": list(_meaning(error))}
    progress({"system": _system(asker, count)})
    answers = []
    for index in range(count):
        answers.append(_one(index))
        progress(answers[-1])
    living = [answer["gpu"]["index"] for answer in answers if not answer["gpu"]["lost"]]
    progress({"pairs": _pairs(living)})
    return {}


def query_one(payload: Answer) -> Answer:
    """One GPU by its NVML index."""
    _Asker().nvml.nvmlInit()
    return _one(payload["index"])


def query_pairs(payload: Answer) -> list[Answer]:
    """The pairs of the given NVML indices."""
    _Asker().nvml.nvmlInit()
    return _pairs(payload["indices"])


def _system(asker: _Asker, count: int) -> Answer:
    cuda = asker.get("software.cuda_driver", "nvmlSystemGetCudaDriverVersion_v2")
    return {
        "count": count,
        "driver": asker.get("software.driver", "nvmlSystemGetDriverVersion"),
        "nvml": asker.get("software.nvml", "nvmlSystemGetNVMLVersion"),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "gaps": asker.gaps,
    }


def _one(index: int) -> Answer:
    asker = _Asker()
    answer: Answer = {"gpu": {"index": index, "lost": False}, "gaps": asker.gaps}
    try:
        try:
            handle = asker.nvml.nvmlDeviceGetHandleByIndex(index)
        except asker.nvml.NVMLError as error:
            reason, text = _meaning(error)
            raise _LostError(_LOST.get(getattr(error, "value", -1), text), reason) from None
        for part in (_identity, _link, _health, _settings, _affinity, _nvlinks, _processes):
            part(asker, handle, answer)
    except _LostError as lost:
        answer["gpu"].update(lost=True, lost_reason=str(lost))
        asker.gaps.append(["", lost.reason, str(lost)])
    return answer


def _identity(asker: _Asker, handle: Any, answer: Answer) -> None:
    gpu = answer["gpu"]
    pci = asker.get("bdf", "nvmlDeviceGetPciInfo", handle)
    if pci is not None:
        gpu["bdf"] = _bdf(pci)
    gpu["name"] = asker.get("name", "nvmlDeviceGetName", handle)
    gpu["uuid"] = asker.get("uuid", "nvmlDeviceGetUUID", handle)
    gpu["serial"] = asker.get("serial", "nvmlDeviceGetSerial", handle)
    gpu["architecture"] = _ARCHITECTURES.get(asker.get("architecture", "nvmlDeviceGetArchitecture", handle))
    capability = asker.get("compute_capability", "nvmlDeviceGetCudaComputeCapability", handle)
    gpu["compute_capability"] = f"{capability[0]}.{capability[1]}" if capability else None
    memory = asker.get("memory_bytes", "nvmlDeviceGetMemoryInfo", handle)
    if memory is not None:
        gpu.update(memory_bytes=int(memory.total), memory_used_bytes=int(memory.used))
    bar1 = asker.get("bar1_bytes", "nvmlDeviceGetBAR1MemoryInfo", handle)
    gpu["bar1_bytes"] = int(bar1.bar1Total) if bar1 is not None else None


def _bdf(pci: Any) -> str:
    """Lower case with a domain of four digits (more where the domain needs them); GPUs are function 0."""
    return f"{int(pci.domain):04x}:{int(pci.bus):02x}:{int(pci.device):02x}.0"


def _link(asker: _Asker, handle: Any, answer: Answer) -> None:
    """The PCIe link, read right after the utilisation that says what the reading means."""
    gpu = answer["gpu"]
    use = asker.get("utilization_pct", "nvmlDeviceGetUtilizationRates", handle)
    gpu["utilization_pct"] = utilization = int(use.gpu) if use is not None else None
    link = {
        "generation": asker.get("pcie.generation", "nvmlDeviceGetCurrPcieLinkGeneration", handle),
        "width": asker.get("pcie.width", "nvmlDeviceGetCurrPcieLinkWidth", handle),
        "max_generation": asker.get("pcie.max_generation", "nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
        "max_width": asker.get("pcie.max_width", "nvmlDeviceGetMaxPcieLinkWidth", handle),
    }
    pstate = asker.get("pstate", "nvmlDeviceGetPerformanceState", handle)
    gpu["pstate"] = pstate = pstate if pstate is not None and 0 <= pstate <= 15 else None
    events = asker.get("throttle_reasons", "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if events is None:  # the name before driver 535
        events = asker.get(None, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if events is not None:
            asker.gaps.pop()
    if events is not None:
        gpu["throttle_reasons"] = [name for bit, name in _CLOCK_EVENTS.items() if events & bit]
    state = _state(utilization, pstate, gpu.get("throttle_reasons"))
    gpu["throttle_state"] = state
    for fact, value in link.items():
        if value == 0:  # virtual machines say so: no link can be seen
            link[fact] = None
            asker.gaps.append([f"pcie.{fact}", "not supported", "NVML: reads 0"])
    gpu["pcie"] = {**link, "state": state}
    gpu["pcie_replays"] = asker.get("pcie_replays", "nvmlDeviceGetPcieReplayCounter", handle)
    answer["system_max_generation"] = asker.get(None, "nvmlDeviceGetMaxPcieLinkGeneration", handle) or None


def _state(utilization: int | None, pstate: int | None, events: Sequence[str] | None) -> str:
    """Load needs work and high clocks: a desktop that draws a little in P8 keeps its slow link, and is healthy."""
    if utilization:
        return "load" if pstate is None or pstate <= _BUSY_PSTATE else "unknown"
    slow = pstate is not None and pstate >= _IDLE_PSTATE
    return "idle" if slow or (utilization == 0 and "gpu_idle" in (events or ())) else "unknown"


def _health(asker: _Asker, handle: Any, answer: Answer) -> None:
    gpu = answer["gpu"]
    gpu["power_w"] = _watts(asker.get("power_w", "nvmlDeviceGetPowerUsage", handle))
    gpu["power_limit_w"] = _watts(asker.get("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", handle))
    default = asker.get("power_default_limit_w", "nvmlDeviceGetPowerManagementDefaultLimit", handle)
    gpu["power_default_limit_w"] = _watts(default)
    gpu["temperature_c"] = asker.get("temperature_c", "nvmlDeviceGetTemperature", handle, _CORE_TEMPERATURE)
    for fact, threshold in (("temperature_slowdown_c", _SLOWDOWN), ("temperature_max_operating_c", _MAX_OPERATING)):
        gpu[fact] = asker.get(fact, "nvmlDeviceGetTemperatureThreshold", handle, threshold)
    gpu["sm_clock_mhz"] = asker.get("sm_clock_mhz", "nvmlDeviceGetClockInfo", handle, _SM_CLOCK)
    gpu["sm_clock_max_mhz"] = asker.get("sm_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK)
    violation = asker.get("thermal_violation_ms", "nvmlDeviceGetViolationStatus", handle, _THERMAL)
    gpu["thermal_violation_ms"] = int(violation.violationTime) / 1e6 if violation is not None else None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _settings(asker: _Asker, handle: Any, answer: Answer) -> None:
    gpu = answer["gpu"]
    mig = asker.get("mig", "nvmlDeviceGetMigMode", handle)
    ecc = asker.get("ecc", "nvmlDeviceGetEccMode", handle)
    persistence = asker.get("persistence", "nvmlDeviceGetPersistenceMode", handle)
    gpu["mig"] = bool(mig[0]) if mig is not None else None
    gpu["ecc"] = bool(ecc[0]) if ecc is not None else None
    gpu["persistence"] = bool(persistence) if persistence is not None else None
    gpu["compute_mode"] = _COMPUTE_MODES.get(asker.get("compute_mode", "nvmlDeviceGetComputeMode", handle))
    gpu["virtualization"] = _VIRTUALIZATION.get(asker.get("virtualization", "nvmlDeviceGetVirtualizationMode", handle))


def _affinity(asker: _Asker, handle: Any, answer: Answer) -> None:
    cpus = asker.get("local_cpus", "nvmlDeviceGetCpuAffinityWithinScope", handle, _AFFINITY_WORDS, _SCOPE_NODE)
    nodes = asker.get("numa_nodes", "nvmlDeviceGetMemoryAffinity", handle, _AFFINITY_WORDS, _SCOPE_NODE)
    answer["gpu"]["memory_node"] = asker.get("memory_node", "nvmlDeviceGetNumaNodeId", handle)
    answer["cpus"] = _bits(cpus)
    answer["nodes"] = _bits(nodes)


def _bits(words: Any) -> list[int] | None:
    if words is None:
        return None
    return [64 * place + bit for place, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1]


def _nvlinks(asker: _Asker, handle: Any, answer: Answer) -> None:
    links: list[Answer] = []
    before = len(asker.gaps)
    for number in range(_NVLINK_MOST):
        state = asker.get("nvlinks", "nvmlDeviceGetNvLinkState", handle, number)
        if state is not None:
            links.append({"link": number, "active": bool(state)})
    if not links:
        del asker.gaps[before + 1 :]  # one reason is enough
        return
    del asker.gaps[before:]  # numbers beyond the last link are no gaps
    speeds = _speeds(asker, handle, [link["link"] for link in links])
    for link in links:
        number = link["link"]
        if not link["active"]:
            continue
        path = f"nvlinks[{number}]"
        version = asker.get(f"{path}.version", "nvmlDeviceGetNvLinkVersion", handle, number)
        link["version"] = _NVLINK_VERSIONS.get(version)
        if version is not None and link["version"] is None:
            asker.gaps.append([f"{path}.version", "not supported", f"NVML: version number {version}"])
        remote = asker.get(f"{path}.remote_bdf", "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
        link["remote_bdf"] = _bdf(remote) if remote is not None and int(remote.device) <= _LAST_SLOT else None
        if remote is not None and link["remote_bdf"] is None:
            asker.gaps.append([f"{path}.remote_bdf", "not present", "NVML: the other end is hidden from this machine"])
        kind = asker.get(f"{path}.remote_type", "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
        link["remote_type"] = _REMOTE_TYPES.get(kind)
        link["speed_gb_s"] = speeds.get(number)
        if number not in speeds:
            asker.gaps.append([f"{path}.speed_gb_s", "not supported", "NVML: no NVLink speed field"])
    answer["gpu"]["nvlinks"] = links


def _speeds(asker: _Asker, handle: Any, links: list[int]) -> dict[int, float]:
    values = asker.get(None, "nvmlDeviceGetFieldValues", handle, [(_NVLINK_GET_SPEED, link) for link in links])
    return {
        link: value.value.uiVal / 1000
        for link, value in zip(links, values or (), strict=False)
        if value.nvmlReturn == 0 and value.value.uiVal
    }


def _processes(asker: _Asker, handle: Any, answer: Answer) -> None:
    found: dict[int, Answer] = {}
    known = False
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        running = asker.get("processes" if not known else None, function, handle)
        known = known or running is not None
        for process in running or ():
            pid = int(process.pid)
            memory = getattr(process, "usedGpuMemory", None)
            name = asker.get(None, "nvmlSystemGetProcessName", pid)
            found[pid] = {"pid": pid, "name": name or None, "memory_bytes": memory}
    if known:
        answer["gpu"]["processes"] = [found[pid] for pid in sorted(found)]


def _pairs(indices: Sequence[int]) -> list[Answer]:
    asker = _Asker()
    handles: dict[int, Any] = {}
    for index in indices:
        try:
            handles[index] = asker.nvml.nvmlDeviceGetHandleByIndex(index)
        except asker.nvml.NVMLError:
            continue  # lost since it was asked about itself
    answers = []
    for (a, handle_a), (b, handle_b) in itertools.combinations(sorted(handles.items()), 2):
        asker.gaps = []
        answers.append({"a": a, "b": b, **_pair(asker, handle_a, handle_b), "gaps": asker.gaps})
    return answers


def _pair(asker: _Asker, a: Any, b: Any) -> Answer:
    p2p = {}
    path = None
    try:
        path = _ANCESTORS.get(asker.get("path", "nvmlDeviceGetTopologyCommonAncestor", a, b))
        for fact, capability in (("p2p_read", _P2P_READ), ("p2p_write", _P2P_WRITE), ("p2p_nvlink", _P2P_NVLINK)):
            status = asker.get(fact, "nvmlDeviceGetP2PStatus", a, b, capability)
            if status in _P2P:
                p2p[fact] = _P2P[status]
    except _LostError as lost:
        asker.gaps.append(["", lost.reason, str(lost)])
    return {"path": path, "p2p": p2p}
