import torch
from lib.engine import train_one_epoch
from torch import nn

device = torch.device("cpu")
model = nn.Linear(8, 4).to(device)
optimizer = torch.optim.AdamW(model.parameters())
data = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(4)]
for epoch in range(3):
    print(train_one_epoch(model, data, optimizer, device))
