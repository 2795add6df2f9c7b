"""The formulas and tables of bench_several_gpus; pure, so that the tests can hold them against known figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

MIB = 1 << 20
SIZES = tuple(MIB * 4**power for power in range(6))  # 1 MiB to 1 GiB, as `-b 1M -e 1G -f 4` of nccl-tests


def algbw_gb_s(size_bytes: int, seconds: float) -> float:
    return round(size_bytes / seconds / 1e9, 3)


def all_reduce_busbw_gb_s(size_bytes: int, seconds: float, ranks: int) -> float:
    """nccl-tests' bus bandwidth of an all-reduce: what each link carries, whatever the number of ranks."""
    return round(size_bytes / seconds / 1e9 * 2 * (ranks - 1) / ranks, 3)


def counts(gpus: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the number of GPUs itself."""
    doubled = []
    count = 1
    while count < gpus:
        doubled.append(count)
        count *= 2
    return (*doubled, max(1, gpus))


def beside(ours: Sequence[Mapping[str, Any]], others: Mapping[int, float]) -> list[dict[str, Any]]:
    """Bus bandwidths of one sweep by size beside those of another tool, for the sizes that both have."""
    return [
        {
            "bytes": row["bytes"],
            "torch": row["busbw"],
            "nccl_tests": others[row["bytes"]],
            "ratio": round(row["busbw"] / others[row["bytes"]], 3),
        }
        for row in ours
        if others.get(row["bytes"])
    ]


def scaling_rows(rates: Mapping[str, Mapping[int, Sequence[float]]]) -> list[dict[str, Any]]:
    """Median rate of each version at each count of ranks, in steps/s of one rank times ranks, and its efficiency.

    rates: version -> ranks -> steps/s that the script printed in each run. The work of a step grows with the ranks
    (every rank has its own batch), so the rate of the whole is steps/s times ranks; the efficiency is over the
    smallest count of the same version.
    """
    rows = []
    for ranks in sorted({count for by_count in rates.values() for count in by_count}):
        row: dict[str, Any] = {"ranks": ranks}
        for version, by_count in rates.items():
            if not by_count.get(ranks):
                continue
            smallest = min(count for count, values in by_count.items() if values)
            each = statistics.median(by_count[smallest])
            whole = statistics.median(by_count[ranks]) * ranks
            row[version] = {
                "rate": round(whole, 3),
                "efficiency": round(whole / (each * ranks), 4),
                "runs": list(by_count[ranks]),
            }
        if "tuned" in row and "untuned" in row:
            row["gain"] = round(row["tuned"]["rate"] / row["untuned"]["rate"], 3)
        rows.append(row)
    return rows


def scaling_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """scaling_rows as aligned lines."""
    lines = [f"{'ranks':>5}  {'untuned':>9} {'eff.':>5}  {'tuned':>9} {'eff.':>5}  tuned/untuned"]
    for row in rows:
        parts = [f"{row['ranks']:>5}"]
        for version in ("untuned", "tuned"):
            found = row.get(version)
            parts.append(f"{found['rate']:>9.2f} {found['efficiency']:>5.0%}" if found else f"{'-':>9} {'-':>5}")
        parts.append(f"{row['gain']:.2f}" if "gain" in row else "-")
        lines.append("  ".join(parts))
    return "\n".join(lines) + "\n"
