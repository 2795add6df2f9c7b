"""LBFGS calls its closure, and so backward, several times a step."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = DataLoader(data, batch_size=8)  # LOADER
model = nn.Linear(8, 2)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
for epoch in range(3):
    for x, y in loader:
        x = x.to("cpu")  # COPY

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        print(f"{optimizer.step(closure):.3f}")  # SYNC
