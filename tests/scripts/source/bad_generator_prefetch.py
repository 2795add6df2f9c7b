import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 1).to(dev)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)


def moved(loader):
    for x in loader:
        yield x.to(dev, non_blocking=True)


losses = []
for x in moved([torch.randn(4, 8, pin_memory=True) for _ in range(8)]):
    loss = model(x).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.detach().cpu().numpy())  # CPY003
