"""What the operating system lets this process use, and what kind of machine it is: /proc, cgroups, DMI."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpudoctor.collect.files import Files, Notebook, number_list
from gpudoctor.model import Host, Limits

_NO_LIMIT = 1 << 60  # cgroup v1 writes about 2**63 for a memory limit that is none


def host(files: Files, notebook: Notebook) -> Host:
    """The machine itself. `iommu` and `gpus_on_bus` come from sysfs.py."""
    cpuinfo = files.read("proc/cpuinfo").text or ""
    facts: dict[str, str | int | None] = {
        "hostname": files.read("proc/sys/kernel/hostname").text or None,
        "kernel": files.read("proc/sys/kernel/osrelease").text or None,
        "cpu_model": _field(cpuinfo, "model name"),
        "cpu_count": _cpu_count(files, cpuinfo),
        "sockets": len(set(re.findall(r"^physical id\s*:\s*(\d+)", cpuinfo, re.MULTILINE))) or None,
        "memory_bytes": _memory(files),
        "virtualization": _virtualization(files, cpuinfo),
        "product": _product(files),
        "container": _container(files),
    }
    for name, value in facts.items():
        if value is None:
            notebook.gap(f"host.{name}", "not present", "neither /proc nor /sys tells")
    linux = files.exists("proc/sys/kernel/osrelease")
    notebook.source("host", "/proc, /sys")
    return Host(os="linux" if linux else sys.platform if files.live else None, **facts)  # type: ignore[arg-type]


def _field(cpuinfo: str, name: str) -> str | None:
    match = re.search(rf"^{name}\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else None


def _cpu_count(files: Files, cpuinfo: str) -> int | None:
    online = number_list(files.read("sys/devices/system/cpu/online").text)
    return len(online) if online else len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or None


def _memory(files: Files) -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+)\s*kB", files.read("proc/meminfo").text or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _product(files: Files) -> str | None:
    parts = [files.read(f"sys/class/dmi/id/{name}").text for name in ("sys_vendor", "product_name")]
    return " ".join(part for part in parts if part) or None


_VIRTIO_VENDOR = 0x1AF4
_HYPERVISOR_WORDS = (
    ("vmware", "vmware"),
    ("virtualbox", "virtualbox"),
    ("innotek", "virtualbox"),
    ("parallels", "parallels"),
    ("xen", "xen"),
    ("microsoft", "hyperv"),
    ("hyperv", "hyperv"),
    ("amazon ec2", "kvm"),
    ("google", "kvm"),
    ("qemu", "kvm"),
    ("kvm", "kvm"),
    ("openstack", "kvm"),
    ("bochs", "kvm"),
)


def _virtualization(files: Files, cpuinfo: str) -> str | None:
    """The hypervisor, "none" on bare metal, "vm" when only the CPU flag tells, None when nothing does."""
    if "microsoft" in (files.read("proc/sys/kernel/osrelease").text or "").lower():
        return "wsl"
    kind = files.read("sys/hypervisor/type").text
    if kind:
        return kind
    flags = _field(cpuinfo, "flags")
    # The flag is the processor's own word, so the maker's name of a bare-metal cloud machine does not mislead.
    if flags is not None and "hypervisor" not in flags.split():
        return "none"
    # Without DMI (small virtual machine monitors have none) the guest's clock names the hypervisor.
    clocks = files.read("sys/devices/system/clocksource/clocksource0/available_clocksource").text or ""
    told = " ".join(((_product(files) or ""), files.read("sys/class/dmi/id/bios_vendor").text or "", clocks)).lower()
    for word, name in _HYPERVISOR_WORDS:
        if word in told:
            return name
    if _has_virtio(files):
        return "kvm"
    if flags is not None:
        return "vm"
    return None if not told.strip() else "none"


_CONTAINER_WORDS = (
    ("docker", "docker"),
    ("libpod", "podman"),
    ("containers/storage", "podman"),
    ("containerd", "containerd"),
    ("lxc", "lxc"),
    ("apptainer", "apptainer"),
    ("singularity", "singularity"),
)


def _has_virtio(files: Files) -> bool:
    """Virtio devices (PCI vendor 1af4): QEMU and the small monitors on KVM have them, the other makers do not."""
    bus = "sys/bus/pci/devices"
    found = any(files.number(f"{bus}/{name}/vendor") == _VIRTIO_VENDOR for name in files.names(bus))
    return found or bool(files.names("sys/bus/virtio/devices"))


def _container(files: Files) -> str | None:
    """The kind of container around this process, "none" outside of one, None when /proc is not readable."""
    told = files.read("run/systemd/container").text
    own = files.read("proc/self/cgroup").text
    environment = files.read("proc/1/environ").text or ""
    mounts = files.read("proc/self/mountinfo").text or ""
    groups = f"{own or ''}\n{files.read('proc/1/cgroup').text or ''}"
    if "kubepods" in groups or files.exists("run/secrets/kubernetes.io"):
        return "kubernetes"
    if files.exists("run/.containerenv"):
        return "podman"
    if files.exists(".dockerenv") or "/docker" in groups:
        return "docker"
    match = re.search(r"(?:^|\0)container=([a-z0-9-]+)", environment)
    if told or match:
        return told or (match[1] if match else None)
    # The mounts of a host name its containers' file systems too; only what lies at "/" is this process's own.
    top = re.search(r"^\S+ \S+ \S+ \S+ / .* - overlay \S+ (.*)$", mounts, re.MULTILINE)
    for word, name in _CONTAINER_WORDS:
        if word in groups or (top and word in top[1]):
            return name
    return None if own is None else "none"


def limits(files: Files, notebook: Notebook) -> Limits:
    """What this process may use, from /proc/self and the cgroups above it (v1 and v2)."""
    groups = _Groups(files)
    quota, quota_unlimited = _cpu_quota(groups)
    periods, throttled = _cpu_stat(groups)
    memory, memory_unlimited = _memory_limit(groups, _memory(files))
    memlock, memlock_unlimited = _resource(files, "Max locked memory")
    nofile, _ = _resource(files, "Max open files")
    shm, shm_free = _shared_memory(files)
    load = (files.read("proc/loadavg").text or "").split()
    facts = Limits(
        allowed_cpus=_allowed(files, "Cpus_allowed_list", "sys/devices/system/cpu/online", groups.cpuset("cpus")),
        allowed_nodes=_allowed(files, "Mems_allowed_list", "sys/devices/system/node/online", groups.cpuset("mems")),
        cpu_quota=quota,
        cpu_quota_unlimited=quota_unlimited,
        throttled_periods=throttled,
        periods=periods,
        memory_bytes=memory,
        memory_unlimited=memory_unlimited,
        shm_bytes=shm,
        shm_free_bytes=shm_free,
        memlock_bytes=memlock,
        memlock_unlimited=memlock_unlimited,
        nofile=nofile,
        load_average=float(load[0]) if load and re.fullmatch(r"\d+(\.\d+)?", load[0]) else None,
    )
    unlimited = {"cpu_quota": quota_unlimited, "memory_bytes": memory_unlimited, "memlock_bytes": memlock_unlimited}
    for name in Limits.__dataclass_fields__:
        if getattr(facts, name) is None:
            detail = "there is no limit" if unlimited.get(name) else "neither /proc nor a cgroup tells"
            notebook.gap(f"limits.{name}", "not present", detail)
    notebook.source("limits", "/proc/self, cgroups")
    return facts


def _allowed(files: Files, field: str, online_path: str, cpuset: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The kernel's list names what might be plugged in later, too: only what is online counts."""
    match = re.search(rf"^{field}:\s*(\S+)", files.read("proc/self/status").text or "", re.MULTILINE)
    allowed = number_list(match[1]) if match else None
    if allowed is None:
        return cpuset
    for other in (number_list(files.read(online_path).text), cpuset):
        if other:
            allowed = tuple(number for number in allowed if number in set(other))
    return allowed


