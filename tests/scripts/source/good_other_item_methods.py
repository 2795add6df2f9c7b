import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 1).to(dev)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
batches = [(torch.randn(4, 8, pin_memory=True), torch.randn(4, 1, pin_memory=True)) for _ in range(8)]


class Basket:
    def item(self):
        return 3

    def cpu(self):
        return self


import numpy as np

basket, prices = Basket(), {"a": 1}
arr = np.arange(4)
for x, y in batches:
    x, y = x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    count = basket.item() + basket.cpu().item()
    pairs = [value for _, value in prices.items()]
    number = float(arr[0]) + int(arr.mean().item())
    name = str(len(pairs)) + str(opt.param_groups[0]["lr"])
