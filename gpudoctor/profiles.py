"""Loads profiles/*.toml: rule limits and expected figures, each with its source.

`thresholds.toml` holds the limits of the rules, `gpus.toml` figures measured on named GPUs, `platforms.toml`
what each PCIe link class gives. The files are read when first asked for, and once.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Case, Expected, Gpu, PcieLink, Profile

Metric = Literal["h2d", "d2h", "h2d_while_d2h", "d2h_while_h2d", "d2d"]
_COPIES: tuple[Metric, ...] = ("h2d", "d2h", "h2d_while_d2h", "d2h_while_h2d")


def folder() -> Path:
    """The folder with the profile files: gpudoctor/_profiles in a wheel, profiles/ beside the package in the sources.

    Raises GpudoctorError when neither is there (a broken installation).
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "_profiles", package.parent / "profiles"):
        if (candidate / "thresholds.toml").is_file():
            return candidate
    raise GpudoctorError("cannot find the profiles that belong to gpudoctor", "install gpudoctor again")


@functools.cache
def load(name: str) -> dict[str, Any]:
    """The content of profiles/NAME.toml, shared between callers: do not change it. GpudoctorError when unreadable."""
    path = folder() / f"{name}.toml"
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise GpudoctorError(f"cannot read the profile {path.name}: {error}", "install gpudoctor again") from None


def thresholds() -> dict[str, dict[str, float]]:
    """The limits of the rules: rule code -> limit name -> value (its unit stands in the file and in the name)."""
    return {
        code: {name: float(entry["value"]) for name, entry in limits.items()}
        for code, limits in load("thresholds").items()
    }


def threshold_sources() -> dict[str, dict[str, str]]:
    """For each limit: its value with unit and where it comes from, for `explain`."""
    return {
        code: {name: f"{entry['value']:g} {entry['unit']} ({entry['source']})" for name, entry in limits.items()}
        for code, limits in load("thresholds").items()
    }


def for_case(case: Case) -> Profile:
    """The Profile to put into a Case: all thresholds, and copy figures when its GPUs are all of one model."""
    answering = [gpu for gpu in case.gpus if not gpu.lost]
    names = {gpu.name for gpu in answering}
    if len(names) != 1 or None in names:
        return Profile(thresholds=thresholds())
    model = find_gpu(answering[0].name)
    figures: dict[str, float] = {}
    for metric in (*_COPIES, "d2d"):
        expected = [expected_copy(gpu, metric) for gpu in answering]
        known = [value.low for value in expected if value is not None]
        if known and len(known) == len(expected):
            figures[metric] = min(known)
    return Profile(name=model["name"] if model else answering[0].name, figures=figures, thresholds=thresholds())


def find_gpu(name: str | None) -> dict[str, Any] | None:
    """The entry of gpus.toml whose pattern matches a GPU name as NVML prints it, or None.

    The whole name must match: "NVIDIA GH200 480GB" and "NVIDIA H200 NVL" are not an H200.
    """
    for entry in load("gpus")["gpu"]:
        if name and re.fullmatch(entry["match"], name, re.IGNORECASE):
            found: dict[str, Any] = entry
            return found
    return None


def expected_copy(gpu: Gpu, metric: Metric) -> Expected | None:
    """What a healthy machine gives for copies of large blocks between pinned memory and this GPU, GB/s one way.

    The link is the best one that card, slot and the way up to the root can train, whatever it is now; where nothing
    is known of it, the one of the card's data sheet. A figure measured on this GPU model at that link comes first;
    else theory times the usual ratio of the link class. `source` says which. "d2d" is a copy inside the GPU, bytes
    counted once: it has no link, and only figures of the model. None where nothing is known.
    """
    model = find_gpu(gpu.name)
    if metric == "d2d":
        return _of_model(model, metric, {})
    link, assumed = best_link(gpu), ""
    if model and (gpu.memory_node is not None or not model.get("link")):
        return _of_model(model, metric, {"c2c": True})  # NVLink-C2C: the PCIe link says nothing about copies
    if link is None and model and gpu.pcie is None and not gpu.pcie_path:
        link, assumed = tuple(model["link"]), "; the link is not known, the card's own is taken"
    if link is None:
        return None
    generation, width = link
    measured = _of_model(model, metric, {"generation": generation, "width": width}, assumed)
    return measured or of_link(generation, width, metric, assumed)


def of_link(generation: int, width: int, metric: str, assumed: str = "") -> Expected | None:
    """Theory of a PCIe link times the usual ratio of its class for `metric`; None for a class that is not listed."""
    for entry in load("platforms")["pcie"]:
        if entry["generation"] == generation:
            theory = entry["lane_gb_s"] * width
            ratio = entry[metric]
            return Expected(
                low=round(theory * ratio["low"], 2),
                high=round(theory * ratio["high"], 2),
                basis="theory",
                source=f"Gen{generation} x{width} theory {theory:.1f} GB/s times {ratio['low']:g}-{ratio['high']:g} "
                f"({ratio['source']}){assumed}",
            )
    return None


