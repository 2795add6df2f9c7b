"""A DataLoader of the user's own class."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))


class Loader(DataLoader):
    def __init__(self, dataset, size):
        super().__init__(dataset, batch_size=size, shuffle=True)

    def __iter__(self):
        for x, y in super().__iter__():
            yield x + 1, y


loader = Loader(data, 8)  # LOADER
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in loader:
        x = x.to("cpu")  # COPY
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())  # SYNC
