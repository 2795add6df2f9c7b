"""A gradient scaler that skips the steps in which gradients overflow."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = DataLoader(data, batch_size=4)  # LOADER
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for epoch in range(3):
    for number, (x, y) in enumerate(loader):
        x = x.to("cpu")  # COPY
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if number in (1, 3):
            model.weight.grad.fill_(float("inf"))
        scaler.step(optimizer)  # SYNC
        scaler.update()
