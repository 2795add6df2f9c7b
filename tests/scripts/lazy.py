"""Lazy modules, whose parameters take only the methods that torch knows by identity."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = DataLoader(data, batch_size=8)  # LOADER
model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2)).to("cpu").float()
model.cpu()
model(data[0][0][None])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in loader:
        x = x.to("cpu")  # COPY
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())  # SYNC
