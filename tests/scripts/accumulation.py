"""One optimizer step for every two batches."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = DataLoader(data, batch_size=4)  # LOADER
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for number, (x, y) in enumerate(loader):
        x = x.to("cpu")  # COPY
        loss = nn.functional.cross_entropy(model(x), y) / 2
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            print(float(loss))  # SYNC
