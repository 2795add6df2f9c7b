"""What the interpreter knows about a value: what kind of thing it is, and whether it lives on a GPU and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

# Kinds. A tensor may also be the output of a model: a dataclass, tuple or dict of tensors.
HOST, TENSOR, OPTIMIZER, LOADER, DEVICE = "host", "tensor", "optimizer", "loader", "device"
SEQUENCE, FUNCTION, CLASS, INSTANCE, NAMED, OBJECT = "sequence", "function", "class", "instance", "named", "object"
METHOD, PROJECT, LAZY, UNKNOWN = "method", "project", "lazy", "unknown"

# Where a value lives. MAYBE: on whatever device a variable holds, which scripts choose to be the GPU.
GPU, MAYBE, CPU = "gpu", "maybe", "cpu"
Place = str | None
_STRENGTH = {GPU: 3, MAYBE: 2, None: 1, CPU: 0}

# Where the data of a CPU tensor comes from, which decides what a copy of it means.
FRESH, BATCH, DERIVED = "fresh", "batch", "derived"


class Why(NamedTuple):
    """The evidence that a value is on a GPU: text and FILE:LINE."""

    text: str
    site: str


class Thing:
    """An instance: of a class of the project (`cls`), or of a package (`name`). What changes in place lives here."""

    __slots__ = ("attributes", "cls", "device", "filling", "is_module", "late", "name", "site", "why")

    def __init__(self, cls: Any = None, name: str = "", *, is_module: bool = False, site: Any = None) -> None:
        self.cls, self.name, self.is_module, self.site = cls, name, is_module, site
        self.attributes: dict[str, Value] = {}
        self.device: Place = None
        self.why: Why | None = None
        self.late: Any = None  # how to run __init__ of a module when an attribute is first asked for
        self.filling = True  # while __init__ runs an attribute is replaced, later it is joined

    def move(self, device: Place, why: Why | None) -> None:
        if _STRENGTH[device] >= _STRENGTH[self.device]:
            self.device, self.why = device, why


class Value:
    """Treated as immutable; `with_` gives a changed copy."""

    __slots__ = (
        "const",
        "device",
        "elements",
        "frame",
        "kind",
        "mask",
        "name",
        "origin",
        "pending",
        "pinned",
        "rare",
        "ref",
        "scalar",
        "tag",
        "why",
    )

    def __init__(self, kind: str, *, device: Place = None, why: Why | None = None, name: str | None = None) -> None:
        self.kind = kind
        self.device: Place = device
        self.why = why
        self.name = name  # dotted name of what it is (NAMED, OBJECT), or of a method
        self.mask = False  # a tensor of bool
        self.scalar = False  # a 0-dim tensor
        self.pinned: bool | None = None
        self.origin: str | None = None
        self.frame: Any = None  # the innermost loop in which a CPU tensor was made
        self.elements: Any = None  # SEQUENCE: list of Values, dict of Values, or one Value for all
        self.ref: Any = None  # function, class, instance, receiver of a method, loader
        self.const: Any = NO_CONST
        self.rare: str | None = None  # HOST used as a condition: "rare" or "common" in a loop, and why
        self.tag: str | None = None  # HOST: counter, modulo, clock, elapsed, global-rank; SEQUENCE: parameters, modules
        self.pending: Any = None  # a CPU tensor that an asynchronous copy fills: (line, number of synchronisations)

    def with_(self, **changes: Any) -> Value:
        copy = Value.__new__(Value)
        for slot in Value.__slots__:
            setattr(copy, slot, getattr(self, slot))
        for name, value in changes.items():
            setattr(copy, name, value)
        return copy

    @property
    def on_gpu(self) -> bool:
        return self.device == GPU or self.device == MAYBE

    def __repr__(self) -> str:
        return f"<{self.kind} {self.device or ''} {self.name or ''}>"


class _NoConst:
    __slots__ = ()

    def __repr__(self) -> str:
        return "-"


NO_CONST = _NoConst()

ANY = Value(UNKNOWN)
NUMBER = Value(HOST)


def host(const: Any = NO_CONST, *, tag: str | None = None, rare: str | None = None) -> Value:
    """A Python number, string, array or anything else that is not on a device."""
    value = Value(HOST)
    value.const, value.tag, value.rare = const, tag, rare
    return value


NONE = host(None)


def tensor(device: Place, why: Why | None = None, *, mask: bool = False, scalar: bool = False) -> Value:
    value = Value(TENSOR, device=device, why=why)
    value.mask, value.scalar = mask, scalar
    return value


def sequence(elements: Any, *, tag: str | None = None) -> Value:
    """A list, tuple, set or dict: `elements` is a list or dict of Values, or one Value that stands for all."""
    value = Value(SEQUENCE)
    value.elements, value.tag = elements, tag
    return value


def named(name: str) -> Value:
    """Something of a package that is not read: torch.nn.functional, torch.float32, builtins.print."""
    return Value(NAMED, name=name)


def stronger(values: Sequence[Value]) -> tuple[Place, Why | None]:
    """The device of an operation on these values: a GPU if any of them is there."""
    best: Value | None = None
    for value in values:
        if value.kind == TENSOR and (best is None or _STRENGTH[value.device] > _STRENGTH[best.device]):
            best = value
    return (best.device, best.why) if best is not None else (None, None)


def element(value: Value) -> Value:
    """One value that stands for all elements of a sequence."""
    inside = value.elements
    if isinstance(inside, Value):
        return inside
    if isinstance(inside, dict):
        inside = list(inside.values())
    return join_all(inside) if inside else ANY


def join_all(values: Sequence[Value]) -> Value:
    if not values:
        return ANY
    result = values[0]
    for value in values[1:]:
        result = join(result, value)
    return result


_ORDER = {
    UNKNOWN: 0,
    HOST: 1,
    NAMED: 2,
    PROJECT: 2,
    LAZY: 2,
    METHOD: 2,
    DEVICE: 3,
    OBJECT: 3,
    OPTIMIZER: 4,
    FUNCTION: 4,
    CLASS: 4,
    SEQUENCE: 5,
    LOADER: 6,
    INSTANCE: 7,
    TENSOR: 8,
}


def join(first: Value, second: Value) -> Value:
    """What a name may hold after two ways through the code.

    The way that leads to a GPU counts: ``x = x.cuda() if torch.cuda.is_available() else x`` is on the GPU.
    """
    if first is second:
        return first
    if first.kind != second.kind:
        for one, other in ((first, second), (second, first)):
            if one.kind == HOST and isinstance(one.const, str) and other.kind == TENSOR:
                return ANY
        return first if _ORDER[first.kind] >= _ORDER[second.kind] else second
    if first.kind == HOST:
        return _join_hosts(first, second)
    if first.kind == SEQUENCE:
        return _join_sequences(first, second)
    if first.kind == INSTANCE:
        return first if _STRENGTH[first.ref.device] >= _STRENGTH[second.ref.device] else second
    if first.kind in (TENSOR, DEVICE):
        better, other = (first, second) if _STRENGTH[first.device] >= _STRENGTH[second.device] else (second, first)
        if better.kind != TENSOR or (better.mask == other.mask and better.scalar == other.scalar):
            return better
        return better.with_(mask=better.mask and other.mask, scalar=better.scalar and other.scalar)
    return first


def _join_hosts(first: Value, second: Value) -> Value:
    for value in (first, second):
        if isinstance(value.const, str) and value.const.startswith(("cuda", "mps")):
            return value  # "cuda" if torch.cuda.is_available() else "cpu"
    same = first.const == second.const and type(first.const) is type(second.const)
    tag = first.tag if first.tag == second.tag else (first.tag or second.tag)
    rare = first.rare if first.rare == second.rare else None
    return first if same and first.tag == tag and first.rare == rare else host(tag=tag, rare=rare)


def _join_sequences(first: Value, second: Value) -> Value:
    one, two = first.elements, second.elements
    if one is two:
        return first
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return first.with_(elements=[join(a, b) for a, b in zip(one, two, strict=True)])
    if isinstance(one, dict) and isinstance(two, dict):
        merged = dict(one)
        for key, value in two.items():
            merged[key] = join(merged[key], value) if key in merged else value
        return first.with_(elements=merged)
    if one in ([], {}):
        return second
    if two in ([], {}):
        return first
    if _mixed(one) or _mixed(two):
        return first.with_(elements=ANY)  # (name, tensor) beside something of another form: neither is known
    return first.with_(elements=join(element(first), element(second)))


def _mixed(elements: Any, depth: int = 0) -> bool:
    if isinstance(elements, Value):
        return elements.kind == SEQUENCE and depth < 4 and _mixed(elements.elements, depth + 1)
    return isinstance(elements, list) and len({value.kind for value in elements}) > 1
