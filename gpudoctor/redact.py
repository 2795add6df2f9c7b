"""Stable neutral tokens for host names, users, UUIDs, serials and addresses, so that a Case can be shown to others.

The same value becomes the same token everywhere in one Case, so what belonged together still does. BDFs, model
names, sizes and all numbers stay: they are what a diagnosis rests on.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from gpudoctor.model import Case

T = TypeVar("T")

_UUID = re.compile(r"(?<![0-9a-fA-F-])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![0-9a-fA-F-])")
_IP4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)")
_IP6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:.])")
_MAC = re.compile(r"(?<![0-9a-fA-F:-])[0-9a-fA-F]{2}(?:([:-])[0-9a-fA-F]{2})(?:\1[0-9a-fA-F]{2}){4}(?![0-9a-fA-F:-])")
_GUID = re.compile(r"(?<![0-9a-fA-Fx:])(?:0x[0-9a-fA-F]{16}|[0-9a-fA-F]{4}(?::[0-9a-fA-F]{4}){3})(?![0-9a-fA-F:])")
_HOME = re.compile(r"(/home/|/Users/|\\Users\\|/export/home/|/data/home/|/nfs/home/)([^/\\\s:'\",;]+)")
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_PROMPT = re.compile(r"(?<![\w.+-])([a-z_][\w.-]*)@([A-Za-z][\w.-]*)(?=[:\s~$#]|$)")
# Addresses that name nobody.
_NEUTRAL_HOSTS = {"localhost", "localhost.localdomain", "none", "unknown"}
_USER_NAMES = {"root", "user", "ubuntu", "shared", "public"}
_ADDRESS_VARIABLES = ("MASTER_ADDR",)


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

    def word(self, kind: str, value: str) -> None:
        """Remember a name that is told by its place (a host name, a serial), to find it in free text too."""
        if len(value) > 1 and value.lower() not in self._words:
            self._words[value.lower()] = self.token(kind, value)
            names = sorted(self._words, key=len, reverse=True)
            self._pattern = re.compile(
                r"(?<![A-Za-z0-9_])(?:" + "|".join(map(re.escape, names)) + r")(?![A-Za-z0-9_])", re.IGNORECASE
            )

    def text(self, text: str) -> str:
        """Free text with every name and address in it replaced."""
        text = _HOME.sub(lambda match: match[1] + self._user(match[2]), text)
        text = _MAIL.sub(lambda match: self.token("mail", match[0]), text)
        text = _UUID.sub(lambda match: self.token("uuid", match[0]), text)
        text = _MAC.sub(lambda match: self.token("mac", match[0]), text)
        text = _GUID.sub(lambda match: self.token("guid", match[0]), text)
        text = _IP4.sub(self._ip, text)
        text = _IP6.sub(self._ip, text)
        text = _PROMPT.sub(lambda match: f"{self._user(match[1])}@{self._host(match[2])}", text)
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: self._words[match[0].lower()], text)
        return text

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
    for kind, name in _told_by_place(case):
        tokens.word(kind, name)
    redacted = _map_strings(case, tokens.text)
    if redacted.host.hostname is not None and case.host.hostname is not None:
        hostname = case.host.hostname
        neutral = hostname if hostname.lower() in _NEUTRAL_HOSTS else tokens.token("host", hostname)
        redacted = dataclasses.replace(redacted, host=dataclasses.replace(redacted.host, hostname=neutral))
    return redacted


def redact_text(text: str) -> str:
    """Free text with neutral tokens for what is known by its form."""
    return _Tokens().text(text)


def _told_by_place(case: Case) -> Iterable[tuple[str, str]]:
    names: list[tuple[str, str]] = []
    hostname = case.host.hostname
    if hostname and hostname.lower() not in _NEUTRAL_HOSTS:
        names.append(("host", hostname))
        if "." in hostname:
            names.append(("host", hostname.partition(".")[0]))
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

    def keep(text: str) -> str:
        found.append(text)
        return text

    _map_strings(value, keep)
    return found


def _map_strings(value: T, change: Callable[[str], str]) -> T:
    """The same value with every string in it (dictionary keys too) changed."""
    return _mapped(value, change)  # type: ignore[no-any-return]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _mapped(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return value
