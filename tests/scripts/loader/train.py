"""A training script that notes which processes touch its dataset."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
NOTES = os.environ["NOTES"]


class Noted(Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        with open(NOTES, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.001)
        return torch.full((8,), float(index)), index % 2


if __name__ == "__main__":
    with open(NOTES + ".main", "w") as file:
        file.write(str(os.getpid()))
    check = DataLoader(Noted(), batch_size=8, num_workers=1)
    loader = DataLoader(Noted(), batch_size=8, shuffle=True)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for x, y in check:
            model(x)
            break
    for epoch in range(1000):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.004)
