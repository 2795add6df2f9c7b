import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 1).to(dev)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
batches = [(torch.randn(4, 8, pin_memory=True), torch.randn(4, 1, pin_memory=True)) for _ in range(8)]
solution = torch.eye(8, device=dev)
for x, y in batches:
    x, y = x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)  # SYN007
    opt.step()
    inverse = torch.linalg.inv(solution)  # SYN007
    best = x.sum(dim=1).argmax()
    row = x.argmax()
    chosen = solution[row]  # SYN007
    same = torch.equal(x, y)  # SYN007
