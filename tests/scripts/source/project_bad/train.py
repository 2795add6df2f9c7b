import torch
from lib.engine import train_one_epoch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    loader = DataLoader(data, batch_size=8, num_workers=2, pin_memory=True, persistent_workers=True)
    for epoch in range(3):
        print(train_one_epoch(model, loader, optimizer, device))


if __name__ == "__main__":
    main()
