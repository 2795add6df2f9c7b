import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 1).to(dev)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
batches = [(torch.randn(4, 8, pin_memory=True), torch.randn(4, 1, pin_memory=True)) for _ in range(8)]
weights = torch.tensor([1.0, 2.0]).to(dev)
steps = torch.arange(8, device=dev)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(8).float())
        self.cache = None

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], device=x.device)
        return x + self.table + self.cache


positions = Positions().to(dev)
for step, (x, y) in enumerate(batches):
    x, y = x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
    loss = nn.functional.mse_loss(model(positions(x)), y) * weights.sum() * steps[step]
    opt.zero_grad()
    loss.backward()
    opt.step()
