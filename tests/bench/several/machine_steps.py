"""The steps that ask and load the machine; each returns what is kept of it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from typing import Any

from several.bench import HERE, Bench, Failed, Skip, said_by
from several.figures import SIZES, beside, counts

TEXTS = {
    "nvidia-smi": "nvidia-smi",
    "nvidia-smi-q": "nvidia-smi -q",
    "nvidia-smi-topo-m": "nvidia-smi topo -m",
    **{f"nvidia-smi-topo-p2p-{kind}": f"nvidia-smi topo -p2p {kind}" for kind in "rwnap"},
    "nvidia-smi-nvlink-s": "nvidia-smi nvlink -s",
    "nvidia-smi-nvlink-c": "nvidia-smi nvlink -c",
    "nvidia-smi-nvlink-e": "nvidia-smi nvlink -e",
    "nvidia-smi-nvlink-p": "nvidia-smi nvlink -p",
    "lspci-tv": "lspci -tv",
    "lspci-vv": "lspci -vv",
    "lscpu": "lscpu",
    "numactl-H": "numactl -H",
}


def texts(bench: Bench) -> dict[str, Any]:
    """What people paste: each tool's text as it is."""
    kept, missing = {}, []
    for name, line in TEXTS.items():
        words = line.split()
        if shutil.which(words[0]) is None:
            missing.append(line)
            continue
        ran = bench.run(name, words, 20)
        kept[line] = ran.code if ran.code is not None else "over its time"
    if not kept:
        raise Skip("none of the tools is there")
    return {"exit_codes": kept, "not_there": missing}


def record(bench: Bench) -> dict[str, Any]:
    """tree.txt, nvml.json and case.json for tests/machines."""
    ran = bench.run("record", [sys.executable, str(HERE / "record.py"), str(bench.raw / "machine")], 45)
    if not ran.ok:
        raise Failed(ran.why())
    return {"text": ran.out.read_text()}


def capture(bench: Bench) -> dict[str, Any]:
    from gpudoctor import codec

    envelope, _ = bench.gpudoctor("capture", "capture", limit_s=90)
    text = (bench.raw / "capture.json").read_text()
    bench.case = codec.decode_case(text, what="the capture")[0]
    (bench.options.out / "case.json").write_text(text)
    return said_by(envelope)


def topo(bench: Bench) -> dict[str, Any]:
    envelope, _ = bench.gpudoctor("topo", "topo", "--json", limit_s=60)
    picture = bench.run("topo", [sys.executable, "-m", "gpudoctor", "topo"], 30)
    return {**said_by(envelope), "text": picture.out.read_text()}


def checkup(bench: Bench) -> dict[str, Any]:
    envelope, _ = bench.gpudoctor("checkup", "checkup", "--json", limit_s=60)
    return said_by(envelope)


def all_reduce(bench: Bench) -> dict[str, Any]:
    """By torch alone, at every count of GPUs; NCCL's own log of the largest is kept."""
    if bench.gpus < 2:
        raise Skip(f"{bench.gpus} GPUs: an all-reduce needs two")
    figures: list[dict[str, Any]] = []
    conditions: dict[str, Any] = {}
    for count in sorted({2, *counts(bench.gpus)} - {1}, reverse=True):
        name = f"all_reduce-{count}"
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(bench.raw / "nccl.%h.%p.log"),
               "NCCL_TOPO_DUMP_FILE": str(bench.raw / "nccl-topology.xml"),
               "NCCL_GRAPH_DUMP_FILE": str(bench.raw / "nccl-graph.xml")}  # fmt: skip
        file = bench.raw / f"{name}.json"
        words = bench.ranks(count, HERE / "all_reduce.py", "--out", str(file), "--sizes", ",".join(map(str, SIZES)))
        try:
            ran = bench.run(name, words, 60, env=log if count == bench.gpus else None)
        except Skip:
            if figures:
                break  # the largest count came first
            raise
        if not file.exists():
            if not figures:
                raise Failed(ran.why())
            break
        said = json.loads(file.read_text())
        conditions = {key: said[key] for key in ("backend", "torch", "nccl", "dtype", "gpu")}
        if not all(row["right"] for row in said["sizes"]):
            raise Failed(f"the sum of {count} ranks was wrong")
        if count == bench.gpus:
            bench.sweep = said["sizes"]
        figures += [collective(bench, "torch", count, said["gpu"], row) for row in said["sizes"]]
    return {"figures": figures, "conditions": conditions, "bound": nvlink_bound(bench.case)}


def collective(bench: Bench, tool: str, ranks: int, gpu: str | None, row: dict[str, Any]) -> dict[str, Any]:
    from gpudoctor import judge
    from gpudoctor.model import Case, Measurement

    spread = row.get("spread")
    item = Measurement(
        metric="all_reduce.busbw",
        subject="host",
        value=row["busbw"],
        unit="GB/s",
        spread=(spread[0], spread[1]) if spread else None,
        samples=row.get("samples", 1),
        settings={"tool": tool, "ranks": ranks, "nodes": 1, "bytes": row["bytes"], "gpu": gpu},
    )
    return dataclasses.asdict(judge.judged(bench.case or Case(), item)) | {
        name: row[name] for name in ("algbw", "time_us") if name in row
    }