def _resource(files: Files, name: str) -> tuple[int | None, bool | None]:
    """The soft limit, and whether it is unlimited."""
    match = re.search(rf"^{name}\s+(\d+|unlimited)", files.read("proc/self/limits").text or "", re.MULTILINE)
    if match is None:
        return None, None
    return (None, True) if match[1] == "unlimited" else (int(match[1]), False)


def _shared_memory(files: Files) -> tuple[int | None, int | None]:
    """Size and free bytes of /dev/shm; a recorded tree tells only the size that was mounted."""
    if files.live and hasattr(os, "statvfs"):
        try:
            found = os.statvfs("/dev/shm")  # noqa: S108  # looked at, not written to
        except OSError:
            return None, None
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    for line in reversed((files.read("proc/self/mountinfo").text or "").splitlines()):
        mount = re.match(r"\S+ \S+ \S+ \S+ /dev/shm .* - tmpfs \S+ (\S+)", line)
        size = re.search(r"\bsize=(\d+)k\b", mount[1]) if mount else None
        if size:
            return int(size[1]) * 1024, None
    return None, None


@dataclass(frozen=True)
class _Mount:
    root: str
    point: str
    version: int
    controllers: frozenset[str]


class _Groups:
    """The cgroups of this process: for each controller the directories from its own group up to the mount."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._mounts = _mounts(files.read("proc/self/mountinfo").text or "")
        self._paths: list[tuple[frozenset[str], str]] = []
        for line in (files.read("proc/self/cgroup").text or "").splitlines():
            number, _, rest = line.partition(":")
            names, colon, path = rest.partition(":")
            if number.isdigit() and colon:
                self._paths.append((frozenset(filter(None, names.split(","))), path))

    def values(self, controller: str, v1: str, v2: str) -> list[tuple[int, str, str]]:
        """(version, directory, text) of a file, from the process's own group upwards, in every hierarchy."""
        found = []
        for mount in self._mounts:
            if mount.version == 1 and controller not in mount.controllers:
                continue
            for directory in self._directories(mount):
                text = self._files.read(f"{directory}/{v1 if mount.version == 1 else v2}").text
                if text is not None:
                    found.append((mount.version, directory, text))
        return found

    def cpuset(self, what: str) -> tuple[int, ...] | None:
        for _, _, text in self.values("cpuset", f"cpuset.effective_{what}", f"cpuset.{what}.effective"):
            numbers = number_list(text)
            if numbers:
                return numbers
        return None

    def text(self, path: str) -> str | None:
        return self._files.read(path).text

    def _directories(self, mount: _Mount) -> list[str]:
        path = next(
            (path for names, path in self._paths if (not names if mount.version == 2 else names & mount.controllers)),
            None,
        )
        if path is None:
            return []
        # In a container the mount may show only a part of the tree whose full path the kernel gives.
        if mount.root != "/" and (path == mount.root or path.startswith(mount.root + "/")):
            path = path[len(mount.root) :]
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts or not self._files.exists(f"{mount.point}/{inner}"):
            inner = PurePosixPath()
        return [str(PurePosixPath(mount.point) / part) for part in (inner, *inner.parents)]


