"""Segmentation of drawn objects with a small U-Net; the confusion matrix is kept on the host."""
import argparse
import random
import time

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES = 4


class Scenes(Dataset):
    """A noisy picture with boxes and ellipses, and the class of each pixel; flipped at random."""

    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw_from = random.Random(index)
        size = self.size
        image = Image.effect_noise((size, size), 40).convert("RGB")
        mask = Image.new("L", (size, size), 0)
        draw, draw_mask = ImageDraw.Draw(image), ImageDraw.Draw(mask)
        for _ in range(6):
            x, y = draw_from.randrange(size), draw_from.randrange(size)
            w, h = draw_from.randint(4, size // 3), draw_from.randint(4, size // 3)
            kind = draw_from.randint(1, CLASSES - 1)
            colour = tuple(draw_from.randint(0, 80) + (170 if channel == kind - 1 else 0) for channel in range(3))
            box = (x - w // 2, y - h // 2, x + w // 2, y + h // 2)
            shape = ("rectangle", "ellipse")[kind % 2]
            getattr(draw, shape)(box, fill=colour)
            getattr(draw_mask, shape)(box, fill=kind)
        image = image.filter(ImageFilter.GaussianBlur(1.5))
        if torch.rand(()) < 0.5:
            image, mask = image.transpose(Image.FLIP_LEFT_RIGHT), mask.transpose(Image.FLIP_LEFT_RIGHT)
        pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255
        return torch.from_numpy(pixels), torch.from_numpy(np.asarray(mask, dtype=np.int64))


def block(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(True),
        nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(True))


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down1, self.down2, self.bottom = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join2, self.join1 = block(4 * width, 2 * width), block(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.up2(self.bottom(self.pool(b)))
        b = self.up1(self.join2(torch.cat([b, c], 1)))
        return self.head(self.join1(torch.cat([a, b], 1)))


def confusion(prediction, target):
    """A matrix of counts: rows are the true classes."""
    return np.bincount(target.ravel() * CLASSES + prediction.ravel(), minlength=CLASSES**2).reshape(CLASSES, CLASSES)


def mean_iou(matrix):
    crossing = np.diag(matrix)
    union = matrix.sum(0) + matrix.sum(1) - crossing
    return (crossing / np.maximum(union, 1)).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--width", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Scenes(args.batch_size * 20, args.size), batch_size=args.batch_size, shuffle=True)
    model = UNet(args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weight = torch.tensor([0.4, 1.0, 1.0, 1.0])

    step, running = 0, 0.0
    matrix = np.zeros((CLASSES, CLASSES), dtype=np.int64)
    start = time.time()
    while step < args.steps:
        for images, masks in loader:
            images, masks = images.to(device), masks.to(device)
            output = model(images)
            loss = nn.functional.cross_entropy(output, masks, weight=weight.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
            matrix += confusion(output.argmax(1).cpu().numpy(), masks.cpu().numpy())
            step += 1
            print(f"step {step} loss {running / step:.4f} mean IoU {mean_iou(matrix):.4f}")
            if step == args.steps:
                break
    print(f"mean IoU {mean_iou(matrix):.4f}")
    print(f"done: {args.steps / (time.time() - start):.2f} steps/s")


if __name__ == "__main__":
    main()
