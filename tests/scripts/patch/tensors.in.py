"""Batches made by hand from a table in memory, without a loader."""
import torch
import torch.nn as nn
from torch.optim import AdamW
from torch.nn.parallel import DistributedDataParallel as DDP


def get_batch(data, size, device):
    starts = torch.randint(len(data) - 9, (size,))
    x = torch.stack([data[s:s + 8] for s in starts])
    y = torch.stack([data[s + 1:s + 9] for s in starts]).float()
    return x.to(device), y.to(device=device)


def rows(data, size):
    weights = torch.rand(len(data))[:size]
    return weights / weights.sum(), torch.ones(size)


def wrap(model, rank):
    return DDP(model, device_ids=[rank], find_unused_parameters=True)


def main(steps=9):
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = torch.arange(100.0) / 100
    model = nn.Linear(8, 8).to(device)
    optimizer = AdamW(
        model.parameters(),
        lr=0.01,
    )
    total = 0.0
    for step in range(steps):
        x, y = get_batch(data, 4, device)
        a, b = rows(data, 8)
        a, b = a.to(device), b.to(device)
        noise = torch.randn(4, 8)
        loss = ((model(x + noise.to(device)) - y * a * b) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % 4 == 3:
            shown = total / 4
            print("mean", shown, round(total, 4), f"{total:.3f}")
            total = 0.0
    print(total)
    return model


if __name__ == "__main__":
    main()
