# House prices from a table, as exported from a notebook: whole batches are indexed at once, and sums stay on the device.
# %%
import sys
import time

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 2
ROWS = int(sys.argv[2]) if len(sys.argv) > 2 else 20_000
BATCH = int(sys.argv[3]) if len(sys.argv) > 3 else 512

# %% the table
features = torch.randn(ROWS, 24)
district = torch.randint(0, 500, (ROWS,))
price = features[:, :6].sum(1) + features[:, 6] * features[:, 7] + (district % 7).float() + 0.1 * torch.randn(ROWS)
cut = ROWS * 9 // 10
train = TensorDataset(features[:cut], district[:cut], price[:cut])
valid = TensorDataset(features[cut:], district[cut:], price[cut:])

# %% the loaders
pin = device == "cuda"
train_batches = BatchSampler(RandomSampler(train), BATCH, drop_last=False)
valid_batches = BatchSampler(SequentialSampler(valid), BATCH, drop_last=False)
train_loader = DataLoader(train, sampler=train_batches, batch_size=None, pin_memory=pin)
valid_loader = DataLoader(valid, sampler=valid_batches, batch_size=None, pin_memory=pin)

# %% the model
embedding = nn.Embedding(500, 16).to(device)
net = nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
params = list(embedding.parameters()) + list(net.parameters())
optimizer = torch.optim.Adam(params, lr=1e-3)
loss_fn = nn.MSELoss()

# %% training
history = {"train": [], "valid": []}
steps = 0
start = time.time()
for epoch in range(EPOCHS):
    net.train()
    epoch_loss = torch.zeros((), device=device)
    for x, d, y in train_loader:
        x = x.to(device, non_blocking=True)
        d = d.to(device, non_blocking=True)
        y = y.to(device, non_blocking=True)
        pred = net(torch.cat([x, embedding(d)], 1)).squeeze(1)
        loss = loss_fn(pred, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch_loss += loss.detach()
        steps += 1
    epoch_loss = epoch_loss.item()
    if epoch_loss != epoch_loss:
        print("nan in epoch", epoch)
        break
    net.eval()
    error = torch.zeros((), device=device)
    with torch.no_grad():
        for x, d, y in valid_loader:
            x, d, y = (t.to(device, non_blocking=True) for t in (x, d, y))
            pred = net(torch.cat([x, embedding(d)], 1)).squeeze(1)
            error += (pred - y).abs().sum()
    history["train"].append(epoch_loss / len(train_loader))
    history["valid"].append(error.item() / len(valid))
    print(f"epoch {epoch} train {history['train'][-1]:.4f} valid {history['valid'][-1]:.4f}")

# %%
print(f"done: {steps / (time.time() - start):.2f} steps/s")
