"""Two or more ranks under torchrun (gloo, so that they may share a GPU) that reduce gradients once a step and nothing else."""
import argparse
import contextlib
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Spectra(Dataset):
    """Noisy spectra with a line whose position is to be found."""

    def __init__(self, count, length):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        at = rng.uniform(0.1, 0.9)
        wave = np.cumsum(rng.standard_normal(4 * self.length)) / 20
        wave += 3 * np.exp(-((np.linspace(0, 1, 4 * self.length) - at) ** 2) / 2e-4)
        smooth = np.convolve(wave, np.hanning(32), mode="same")[::4]
        return torch.from_numpy(smooth.astype(np.float32)), torch.tensor(at, dtype=torch.float32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    data = Spectra(args.batch_size * 40 * ranks, args.length)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler,
                        num_workers=max(1, min(6, os.cpu_count() // ranks - 1)), pin_memory=device.type == "cuda",
                        persistent_workers=True, prefetch_factor=4)
    net = nn.Sequential(
        nn.Linear(args.length, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU(),
        nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, 1)).to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    step, micro, epoch = 0, 0, 0
    total = torch.zeros((), device=device)
    start = time.time()
    while step < args.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for spectra, at in loader:
            spectra, at = spectra.to(device, non_blocking=True), at.to(device, non_blocking=True)
            micro += 1
            with contextlib.nullcontext() if micro % args.accumulate == 0 else model.no_sync():
                loss = nn.functional.mse_loss(model(spectra).squeeze(1), at) / args.accumulate
                loss.backward()
            total += loss.detach()
            if micro % args.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % 20 == 0:
                    mean = total / ranks
                    dist.all_reduce(mean)
                    if rank == 0:
                        print(f"step {step} loss {mean.item() / step:.5f}")
                if step == args.steps:
                    break
    if rank == 0:
        print(f"done: {args.steps / (time.time() - start):.2f} steps/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
