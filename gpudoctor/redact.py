"""Stable neutral tokens for host names, users, UUIDs, serials and addresses, so that a Case can be shown to others.

The same value becomes the same token everywhere in one Case, so what belonged together still does. BDFs, model
names, sizes and all numbers stay: they are what a diagnosis rests on.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal

from gpudoctor.model import Case

_UUID = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![0-9a-fA-F-])")
_IP4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)")
_IP6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:.])")
_MAC = re.compile(r"(?<![0-9a-fA-F:-])[0-9a-fA-F]{2}(?:([:-])[0-9a-fA-F]{2})(?:\1[0-9a-fA-F]{2}){4}(?![0-9a-fA-F:-])")
_GUID = re.compile(r"(?<![0-9a-fA-Fx:])(?:0x[0-9a-fA-F]{16}|[0-9a-fA-F]{4}(?::[0-9a-fA-F]{4}){3})(?![0-9a-fA-F:])")
_HOME = re.compile(r"(/home/|/Users/|\\Users\\|/export/home/|/data/home/|/nfs/home/)([^/\\\s:'\",;]+)")
_ENX = re.compile(r"(?<![\w-])enx[0-9a-f]{12}(?![\w-])")  # an interface named after its MAC address
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_PROMPT = re.compile(r"(?<![\w.+-])([a-z_][\w.-]*)@([A-Za-z][\w.-]*)(?=[:\s~$#]|$)")
_NEUTRAL_HOSTS = {"localhost", "localhost.localdomain", "none", "unknown"}
_USER_NAMES = {"root", "user", "ubuntu", "shared", "public"}
# A machine or user of such a name is redacted where its place tells that it is one, not in free text.
_COMMON_WORDS = {
    *(
        "gpu",
        "gpus",
        "host",
        "linux",
        "node",
        "train",
        "training",
        "python",
        "torch",
        "cuda",
        "nccl",
        "nvidia",
        "docker",
    ),
    *("podman", "kubernetes", "idle", "load", "test", "data", "model", "server", "worker", "master", "main", "local"),
    *("home", "work", "build", "cluster", "compute", "login", "head", "script", "image", "images", "debian", "fedora"),
}
_SHORTEST_WORD = 4
_ADDRESS_VARIABLES = ("MASTER_ADDR",)

Mode = Literal["keep", "form", "free"]
# What a diagnosis rests on is kept (a version may look like an address); keys keep their shape and lose only UUIDs.
_KEPT: dict[str, set[str]] = {
    "Software": {"driver", "nvml", "cuda_driver", "nccl", "torch", "torch_cuda", "python"},
    "Host": {"hostname", "os", "kernel", "cpu_model", "virtualization", "container", "iommu"},
    "Gpu": {"name", "bdf", "architecture", "compute_capability", "root", "compute_mode", "virtualization", "serial"},
    "PcieHop": {"bdf"},
    "Acs": {"bdf", "on"},
    "Drive": {"name", "bdf", "root"},
    "NvLink": {"remote_bdf", "remote_type"},
    "Nic": {"bdf", "root", "state"},
    "Profile": {"name", "figures", "thresholds"},
    "WatchRecord": {"torch", "device"},
    "Measurement": {"metric", "unit"},
}
_KEYS: dict[str, set[str]] = {
    "Pair": {"a", "b"},
    "Gap": {"path"},
    "Source": {"path"},
    "Conflict": {"path"},
    "Nic": {"name"},
    "Measurement": {"subject"},
}


class _Tokens:
    """Hands out tokens; the words known to be names are replaced wherever they stand alone."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._words: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def token(self, kind: str, value: str) -> str:
        key = (kind, value.lower())
        if key not in self._given:
            self._counts[kind] = number = self._counts.get(kind, 0) + 1
            if kind == "uuid":
                self._given[key] = f"00000000-0000-0000-0000-{number:012d}"
            elif kind == "serial":
                self._given[key] = f"{number:013d}"
            else:
                self._given[key] = f"{kind}-{number}"
        return self._given[key]

    def alias(self, kind: str, value: str, token: str) -> None:
        """Another name of what has a token already."""
        self._given.setdefault((kind, value.lower()), token)

    def word(self, kind: str, value: str) -> None:
        """Remember a name that is told by its place (a host name, a serial), to find it in free text too."""
        known = value.lower() in self._words or value.lower() in _COMMON_WORDS
        if len(value) >= _SHORTEST_WORD and not known:
            self._words[value.lower()] = self.token(kind, value)
            names = sorted(self._words, key=len, reverse=True)
            self._pattern = re.compile(
                # not a part of another word, of a path or of a file name
                r"(?<![\w./\\-])(?:" + "|".join(map(re.escape, names)) + r")(?![\w/\\-]|\.\w)",
                re.IGNORECASE,
            )

    def change(self, text: str, mode: Mode) -> str:
        if mode == "keep":
            return text
        text = self._by_form(text)
        if mode == "free" and self._pattern is not None:
            text = self._pattern.sub(lambda match: self._words.get(match[0].lower(), "redacted"), text)
        return text

    def _by_form(self, text: str) -> str:
        text = _HOME.sub(lambda match: match[1] + self._user(match[2]), text)
        text = _MAIL.sub(lambda match: self.token("mail", match[0]), text)
        text = _UUID.sub(lambda match: self.token("uuid", match[0]), text)
        text = _ENX.sub(lambda match: self.token("enx", match[0]), text)
        text = _MAC.sub(lambda match: self.token("mac", match[0]), text)
        text = _GUID.sub(lambda match: self.token("guid", match[0]), text)
        text = _IP4.sub(self._ip, text)
        text = _IP6.sub(self._ip, text)
        return _PROMPT.sub(lambda match: f"{self._user(match[1])}@{self._host(match[2])}", text)

    def _user(self, name: str) -> str:
        if name.lower() in _USER_NAMES or re.fullmatch(r"user-\d+", name):
            return name
        return self.token("user", name)

    def _host(self, name: str) -> str:
        if name.lower() in _NEUTRAL_HOSTS or re.fullmatch(r"host-\d+", name):
            return name
        return self.token("host", name)

    def _ip(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:  # a version number, a time
            return match[0]
        if address.is_loopback or address.is_unspecified:
            return match[0]
        return self.token("ip", match[0])


def redact_case(case: Case) -> Case:
    """The Case with neutral tokens in place of what tells whose machine it is; also in watched records and sources.

    Known by their place: host name, serials, the address of the master. Known by their form: UUIDs, IP, MAC and
    mail addresses, GUIDs, users in home paths and prompts.
    """
    tokens = _Tokens()
    hostname = case.host.hostname
    if hostname and hostname.lower() not in _NEUTRAL_HOSTS:
        tokens.alias("host", hostname.partition(".")[0], tokens.token("host", hostname))
        tokens.word("host", hostname)
        tokens.word("host", hostname.partition(".")[0])
    for kind, name in _told_by_place(case):
        tokens.word(kind, name)
    redacted: Case = _mapped(case, tokens.change, "free")
    if hostname and hostname.lower() not in _NEUTRAL_HOSTS:
        host = dataclasses.replace(redacted.host, hostname=tokens.token("host", hostname))
        redacted = dataclasses.replace(redacted, host=host)
    gpus = tuple(
        dataclasses.replace(gpu, serial=tokens.token("serial", gpu.serial)) if gpu.serial else gpu
        for gpu in redacted.gpus
    )
    variables = dict(redacted.software.environment or {})
    for name in _ADDRESS_VARIABLES:
        value = (case.software.environment or {}).get(name)
        if value and variables.get(name) == value and value.lower() not in _NEUTRAL_HOSTS and not _is_ip(value):
            variables[name] = tokens.token("host", value)
    if redacted.software.environment is not None:
        software = dataclasses.replace(redacted.software, environment=variables)
        redacted = dataclasses.replace(redacted, software=software)
    return dataclasses.replace(redacted, gpus=gpus)


def redact_text(text: str) -> str:
    """Free text with neutral tokens for what is known by its form."""
    return _Tokens().change(text, "free")


def _told_by_place(case: Case) -> Iterable[tuple[str, str]]:
    names: list[tuple[str, str]] = []
    for variable in _ADDRESS_VARIABLES:
        value = (case.software.environment or {}).get(variable)
        if value and value.lower() not in _NEUTRAL_HOSTS and not _is_ip(value):
            names.append(("host", value))
    names += [("serial", gpu.serial) for gpu in case.gpus if gpu.serial]
    homes = [match[2] for text in _strings(case) for match in _HOME.finditer(text)]
    names += [("user", name) for name in homes if name.lower() not in _USER_NAMES and len(name) > 3]
    return names


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _strings(value: object) -> Iterable[str]:
    found: list[str] = []

    def keep(text: str, _mode: Mode) -> str:
        found.append(text)
        return text

    _mapped(value, keep, "free")
    return found


def _mapped(value: Any, change: Callable[[str, Mode], str], mode: Mode) -> Any:
    """The same value with every string in it (dictionary keys too) changed as its place allows."""
    if isinstance(value, str):
        return change(value, mode)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        modes = _modes(type(value))
        fields = {name: _mapped(getattr(value, name), change, modes[name]) for name in modes}
        return dataclasses.replace(value, **fields)
    if isinstance(value, tuple):
        return tuple(_mapped(item, change, mode) for item in value)
    if isinstance(value, dict):
        return {_mapped(key, change, mode): _mapped(item, change, mode) for key, item in value.items()}
    return value


@functools.cache
def _modes(kind: type) -> dict[str, Mode]:
    """How the strings of each field may change; words of a closed set never do."""
    hints = typing.get_type_hints(kind)
    modes: dict[str, Mode] = {}
    for field in dataclasses.fields(kind):
        if "Literal" in str(hints[field.name]) or field.name in _KEPT.get(kind.__name__, ()):
            modes[field.name] = "keep"
        else:
            modes[field.name] = "form" if field.name in _KEYS.get(kind.__name__, ()) else "free"
    return modes
