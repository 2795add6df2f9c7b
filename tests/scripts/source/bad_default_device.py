import torch
from torch import nn

torch.set_default_device("cuda")
model = nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    x = torch.randn(4, 8)
    loss = model(x).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{loss.item():.3f}")  # SYN001 SYN003
