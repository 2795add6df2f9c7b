"""Batches made by hand from a table in memory, without a loader."""
import torch
import torch.nn as nn
from torch.optim import AdamW
from torch.nn.parallel import DistributedDataParallel as DDP
torch.backends.cudnn.benchmark = True
torch.set_float32_matmul_precision("high")


def get_batch(data, size, device):
    starts = torch.randint(len(data) - 9, (size,))
    x = torch.stack([data[s:s + 8] for s in starts])
    y = torch.stack([data[s + 1:s + 9] for s in starts]).float()
    if torch.cuda.is_available():
        x, y = x.pin_memory(), y.pin_memory()
    return x.to(device, non_blocking=True), y.to(device=device, non_blocking=True)


def rows(data, size):
    weights = torch.rand(len(data))[:size]
    return weights / weights.sum(), torch.ones(size)


def wrap(model, rank):
    return DDP(model, device_ids=[rank], gradient_as_bucket_view=True)


def main(steps=9):
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = torch.arange(100.0) / 100
    model = nn.Linear(8, 8).to(device)
    optimizer = AdamW(
        model.parameters(),
        lr=0.01,
        fused=True,
    )
    total = 0.0
    for step in range(steps):
        x, y = get_batch(data, 4, device)
        a, b = rows(data, 8)
        if torch.cuda.is_available():
            a, b = a.pin_memory(), b.pin_memory()
        a, b = a.to(device, non_blocking=True), b.to(device, non_blocking=True)
        noise = torch.randn(4, 8)
        if torch.cuda.is_available():
            noise = noise.pin_memory()
        loss = ((model(x + noise.to(device, non_blocking=True)) - y * a * b) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach().double()
        if step % 4 == 3:
            shown = float(total) / 4
            print("mean", shown, round(float(total), 4), f"{total:.3f}")
            total = 0.0
    total = float(total)
    print(total)
    return model


if __name__ == "__main__":
    main()
