# House prices from a table, as exported from a notebook: no functions, no main guard, everything at the top level.
# %%
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
train_loader = DataLoader(train, batch_size=BATCH, shuffle=True)
valid_loader = DataLoader(valid, batch_size=BATCH)

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
    epoch_loss = 0.0
    for x, d, y in train_loader:
        x = x.to(device)
        d = d.to(device)
        y = y.to(device)
        pred = net(torch.cat([x, embedding(d)], 1)).squeeze(1)
        loss = loss_fn(pred, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
        steps += 1
        if torch.isnan(loss):
            print("nan at step", steps)
            break
    net.eval()
    errors = []
    with torch.no_grad():
        for x, d, y in valid_loader:
            x, d, y = x.to(device), d.to(device), y.to(device)
            pred = net(torch.cat([x, embedding(d)], 1)).squeeze(1)
            errors += (pred - y).abs().cpu().tolist()
    history["train"].append(epoch_loss / len(train_loader))
    history["valid"].append(sum(errors) / len(errors))
    print(f"epoch {epoch} train {history['train'][-1]:.4f} valid {history['valid'][-1]:.4f}")

# %%
print(f"done: {steps / (time.time() - start):.2f} steps/s")
