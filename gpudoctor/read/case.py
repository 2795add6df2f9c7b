"""A Case, or an envelope that holds one, as gpudoctor itself writes it."""

from __future__ import annotations

import dataclasses
import json
import re

from gpudoctor import codec
from gpudoctor.model import Case

KIND = "case"
_FIELDS = frozenset(field.name for field in dataclasses.fields(Case))
_OURS = re.compile(r'"schema"\s*:\s*"gpudoctor/|"(?:gpus|host|limits|software|pairs)"\s*:')
_HEAD = 4000  # characters looked at when the JSON does not parse


def is_case(text: str) -> bool:
    """Whether `text` looks like ours; also when it is damaged, so that the reader can say where."""
    text = text.lstrip("\ufeff \t\r\n")
    if not text.startswith("{"):
        return False
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return _OURS.search(text[:_HEAD]) is not None
    return "schema" in document or bool(_FIELDS & document.keys()) or not document


def read_cases(text: str, file: str) -> tuple[Case, ...]:
    """The Cases in `text`; GpudoctorError names `file` and the path of the wrong field."""
    return codec.decode_case(text.lstrip("\ufeff"), what=file)
