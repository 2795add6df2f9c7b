"""torch.compile on the model, and with fullgraph=True on a function that moves, waits and calls the model."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = DataLoader(data, batch_size=8)  # LOADER
inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
model = torch.compile(inner, backend="aot_eager")
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)


@torch.compile(backend="eager", fullgraph=True)
def loss_of(x, y):
    x = x.to("cpu", non_blocking=True)
    return nn.functional.cross_entropy(inner(x), y)


for epoch in range(3):
    for x, y in loader:
        x = x.to("cpu")  # COPY
        loss = nn.functional.cross_entropy(model(x), y) + loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())  # SYNC
