import torch
from torch import nn

model = nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(8)]
total = 0.0
for x, y in data:
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.item()
    if torch.isnan(loss):
        break
    print(loss)
