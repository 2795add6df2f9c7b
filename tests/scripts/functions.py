"""The loop in functions; one line makes both loaders, and only the first is for training."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_loader(rows, shuffle):
    data = TensorDataset(torch.randn(rows, 8), torch.randint(0, 2, (rows,)))
    return DataLoader(data, batch_size=8, shuffle=shuffle)  # LOADER


def move(batch, device):
    return [part.to(device) for part in batch]  # COPY


def train_step(model, optimizer, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()  # SYNC


def validate(model, loader):
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in loader)


def main():
    torch.manual_seed(0)
    train, valid = make_loader(32, True), make_loader(16, False)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        for batch in train:
            x, y = move(batch, torch.device("cpu"))
            train_step(model, optimizer, x, y)
        print(epoch, validate(model, valid))


if __name__ == "__main__":
    main()
