"""accelerate rebuilds the loader and wraps the optimizer."""
from accelerate import Accelerator
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
accelerator = Accelerator(cpu=True)
loader = DataLoader(data, batch_size=8, shuffle=True)  # LOADER
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for x, y in loader:
        x = x.to("cpu")  # COPY
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        print(loss.item())  # SYNC
