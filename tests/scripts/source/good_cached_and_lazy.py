import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 1).to(dev)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
batches = [(torch.randn(4, 8, pin_memory=True), torch.randn(4, 1, pin_memory=True)) for _ in range(8)]
import functools


@functools.lru_cache
def table(size, device):
    return torch.tensor(list(range(size)), device=device)


seen = {}
total = None
for step, (x, y) in enumerate(batches):
    x, y = x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    values = table(4, dev)
    key = tuple(x.shape)
    if key not in seen:
        seen[key] = torch.tensor([1.0], device=dev)
    if total is None:
        total = torch.tensor(0.0, device=dev)
    total = total + loss.detach() * seen[key]
