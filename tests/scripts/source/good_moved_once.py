import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = {"x": torch.randn(64, 8), "y": torch.randn(64, 1)}
data = {key: value.to(dev) for key, value in data.items()}
parts = [torch.randn(3).cuda() for _ in range(4)]
for name, value in data.items():
    print(name, value.mean().item())
model = nn.Linear(8, 1).to(dev)
for name, parameter in model.named_parameters():
    print(name, parameter.norm().item())
    if parameter.norm() > 10:
        parameter.data.mul_(0.1)
