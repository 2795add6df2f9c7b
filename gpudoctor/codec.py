"""The only place that encodes, decodes, validates and publishes a JSON Schema.

msgspec does the typed work over the standard dataclasses of `model`. Two things it leaves to us: it ignores
unknown keys of a dataclass, and it maps NaN and infinities to null. Both are refused here, with the path.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from typing import Any, TypeVar

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import SCHEMA, Case, Envelope

T = TypeVar("T")


def to_builtins(value: object) -> Any:
    """Plain dicts, lists and scalars for a dataclass instance."""
    import msgspec

    _refuse_non_finite(value, "$")
    return msgspec.to_builtins(value)


def encode(value: object, *, indent: int | None = 2) -> str:
    """JSON text for a model instance; ValueError names the path of a number that is not finite."""
    import msgspec

    _refuse_non_finite(value, "$")
    raw = msgspec.json.encode(value)
    return (msgspec.json.format(raw, indent=indent) if indent else raw).decode()


def decode(text: str | bytes, kind: type[T], *, what: str = "JSON") -> T:
    """A model instance from JSON text. GpudoctorError names `what` and the path of the wrong field."""
    import msgspec

    try:
        raw = json.loads(text, parse_constant=_refuse_constant)
        value = msgspec.convert(raw, kind)
        _refuse_unknown_keys(raw, kind, "$")
        _refuse_non_finite(value, "$")
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        # json.JSONDecodeError and UnicodeDecodeError are ValueErrors
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise GpudoctorError(
            f"cannot read {what}: {reason}", "a file written by `gpudoctor capture` is expected"
        ) from None
    return value


def schema(kind: type = Envelope) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the envelope, or of another model class."""
    import msgspec

    document: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(kind)}
    for definition in document.get("$defs", {}).values():
        if definition.get("type") == "object" and "properties" in definition:
            definition["additionalProperties"] = False
    return document


def encode_envelope(envelope: Envelope, *, indent: int | None = 2) -> str:
    """The envelope as JSON text; the measurements of the Case stand once, at the envelope's `measurements`."""
    if envelope.case is not None and envelope.case.measurements:
        case = dataclasses.replace(envelope.case, measurements=())
        own = envelope.measurements or envelope.case.measurements
        envelope = dataclasses.replace(envelope, case=case, measurements=own)
    return encode(envelope, indent=indent)


def decode_case(text: str | bytes, *, what: str) -> tuple[Case, ...]:
    """The Case (or Cases) in an envelope or a bare Case."""
    try:
        head = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise GpudoctorError(f"cannot read {what}: {reason}", "a JSON file written by gpudoctor is expected") from None
    if not isinstance(head, dict):
        raise GpudoctorError(f"cannot read {what}: $: a JSON object is expected, this is {type(head).__name__}")
    if "schema" not in head:
        return (decode(text, Case, what=what),)
    if head["schema"] != SCHEMA:
        raise GpudoctorError(
            f"cannot read {what}: $.schema: {head['schema']!r} is not {SCHEMA!r}", "update gpudoctor, or capture again"
        )
    envelope = decode(text, Envelope, what=what)
    cases = envelope.cases or ((envelope.case,) if envelope.case else ())
    if not cases:
        raise GpudoctorError(
            f"cannot read {what}: the envelope holds no case", "use a file that a command wrote with --json"
        )
    if len(cases) == 1 and envelope.measurements:
        cases = (dataclasses.replace(cases[0], measurements=envelope.measurements),)
    return cases


def _refuse_constant(name: str) -> float:
    raise ValueError(f"the number {name} is not valid JSON")


def _refuse_non_finite(value: object, path: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path}: {value} is not a finite number")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _refuse_non_finite(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_non_finite(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _refuse_non_finite(item, f"{path}[{number}]")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _refuse_unknown_keys(raw: object, kind: Any, path: str) -> None:
    """Walk raw JSON beside the type; the type has validated it already, so shapes agree."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [part for part in typing.get_args(kind) if part is not type(None)]
        if raw is not None and len(inner) == 1:
            _refuse_unknown_keys(raw, inner[0], path)
    elif origin is tuple and isinstance(raw, list):
        arguments = typing.get_args(kind)
        for number, item in enumerate(raw):
            part = arguments[0] if len(arguments) == 2 and arguments[1] is Ellipsis else arguments[number]
            _refuse_unknown_keys(item, part, f"{path}[{number}]")
    elif origin is dict and isinstance(raw, dict):
        for key, item in raw.items():
            _refuse_unknown_keys(item, typing.get_args(kind)[1], f"{path}[{key!r}]")
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(raw, dict):
        hints = _hints(kind)
        for key, item in raw.items():
            if key not in hints:
                raise ValueError(f"{path}: unknown key {key!r}")
            _refuse_unknown_keys(item, hints[key], f"{path}.{key}")
