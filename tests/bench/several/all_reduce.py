"""One rank of an all-reduce that torch alone times, under torchrun; rank 0 writes the figures as JSON.

    torchrun --standalone --nproc-per-node N all_reduce.py --out FILE [--sizes BYTES,...] [--seconds 0.3]

A size is repeated for about --seconds after a warm-up; the time of one all-reduce is the slowest rank's mean, and the
figures are nccl-tests': algbw = size / time, busbw = algbw x 2 (n - 1) / n. For every size the sum is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from several.figures import SIZES, algbw_gb_s, all_reduce_busbw_gb_s

WARM_UPS = 5
FEWEST, MOST = 5, 2000
ROUNDS = 5  # the median of these is the figure, the outer ones its spread


def main() -> None:
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rows = [one_size(torch, dist, device, size, options.seconds) for size in map(int, options.sizes.split(","))]
    if dist.get_rank() == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None
        said = {
            "ranks": dist.get_world_size(),
            "backend": dist.get_backend(),
            "torch": torch.__version__,
            "nccl": nccl,
            "dtype": "float32",
            "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
            "sizes": rows,
        }
        options.out.write_text(json.dumps(said, indent=1) + "\n")
    dist.destroy_process_group()


def one_size(torch: Any, dist: Any, device: Any, size: int, seconds: float) -> dict[str, Any]:
    ranks = dist.get_world_size()
    buffer = torch.full((size // 4,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(buffer)
    wanted = ranks * (ranks + 1) / 2
    right = bool(torch.all(buffer == wanted).item())
    buffer.zero_()  # sums of zeros stay zeros, however often
    for _ in range(WARM_UPS):
        dist.all_reduce(buffer)
    one = slowest(torch, dist, device, timed(torch, dist, device, buffer, FEWEST))
    repeats = max(FEWEST, min(MOST, int(seconds / ROUNDS / max(one, 1e-7))))
    times = sorted(slowest(torch, dist, device, timed(torch, dist, device, buffer, repeats)) for _ in range(ROUNDS))
    median = times[ROUNDS // 2]
    return {
        "bytes": size,
        "time_us": round(median * 1e6, 2),
        "algbw": algbw_gb_s(size, median),
        "busbw": all_reduce_busbw_gb_s(size, median, ranks),
        "spread": [all_reduce_busbw_gb_s(size, times[-1], ranks), all_reduce_busbw_gb_s(size, times[0], ranks)],
        "samples": ROUNDS * repeats,
        "right": right,
    }


def timed(torch: Any, dist: Any, device: Any, buffer: Any, repeats: int) -> float:
    """Seconds of one all-reduce on this rank, the mean of `repeats`."""
    dist.barrier()
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(buffer)
        return (time.perf_counter() - begun) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        dist.all_reduce(buffer)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats


def slowest(torch: Any, dist: Any, device: Any, seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


if __name__ == "__main__":
    main()
