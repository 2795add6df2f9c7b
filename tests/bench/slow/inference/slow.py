"""Offline inference over a folder of JPEG files: the features of each batch and a table of the best classes are saved."""
import argparse
import csv
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_images(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for index in range(count):
        path = folder / f"{index:05d}.jpg"
        coarse = rng.integers(0, 255, (9, 12, 3), dtype=np.uint8)
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            Image.fromarray(coarse).resize((320, 240), Image.BICUBIC).save(part, "JPEG", quality=90)
            part.rename(path)


class Folder(Dataset):
    def __init__(self, paths, size):
        self.paths, self.size = paths, size

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB").resize((self.size, self.size), Image.BICUBIC)
        pixels = torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 255
        return (pixels - 0.45) / 0.22, self.paths[index].name


class Network(nn.Module):
    def __init__(self, width, classes=100):
        super().__init__()
        layers, inside = [], 3
        for outside in (width, 2 * width, 4 * width, 8 * width):
            layers += [nn.Conv2d(inside, outside, 3, 2, 1), nn.BatchNorm2d(outside), nn.ReLU(True),
                       nn.Conv2d(outside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.ReLU(True)]
            inside = outside
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inside, classes)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "bench_inference")
    parser.add_argument("--out", type=Path, default=Path("predictions"))
    parser.add_argument("--images", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--width", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    make_images(args.data, args.images)
    args.out.mkdir(exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = Folder(sorted(args.data.glob("*.jpg"))[:args.images], args.size)
    loader = DataLoader(dataset, batch_size=args.batch_size)
    model = Network(args.width).to(device).eval()

    rows, steps = [], 0
    start = time.time()
    with torch.no_grad():
        for images, names in loader:
            images = images.to(device)
            features, logits = model(images)
            scores, classes = torch.softmax(logits, 1).topk(3)
            for index, name in enumerate(names):
                for place in range(3):
                    rows.append((name, place + 1, classes[index, place].item(), f"{scores[index, place].item():.6f}"))
            np.save(args.out / f"features_{steps:05d}.npy", features.cpu().numpy())
            steps += 1
    with open(args.out / "best.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    print(f"{len(rows)} rows")
    print(f"done: {steps / (time.time() - start):.2f} steps/s")


if __name__ == "__main__":
    main()