def _mounts(mountinfo: str) -> list[_Mount]:
    mounts: dict[str, _Mount] = {}
    for line in mountinfo.splitlines():
        match = re.match(r"\S+ \S+ \S+ (\S+) (\S+) .* - (cgroup2?) \S+ (\S+)", line)
        if match:
            version = 2 if match[3] == "cgroup2" else 1
            mounts[match[2]] = _Mount(match[1], match[2], version, frozenset(match[4].split(",")))
    return list(mounts.values())


def _tightest(values: list[float | None]) -> tuple[float | None, bool | None]:
    """The lowest limit and False, (None, True) when all say that there is none, (None, None) when nobody says."""
    limited = [value for value in values if value is not None]
    if limited:
        return min(limited), False
    return None, True if values else None


def _cpu_quota(groups: _Groups) -> tuple[float | None, bool | None]:
    values: list[float | None] = []
    for version, directory, text in groups.values("cpu", "cpu.cfs_quota_us", "cpu.max"):
        words = text.split()
        period = groups.text(f"{directory}/cpu.cfs_period_us") if version == 1 else (words[1:] or ["100000"])[0]
        if words and words[0] in ("max", "-1"):
            values.append(None)
        elif words and words[0].isdigit() and period and period.isdigit() and int(period) > 0:
            values.append(int(words[0]) / int(period))
    return _tightest(values)


def _memory_limit(groups: _Groups, machine: int | None) -> tuple[int | None, bool | None]:
    values: list[float | None] = []
    for _, _, text in groups.values("memory", "memory.limit_in_bytes", "memory.max"):
        if text == "max" or (text.isdigit() and int(text) >= min(_NO_LIMIT, machine or _NO_LIMIT)):
            values.append(None)  # a limit above the machine's memory limits nothing
        elif text.isdigit():
            values.append(int(text))
    limit, unlimited = _tightest(values)
    return None if limit is None else int(limit), unlimited


def _cpu_stat(groups: _Groups) -> tuple[int | None, int | None]:
    """Periods and throttled periods of the group that was throttled most, from its start on."""
    found: list[tuple[int, int]] = []
    for _, _, text in groups.values("cpu", "cpu.stat", "cpu.stat"):
        pairs = dict(line.split()[:2] for line in text.splitlines() if len(line.split()) >= 2)
        if pairs.get("nr_periods", "").isdigit() and pairs.get("nr_throttled", "").isdigit():
            found.append((int(pairs["nr_throttled"]), int(pairs["nr_periods"])))
    if not found:
        return None, None
    throttled, periods = max(found)
    return periods, throttled
