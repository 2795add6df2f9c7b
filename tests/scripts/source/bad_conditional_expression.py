import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 1).to(dev)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
batches = [(torch.randn(4, 8, pin_memory=True), torch.randn(4, 1, pin_memory=True)) for _ in range(8)]
history = []
for x, y in batches:
    x, y = x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    history.append(loss.item() if loss is not None else 0.0)  # SYN001
    sign = 1 if loss > 0 else -1  # SYN002
    assert torch.isfinite(loss)  # SYN002
    top = max(loss, loss * 2)  # SYN002
    flag = bool(loss > 1)  # SYN001
    both = (loss > 0) and (loss < 1)  # SYN002
