"""A Lightning module whose metrics stay on the device and whose loader has workers."""
import argparse
import logging
import os
import time
import warnings

import lightning
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset):
    """Windows of a noisy signal with random gain; the label is the number of its strongest frequency."""

    def __init__(self, count, length):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        label = int(rng.integers(10))
        at = np.arange(self.length) / self.length
        wave = sum(np.sin(2 * np.pi * (k + 1) * 4 * at + rng.uniform(0, 6)) * (3 if k == label else 1) for k in range(10))
        wave = np.convolve(wave + rng.standard_normal(self.length), np.hanning(9), mode="same")
        gain = float(torch.empty(()).uniform_(0.8, 1.2))
        return torch.from_numpy(wave.astype(np.float32) * gain).unsqueeze(0), label


class Classifier(lightning.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, width, 9, 4, 4), nn.ReLU(), nn.Conv1d(width, 2 * width, 9, 4, 4), nn.ReLU(),
            nn.Conv1d(2 * width, 4 * width, 9, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
            nn.Linear(4 * width, 10))
        self.losses, self.right, self.seen = [], 0, 0

    def training_step(self, batch, batch_index):
        signals, labels = batch
        output = self.net(signals)
        loss = nn.functional.cross_entropy(output, labels)
        self.losses.append(loss.detach())
        self.right += (output.argmax(1) == labels).sum()
        self.seen += len(labels)
        if len(self.losses) % 20 == 0:
            self.log("loss", loss.detach())
            self.log("accuracy", self.right / self.seen)
            print(f"step {len(self.losses)} loss {loss.item():.4f} accuracy {self.right / self.seen:.3f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--width", type=int, default=8)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    loader = DataLoader(Signals(args.batch_size * 30, args.length), batch_size=args.batch_size, shuffle=True,
                        num_workers=max(1, min(14, os.cpu_count() - 1)), pin_memory=torch.cuda.is_available(),
                        persistent_workers=True, prefetch_factor=4)
    model = Classifier(args.width)
    trainer = lightning.Trainer(
        max_steps=args.steps, devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False)
    start = time.time()
    trainer.fit(model, loader)
    print(f"mean loss {sum(model.losses) / len(model.losses):.4f}")
    print(f"done: {args.steps / (time.time() - start):.2f} steps/s")


if __name__ == "__main__":
    main()
