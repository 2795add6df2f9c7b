"""Speed and memory of the kineto reader, against a bare typed chunked parse of the same file in the same run.

usage: python tests/bench/bench_traces.py [--trace FILE.json[.gz]] [--mb 1000] [--rounds 3]

The trace is enlarged by repeating its events with shifted times and correlation numbers, in a temporary folder that is
removed afterwards. The excerpt of the tests, which lacks what gpudoctor does not read, gets flow arrows and arguments
back first. The bare parse decodes category and duration only, counts events and sums kernel time. Wanted: CPU time at
most 1.5 times the bare parse's, peak memory at most 150 MB for 1 GB, both linear in the size.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXCERPT = Path(__file__).resolve().parent.parent / "artifacts" / "traces" / "resnet50_workers0.json.gz"

BARE = """
import sys, time
import msgspec
class Event(msgspec.Struct, gc=False):
    cat: str = ""
    dur: float = 0.0
decode = msgspec.json.Decoder(list[Event]).decode
begin = time.process_time()
count, kernels, size = 0, 0.0, 8 << 20
with open(sys.argv[1], "rb") as file:
    rest = file.read(size)
    rest = rest[rest.index(b"[", rest.index(b'"traceEvents"')) + 1:]
    while True:
        data = file.read(size)
        cut = rest.rfind(b"\\n  }") if not data else rest.rfind(b"\\n  },")
        for event in decode(b"[" + rest[: cut + 4] + b"]"):
            count += 1
            if event.cat in ("kernel", "Kernel"):
                kernels += event.dur
        if not data:
            break
        rest = rest[cut + 5:] + data
seconds = time.process_time() - begin
print(count, seconds, *[line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")])
"""
OURS = """
import sys, time
from pathlib import Path
import msgspec, numpy
from gpudoctor.read.traces import read_traces
begin = time.process_time()
found = read_traces([Path(sys.argv[1])])
facts = found.jobs[0][0]
seconds = time.process_time() - begin
print(facts.events, seconds, *[line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")])
"""


KERNEL = {"queued": 0, "context": 1, "registers per thread": 32, "shared memory": 0, "blocks per SM": 4.740741}
KERNEL |= {"warps per SM": 75.851852, "grid": [512, 1, 1], "block": [512, 1, 1], "est. achieved occupancy %": 75}


def restored(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The excerpt with what kineto writes beside it: operators, queries, arrows and more arguments for each launch.

    One event in eight is then device work, as in the full traces.
    """
    for event in events:
        arguments = event.get("args", {})
        runtime = event.get("cat") in ("Runtime", "cuda_runtime")
        if runtime:
            own = {name: event[name] for name in ("ph", "pid", "tid", "ts", "dur")}
            for name in ("aten::add_", "aten::conv2d"):
                yield {**own, "cat": "cpu_op", "name": name, "args": {"External id": 12345, "Ev Idx": 4321}}
            query = {"External id": 12345, "cbid": 273, "correlation": arguments.get("correlation", 0) + 5_000_000}
            yield {**own, "cat": "cuda_runtime", "name": "cudaStreamIsCapturing", "args": query}
            yield {**own, "ph": "f", "id": query["correlation"], "cat": "ac2g", "name": "ac2g", "bp": "e"}
        extra = {"External id": 12345, **({"cbid": 211} if runtime else KERNEL)}
        yield {**event, "args": {**extra, **arguments}}
        if "correlation" in arguments:
            arrow = {"ph": "s" if runtime else "f", "id": arguments["correlation"], "ts": event["ts"]}
            yield {**arrow, "pid": event["pid"], "tid": event["tid"], "cat": "ac2g", "name": "ac2g", "bp": "e"}


def enlarge(source: Path, target: Path, megabytes: float) -> int:
    """Write a trace of about that size in kineto's own layout; its bytes."""
    raw = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
    document = json.loads(raw)
    events = [event for event in document.pop("traceEvents") if event.get("cat") != "Trace"]
    if source == EXCERPT:
        events = list(restored(events))
    times = [event["ts"] for event in events if isinstance(event.get("ts"), int | float) and event.get("dur")]
    period = max(times) - min(times) + 100_000
    with target.open("w") as file:
        head = json.dumps(document)[1:-1]
        file.write("\n{\n  " + head + (",\n" if head else "") + '  "traceEvents": [')
        copy = 0
        while copy == 0 or target.stat().st_size < megabytes * 1e6:
            lines = []
            for event in events:
                event = dict(event)
                if "ts" in event:
                    event["ts"] += copy * period
                arguments = event.get("args")
                if isinstance(arguments, dict) and "correlation" in arguments:
                    event["args"] = {**arguments, "correlation": arguments["correlation"] + copy * 10_000_000}
                arguments = event.pop("args", None)
                body = json.dumps(event)[1:-1]
                if arguments is not None:
                    body += ',\n    "args": {\n      ' + json.dumps(arguments)[1:-1] + "\n    }"
                lines.append("\n  {\n    " + body + "\n  }")
            file.write(("," if copy else "") + ",".join(lines))
            file.flush()
            copy += 1
        file.write("\n  ]\n}\n")
    return target.stat().st_size


def run(program: str, trace: Path) -> tuple[int, float, float]:
    """Events, CPU seconds, peak MB."""
    result = subprocess.run([sys.executable, "-c", program, str(trace)], capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(result.stderr)
    events, seconds, kib = result.stdout.split()
    return int(events), float(seconds), int(kib) / 1024


def measure(trace: Path, rounds: int) -> dict[str, float]:
    """Medians of alternating runs."""
    bare, ours = [], []
    for _ in range(rounds):
        bare.append(run(BARE, trace))
        ours.append(run(OURS, trace))
    seconds = {name: statistics.median(item[1] for item in found) for name, found in (("bare", bare), ("ours", ours))}
    return {
        "bytes": float(trace.stat().st_size),
        "events": float(ours[0][0]),
        "bare_cpu_s": seconds["bare"],
        "ours_cpu_s": seconds["ours"],
        "cpu_ratio": statistics.median(b[1] / a[1] for a, b in zip(bare, ours, strict=True)),
        "bare_peak_mb": max(item[2] for item in bare),
        "ours_peak_mb": max(item[2] for item in ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=EXCERPT)
    parser.add_argument("--mb", type=float, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for share in (0.1, 1.0):
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "enlarged.json"
            enlarge(options.trace, trace, options.mb * share)
            for name, value in measure(trace, options.rounds).items():
                print(f"{name:>14} {value:,.2f}")
            print(re.sub(r"^", " " * 15, "--"))


if __name__ == "__main__":
    main()
