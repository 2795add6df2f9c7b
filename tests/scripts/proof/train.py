"""Own construction: a small deterministic training script into which tests plant wrong patches."""

import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LateCopy:
    """Stands in for a device-to-host copy into pinned memory: the value is there once the event is set."""

    def __init__(self, value):
        self.host = torch.zeros(())
        self.event = threading.Event()
        threading.Thread(target=self.copy, args=(value.detach().clone(),)).start()

    def copy(self, value):
        time.sleep(0.02)
        self.host.copy_(value)
        self.event.set()

    def synchronize(self):
        self.event.wait()


def main():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(50, 8), torch.randint(0, 3, (50,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    total = 0.0
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            copied = LateCopy(loss)
            copied.synchronize()
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1.0 + copied.host.item())
            optimizer.step()
            total += loss.item()
    print(f"mean loss {total / 14:.6f}")


if __name__ == "__main__":
    main()