def expected_peer(a: Gpu, b: Gpu, *, nvlinks: int | None, near: bool) -> Expected | None:
    """What a copy from one GPU to the other gives where access is granted, GB/s one way.

    nvlinks: bonded links between them; 0 or None leaves PCIe, whose weaker link counts. near: both hang on one NUMA
    node; else the range across nodes is taken. None where neither link is known.
    """
    model = find_gpu(a.name)
    if nvlinks:
        version = next((link.version for link in a.nvlinks if link.version), None)
        version = version or (model["nvlink"][0] if model and model.get("nvlink") else None)
        for entry in load("platforms")["nvlink"]:
            if entry["version"] == version:
                theory, ratio = entry["link_gb_s"] * nvlinks, entry["ce"]
                return Expected(
                    low=round(theory * ratio["low"], 2),
                    high=round(theory * ratio["high"], 2),
                    basis="theory",
                    source=f"{nvlinks} NVLinks of version {version}, theory {theory:g} GB/s times {ratio['low']:g}-"
                    f"{ratio['high']:g} ({ratio['source']})",
                )
        return None
    links, assumed = [], ""
    for gpu in (a, b):
        link, known = best_link(gpu), find_gpu(gpu.name)
        if link is None and known and known.get("link") and gpu.pcie is None and not gpu.pcie_path:
            link, assumed = tuple(known["link"]), "; the link is not known, the card's own is taken"
        if link is None:
            return None
        links.append(link)
    lanes = {entry["generation"]: entry["lane_gb_s"] for entry in load("platforms")["pcie"]}
    generation, width = min(links, key=lambda link: lanes[link[0]] * link[1])
    return of_link(generation, width, "p2p" if near else "p2p_far", assumed)


def expected_board(gpu: Gpu, value: float) -> Expected | None:
    """What a full NVLink board gives to one peer, where nobody counted the links: the board of the GPU's model, else
    the smallest one whose theory holds `value` (GB/s one way)."""
    model = find_gpu(gpu.name)
    boards = [tuple(entry["nvlink"]) for entry in load("gpus")["gpu"] if entry.get("nvlink")]
    if model is not None:
        boards = [tuple(model["nvlink"])] if model.get("nvlink") else []
    links = {entry["version"]: entry for entry in load("platforms")["nvlink"]}
    fitting = [board for board in set(boards) if links[board[0]]["link_gb_s"] * board[1] > value]
    if not fitting:
        return None
    version, count = min(fitting, key=lambda board: links[board[0]]["link_gb_s"] * board[1])
    theory, ratio = links[version]["link_gb_s"] * count, links[version]["ce"]
    return Expected(
        low=round(theory * ratio["low"], 2),
        high=round(theory * ratio["high"], 2),
        basis="theory",
        source=f"{count} NVLinks of version {version} (the links were not counted), theory {theory:g} GB/s times "
        f"{ratio['low']:g}-{ratio['high']:g} ({ratio['source']})",
    )


def expected_collective(name: str | None, metric: str, *, gpus: int, size_bytes: int) -> Expected | None:
    """Bus bandwidth measured by others on the same GPUs, as many of them, with messages of this size or smaller."""
    figures = [
        figure
        for figure in load("platforms")["collective"]
        if name
        and re.fullmatch(figure["match"], name, re.IGNORECASE)
        and (figure["kind"], figure["metric"], figure["gpus"]) == ("measured", metric, gpus)
        and figure["bytes"] <= size_bytes
    ]
    if not figures:
        return None
    largest = max(figure["bytes"] for figure in figures)
    values = [figure for figure in figures if figure["bytes"] == largest]
    source = "; ".join(f"{figure['value']:g} GB/s {figure['conditions']}: {figure['source']}" for figure in values)
    return Expected(
        low=min(figure["value"] for figure in values),
        high=max(figure["value"] for figure in values),
        basis="measured",
        source=f"{values[0]['name']}, {largest} bytes: {source}",
    )


def card_link(gpu: Gpu) -> tuple[int, int] | None:
    """(generation, width) that the card itself can do by its data sheet; None for an unknown model."""
    model = find_gpu(gpu.name)
    return tuple(model["link"]) if model and model.get("link") else None


def memory_gb_s(gpu: Gpu) -> float | None:
    """The peak of the GPU's memory by its data sheet, GB/s read or written; None for an unknown model."""
    model = find_gpu(gpu.name)
    return float(model["memory_gb_s"]) if model and "memory_gb_s" in model else None


def _of_model(
    model: dict[str, Any] | None, metric: str, link: dict[str, int | bool], assumed: str = ""
) -> Expected | None:
    figures = [
        figure
        for figure in (model["figures"] if model else ())
        if (figure["kind"], figure["metric"]) == ("measured", metric)
        and all(figure.get(name) == value for name, value in link.items())
    ]
    if not model or not figures:
        return None
    values = [float(figure["value"]) for figure in figures]
    source = "; ".join(f"{figure['value']:g} GB/s {figure['conditions']}: {figure['source']}" for figure in figures)
    return Expected(low=min(values), high=max(values), basis="measured", source=f"{model['name']}: {source}{assumed}")


def best_link(gpu: Gpu) -> tuple[int, int] | None:
    """(generation, width) of the slowest hop from the GPU to the root, each hop at the best its two ends can do.

    A present reading stands in for an unknown maximum: the width always, the generation only when it was taken under
    load. None when the GPU's own link is unknown; hops above it that are unknown are left out.
    """
    lanes = {entry["generation"]: entry["lane_gb_s"] for entry in load("platforms")["pcie"]}
    own = _best(gpu.pcie)
    if own is None and gpu.pcie_path:
        own = _best(gpu.pcie_path[0].link)
    if own is None or own[0] not in lanes:
        return None
    above = [_best(hop.link) for hop in gpu.pcie_path[1:]]
    links = [own, *(link for link in above if link is not None and link[0] in lanes)]
    return min(links, key=lambda link: lanes[link[0]] * link[1])


def _best(link: PcieLink | None) -> tuple[int, int] | None:
    if link is None:
        return None
    generations = [value for value in (link.max_generation, link.port_max_generation) if value]
    widths = [value for value in (link.max_width, link.port_max_width) if value]
    if not generations and link.generation and link.state == "load":
        generations = [link.generation]
    if not widths and link.width:
        widths = [link.width]
    return (min(generations), min(widths)) if generations and widths else None
