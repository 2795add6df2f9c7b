import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 1).to(dev)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
batches = [(torch.randn(4, 8, pin_memory=True), torch.randn(4, 1, pin_memory=True)) for _ in range(8)]
import numpy as np

rng = np.random.default_rng(0)
weights = torch.tensor([1.0, 2.0])
for step, (x, y) in enumerate(batches):
    x, y = x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    a = torch.zeros(4).to(dev)  # CPY006
    b = torch.from_numpy(rng.random(4)).cuda()  # CPY006
    c = torch.as_tensor([step, 1], device=dev)  # CPY006
    d = weights.to(dev)  # CPY004
    e = torch.zeros(4, device=dev) + torch.arange(4, device=dev)
