"""How fast `gpudoctor sync` reads: CPU time against ast.parse on the same files, memory, two processes against one.

usage: python tests/bench/bench_source.py PATH... [--torchfix COMMAND]

Ratios within one run, each part in a process of its own; on a busy host the wall times say little.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 3

PARSE = """
import ast, json, resource, sys, time, warnings
from gpudoctor.source.files import UnreadableError, find_files, read_source
warnings.simplefilter("ignore")
texts = []
for file in find_files(sys.argv[1:])[0]:
    try:
        texts.append(read_source(file, file).text)
    except UnreadableError:
        pass
begin = time.process_time()
for text in texts:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        pass
cpu = time.process_time() - begin
print(json.dumps({"cpu": cpu, "files": len(texts), "lines": sum(t.count(chr(10)) for t in texts)}))
"""

SCAN = """
import json, resource, sys, time
from gpudoctor.source import scan
wall, cpu = time.perf_counter(), time.process_time()
facts = scan(sys.argv[2:], processes=int(sys.argv[1])).facts
kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
peak = max(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1024
took = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
print(json.dumps({**took, "peak_mb": peak, "sites": len(facts.sites)}))
"""


def run(code: str, *words: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("paths", nargs="+")
    arguments.add_argument("--torchfix", help="command that lints the same paths, for comparison")
    given = arguments.parse_args()
    ratios, speedups, peaks, walls = [], [], [], []
    for _ in range(ROUNDS):
        parse, one, two = run(PARSE, *given.paths), run(SCAN, "1", *given.paths), run(SCAN, "2", *given.paths)
        ratios.append(one["cpu"] / parse["cpu"])
        speedups.append(one["wall"] / two["wall"])
        peaks.append(max(one["peak_mb"], two["peak_mb"]))
        walls.append(one["wall"])
    load = os.getloadavg()[0]
    print(f"{parse['files']:.0f} files, {parse['lines']:.0f} lines, {one['sites']:.0f} sites, load {load:.1f}")
    print(f"CPU / ast.parse      {statistics.median(ratios):.2f}  ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"two processes / one  {statistics.median(speedups):.2f}x  ({min(speedups):.2f} to {max(speedups):.2f})")
    print(f"peak of one process  {max(peaks):.0f} MB")
    if given.torchfix:
        begin = time.perf_counter()
        subprocess.run([*shlex.split(given.torchfix), *given.paths], capture_output=True, check=False)
        print(f"torchfix / sync      {(time.perf_counter() - begin) / statistics.median(walls):.1f}x the wall time")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
