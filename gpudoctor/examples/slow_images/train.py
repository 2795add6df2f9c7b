"""Trains a small classifier on an in-memory table of images, with augmentation, the way a first version is written."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class AugmentedImages(Dataset):
    """Images with a random crop, flip, contrast, brightness and noise; the draws are seeded by the row."""

    def __init__(self, rows, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 10, (rows,), generator=generator)
        coarse = torch.randint(0, 256, (rows, 3, 7, 7), generator=generator, dtype=torch.uint8)
        coarse[:, 0, 0, :] = (self.labels * 25).to(torch.uint8)[:, None]
        self.images = coarse.repeat_interleave(4, 2).repeat_interleave(4, 3)

    def __len__(self):
        return len(self.labels)

    def draw(self, rows, salt, choices):
        mixed = (rows * 2654435761 + salt * 40503) % 4294967296
        mixed = (mixed ^ (mixed >> 13)) * 1540483477 % 4294967296
        return (mixed ^ (mixed >> 15)) % choices

    def __getitem__(self, rows):
        rows = torch.as_tensor(rows)
        image = self.images[rows].float() / 255
        top = self.draw(rows, 1, 5)[..., None] + torch.arange(24)
        left = self.draw(rows, 2, 5)[..., None] + torch.arange(24)
        image = image.gather(-2, top[..., None, :, None].expand(*image.shape[:-2], 24, 28))
        image = image.gather(-1, left[..., None, None, :].expand(*image.shape[:-2], 24, 24))
        flip = (self.draw(rows, 3, 2) == 1)[..., None, None, None]
        image = torch.where(flip, image.flip(-1), image)
        contrast = 0.75 + self.draw(rows, 4, 256)[..., None, None, None] / 512
        brightness = self.draw(rows, 5, 256)[..., None, None, None] / 1024
        noise = self.draw(rows[..., None, None, None] + torch.arange(24)[:, None] * 31 + torch.arange(24) * 17, 6, 64)
        image = image * contrast + brightness + noise / 1024
        return image.clamp(0, 1), self.labels[rows]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small: more threads would only wait for each other
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(AugmentedImages(args.rows), batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 11 * 11, 64), nn.ReLU(), nn.Linear(64, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    start, steps = time.time(), 0
    for epoch in range(args.epochs):
        running_loss = 0.0
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            steps += 1
        print(f"epoch {epoch} loss {running_loss / len(loader):.4f}")
    print(f"done: {steps / (time.time() - start):.2f} steps/s")


if __name__ == "__main__":
    main()
