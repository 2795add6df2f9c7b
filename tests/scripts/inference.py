"""Inference only: no optimizer, no backward."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = DataLoader(data, batch_size=8)  # LOADER
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
with torch.inference_mode():
    for epoch in range(3):
        for x, y in loader:
            x = x.to("cpu")  # COPY
            print(model(x).argmax(1).tolist())  # SYNC