def nvlink_bound(case: Any) -> str | None:
    """What the NVLinks of one GPU carry one way, in words; None where they were not read."""
    from gpudoctor import profiles

    if case is None or not case.gpus or not case.gpus[0].nvlinks:
        return None
    up = [link for link in case.gpus[0].nvlinks if link.active]
    rates = {entry["version"]: entry["link_gb_s"] for entry in profiles.load("platforms")["nvlink"]}
    each = rates.get(up[0].version) if up else None
    return f"{len(up)} NVLinks up, {each * len(up):g} GB/s one way in theory" if each else f"{len(up)} NVLinks up"


def bench_pcie(bench: Bench) -> dict[str, Any]:
    if not bench.gpus:
        raise Skip("no GPU")
    words = ("bench-pcie", "--thorough", "--seconds", "6", "--json", "--timeout", "60")
    envelope, _ = bench.gpudoctor("bench-pcie", *words, limit_s=60 + 20 * bench.gpus)
    bench.copies = envelope["measurements"]
    return {**said_by(envelope), "figures": envelope["measurements"]}


def other_tool(bench: Bench) -> dict[str, Any]:
    """nccl-tests' own all_reduce_perf at the same sizes, beside torch's figures."""
    if bench.gpus < 2:
        raise Skip(f"{bench.gpus} GPUs: an all-reduce needs two")
    if bench.building is None:
        raise Skip("no sources were given (--nccl-tests)")
    problem = bench.building.wait(min(90.0, bench.left_s() / 3))
    if problem:
        raise Failed(f"not built: {problem}")
    sizes = f"-b {SIZES[0]} -e {SIZES[-1]} -f 4 -g {bench.gpus} -n 20 -w 5".split()
    words = [str(bench.building.program), *sizes]
    ran = bench.run("nccl-tests-all_reduce_perf", words, 100, env=bench.building.environment())
    from gpudoctor.read import read_artifacts

    found = read_artifacts([str(ran.out)])
    curve = {
        item.settings["bytes"]: item.value
        for case in found.cases
        for item in case.measurements
        if item.metric == "all_reduce.busbw_curve"
    }
    if not curve:
        raise Failed(ran.why())
    gpu = bench.case.gpus[0].name if bench.case and bench.case.gpus else None
    rows = [{"bytes": size, "busbw": value} for size, value in sorted(curve.items())]
    table = beside(bench.sweep, curve)
    text = "\n".join(
        f"{row['bytes']:>11} bytes  torch {row['torch']:8.2f}  nccl-tests {row['nccl_tests']:8.2f}  {row['ratio']:.3f}"
        for row in table
    )
    return {
        "figures": [collective(bench, "nccl-tests", bench.gpus, gpu, row) for row in rows],
        "beside": table,
        "text": text,
        "conditions": {"words": sizes},
    }


def nvbandwidth(bench: Bench) -> dict[str, Any]:
    """Copies by nvbandwidth (copy engine), each beside what bench-pcie measured of the same metric and subject."""
    if not bench.gpus:
        raise Skip("no GPU")
    program = bench.options.nvbandwidth
    if program is None:
        raise Skip("no program was given (--nvbandwidth)")
    if not program.exists():
        raise Skip(f"{program} is not there")
    tests = ["host_to_device_memcpy_ce", "device_to_host_memcpy_ce", "device_local_copy"]
    if bench.gpus > 1:
        tests += ["device_to_device_memcpy_read_ce", "device_to_device_memcpy_write_ce"]
        tests += ["host_to_all_memcpy_ce", "all_to_host_memcpy_ce"]
    ran = bench.run("nvbandwidth", [str(program), "-t", *tests], 60)
    from gpudoctor.read import read_artifacts

    found = read_artifacts([str(ran.out)])
    others = {
        (item.metric, item.subject): item.value for case in found.cases for item in case.measurements if item.value
    }
    if not others:
        raise Failed(ran.why())
    table = [
        {"metric": ours["metric"], "subject": ours["subject"], "gpudoctor": ours["value"], "nvbandwidth": other,
         "ratio": round(ours["value"] / other, 3)}
        for ours in bench.copies
        if (other := others.get((ours["metric"], ours["subject"])))
    ]  # fmt: skip
    unmatched = sorted(f"{metric} {subject}: {value:.5g}" for metric, subject in others
                       if not any((row["metric"], row["subject"]) == (metric, subject) for row in table)
                       for value in [others[metric, subject]])  # fmt: skip
    lines = [
        f"{row['metric']:<10} {row['subject']:<12} gpudoctor {row['gpudoctor']:8.2f}  nvbandwidth "
        f"{row['nvbandwidth']:8.2f}  {row['ratio']:.3f}"
        for row in table
    ]
    return {"beside": table, "only_nvbandwidth": unmatched, "text": "\n".join([*lines, *unmatched])}
