"""Makes the small excerpts in this folder out of full traces (README.md names their origin).

usage: python excerpt.py SOURCE.json.gz TARGET.json.gz [--steps N]

Kept is what gpudoctor reads: flow arrows, instant events and all arguments but a few go, and with --steps everything
after the first N steps. Kernel names lose their template arguments. Times, lengths and numbers stay as recorded.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path
from typing import Any

ARGUMENTS = ("correlation", "stream", "device", "bytes", "Call stack")
DEVICE = ("kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset", "cuda_sync")
RUNTIME = ("cuda_runtime", "cuda_driver", "Runtime")


def excerpt(document: dict[str, Any], steps: int | None) -> dict[str, Any]:
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    marks = sorted(
        (event for event in events if str(event["name"]).startswith("ProfilerStep") and event["cat"] != "annotation"),
        key=lambda event: event["ts"],
    )
    marks = [event for event in marks if event["cat"] != "gpu_user_annotation"]
    if steps is not None:
        end = marks[steps - 1]["ts"] + marks[steps - 1]["dur"]
        launched = {event["args"]["correlation"] for event in events if event["cat"] in RUNTIME and event["ts"] < end}
        events = [
            event
            for event in events
            if (event["args"].get("correlation") in launched if event["cat"] in DEVICE else event["ts"] < end)
        ]
    waits = [event for event in events if event["cat"] in RUNTIME and re.search("Synchronize|Memcpy", event["name"])]
    kept = []
    for event in events:
        operator = event["cat"] in ("cpu_op", "Operator")
        around = operator and any(
            event["ts"] <= wait["ts"] and wait["ts"] + wait["dur"] <= event["ts"] + event["dur"] for wait in waits
        )
        if operator and not around and "#" not in event["name"]:
            continue
        if event["cat"] in RUNTIME and re.search(
            "Query|Occupancy|Capturing|Attribute|Priority|EventRecord", event["name"]
        ):
            continue
        arguments = {name: event.get("args", {})[name] for name in ARGUMENTS if name in event.get("args", {})}
        if event["cat"] in DEVICE:
            event["name"] = re.sub(r"<.*", "", event["name"]) if "Memcpy" not in event["name"] else event["name"]
        event.pop("args", None)
        kept.append({**event, "args": arguments})
    about = {
        name: value
        for name, value in document.items()
        if name in ("schemaVersion", "distributedInfo", "displayTimeUnit", "baseTimeNanoseconds")
    }
    about["deviceProperties"] = [
        {"id": device["id"], "name": device["name"]} for device in document.get("deviceProperties", [])[:1]
    ]
    return {**about, "traceEvents": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    document = excerpt(json.loads(gzip.decompress(options.source.read_bytes())), options.steps)
    events = document.pop("traceEvents")
    lines = []
    for event in events:  # kineto's own layout
        arguments = event.pop("args")
        body = json.dumps(event)[1:-1] + ',\n    "args": {\n      ' + json.dumps(arguments)[1:-1] + "\n    }"
        lines.append("\n  {\n    " + body + "\n  }")
    text = "\n{\n  " + json.dumps(document)[1:-1] + ',\n  "traceEvents": [' + ",".join(lines) + "\n  ]\n}\n"
    options.target.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
