import torch
from torch import nn

device = torch.device("cpu")
model = nn.Linear(8, 1).to(device)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(10):
    x = torch.randn(4, 8).to(device)
    loss = model(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item(), x[x > 0].sum())
