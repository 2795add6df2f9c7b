"""msgspec decoders for the events of a kineto trace, by what each category means here."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import msgspec

# Roles of the categories, old (capital letters) and new; a category that is not here is learned, see Decoders.
OPERATOR, RANGE, FRAME, CALL, KERNEL, COPY, MEMSET, SYNC, SKIP = range(9)
_ROLES = {
    "cpu_op": OPERATOR,
    "Operator": OPERATOR,
    "user_annotation": RANGE,
    "python_function": FRAME,
    "cuda_runtime": CALL,
    "cuda_driver": CALL,
    "hip_runtime": CALL,
    "Runtime": CALL,
    "kernel": KERNEL,
    "Kernel": KERNEL,
    "gpu_memcpy": COPY,
    "Memcpy": COPY,
    "gpu_memset": MEMSET,
    "Memset": MEMSET,
    "cuda_sync": SYNC,
    **dict.fromkeys(
        ("ac2g", "async", "async_cpu_to_gpu", "async_gpu", "fwdbwd", "forward_backward", "cpu_instant_event"), SKIP
    ),
    **dict.fromkeys(("Trace", "overhead", "gpu_user_annotation", "python_info", "cuda_profiler_range"), SKIP),
}
_MOST_LEARNED = 200


class Decoders:
    """msgspec decoders: a union of one class a category, and a class with all fields."""

    def __init__(self) -> None:
        self._roles = dict(_ROLES)
        self._learned = 0
        self._classes: dict[tuple[str, bool], Any] = {}
        self._unions: dict[bool, msgspec.json.Decoder[Any]] = {}

    def by_category(self, stacks: bool) -> msgspec.json.Decoder[Any]:
        import msgspec

        if stacks not in self._unions:
            kinds = tuple(self._class(category, stacks) for category in self._roles)
            self._unions[stacks] = msgspec.json.Decoder(list[functools.reduce(lambda a, b: a | b, kinds)])  # type: ignore[misc]
        return self._unions[stacks]

    @functools.cached_property
    def plain(self) -> msgspec.json.Decoder[Any]:
        import msgspec

        return msgspec.json.Decoder(list[self._plain])  # type: ignore[name-defined]

    @functools.cached_property
    def one(self) -> msgspec.json.Decoder[Any]:
        import msgspec

        return msgspec.json.Decoder(self._plain)

    @functools.cached_property
    def _plain(self) -> Any:
        import msgspec

        arguments = _arguments("AnyArguments", "stream", "correlation", "device", "bytes", "stack")
        fields = [("cat", str | None, None), ("name", str, ""), ("ts", float, 0.0), ("dur", float, 0.0)]
        return msgspec.defstruct(
            "AnyEvent", [*fields, ("tid", int | str, 0), ("args", arguments | None, None)], gc=False
        )

    def _class(self, category: str, stacks: bool) -> Any:
        import msgspec

        role = self._roles[category]
        key = (category, stacks and role == OPERATOR)
        if key not in self._classes:
            timed: list[Any] = [("name", str, ""), ("ts", float, 0.0), ("dur", float, 0.0)]
            host: list[Any] = [*timed, ("tid", int | str, 0)]
            fields: list[Any] = {SKIP: [], OPERATOR: host, RANGE: host, FRAME: host}.get(role, timed)
            if role == CALL:
                fields = [*host, ("args", _arguments("CallArguments", "correlation") | None, None)]
            elif role == OPERATOR and stacks:
                fields = [*host, ("args", _arguments("OperatorArguments", "stack") | None, None)]
            elif role in (KERNEL, COPY, MEMSET, SYNC):
                wanted = ("stream", "correlation", "device", *(("bytes",) if role in (COPY, MEMSET) else ()))
                fields = [*timed, ("args", _arguments("DeviceArguments", *wanted) | None, None)]
            self._classes[key] = msgspec.defstruct(
                f"Event{len(self._classes)}", fields, tag_field="cat", tag=category, gc=False
            )
        return self._classes[key]

    def roles(self, by_class: bool) -> Iterable[tuple[Any, int]]:
        """The role by class, or by the name of the category."""
        if not by_class:
            return self._roles.items()
        return [(kind, self._roles[category]) for (category, _), kind in self._classes.items()]

    def knows(self, category: str) -> bool:
        return category in self._roles

    def learn(self, categories: set[str]) -> None:
        """Categories met for the first time: a runtime's are calls, all others are passed over."""
        for category in sorted(categories - self._roles.keys()):
            if self._learned < _MOST_LEARNED:
                self._learned += 1
                self._roles[category] = CALL if category.endswith(("_runtime", "_driver")) else SKIP
                self._unions.clear()


@functools.cache
def _arguments(title: str, *wanted: str) -> Any:
    """A class for `args` with these fields; numbers may be written as text, as in hip traces."""
    import msgspec

    types: dict[str, tuple[Any, Any]] = {
        "stream": (int | str, -1),
        "correlation": (int | str, -1),
        "device": (int | str, -1),
        "bytes": (int | float | str, -1),
        "stack": (str, ""),
    }
    fields = [(name, *types[name]) for name in wanted]
    return msgspec.defstruct(title, fields, rename={"stack": "Call stack"}, gc=False)
