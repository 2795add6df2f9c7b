"""A first version of an image classifier: slow loader, blocking copies, one read a step."""
import argparse, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, folder):
        self.rows = torch.rand(64, 3, 8, 8)
        self.labels = torch.arange(64) % 10

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return self.rows[i], self.labels[i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default='/tmp/images')  # single quotes stay
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Images(args.data), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    running_loss, correct, seen = 0.0, 0, 0
    for images, labels in loader:
        images = images.to(device)
        labels = labels.to(device)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        correct += (outputs.argmax(1) == labels).sum().item()   # a count
        seen += labels.size(0)
        torch.cuda.empty_cache()
        # the end of the loop
    print(f"loss {running_loss / len(loader):.4f} acc {correct / seen:.3f}")


if __name__ == "__main__":
    main()
