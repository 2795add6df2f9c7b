"""Keyword recognition on waveforms of different lengths, which the collate function pads."""
import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset

RATE, BANDS, KEYWORDS = 8000, 40, 12


def mel_filters(bins):
    """Triangles on the mel scale, one row a band."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1) / (RATE / 2) * (bins - 1)
    at = np.arange(bins)
    rows = [np.interp(at, edges[i:i + 3], [0.0, 1.0, 0.0]) for i in range(BANDS)]
    return np.stack(rows).astype(np.float32)


class Words(Dataset):
    """Chirps in noise, 0.4 to 1.6 s long; an item is its log-mel spectrogram (frames, bands) and the keyword."""

    def __init__(self, count):
        self.count = count
        self.filters = mel_filters(129)
        self.window = np.hanning(256).astype(np.float32)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        keyword = int(rng.integers(KEYWORDS))
        time_s = np.arange(int(RATE * rng.uniform(0.4, 1.6)), dtype=np.float32) / RATE
        sweep = 200 + 120 * keyword + 300 * time_s * (1 if keyword % 2 else -1)
        wave = np.sin(2 * np.pi * sweep * time_s) + 0.3 * rng.standard_normal(len(time_s), dtype=np.float32)
        frames = np.lib.stride_tricks.sliding_window_view(wave, 256)[::80] * self.window
        power = np.abs(np.fft.rfft(frames)) ** 2
        return np.log(power.astype(np.float32) @ self.filters.T + 1e-6), keyword


def collate(items):
    """Padded with zeros to the longest."""
    longest = max(len(frames) for frames, _ in items)
    batch = torch.zeros(len(items), longest, BANDS)
    for row, (frames, _) in enumerate(items):
        for at, frame in enumerate(frames):
            batch[row, at] = torch.tensor(frame)
    lengths = torch.tensor([len(frames) for frames, _ in items])
    return batch, lengths, torch.tensor([keyword for _, keyword in items])


class Recogniser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rnn = nn.GRU(BANDS, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, KEYWORDS)

    def forward(self, frames, lengths):
        packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Words(args.batch_size * 20), batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model = Recogniser(args.width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    step, total, right, seen = 0, 0.0, 0, 0
    start = time.time()
    while step < args.steps:
        for frames, lengths, keywords in loader:
            frames, lengths, keywords = frames.to(device), lengths.to(device), keywords.to(device)
            output = model(frames, lengths)
            loss = criterion(output, keywords)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item()
            right += (output.argmax(1) == keywords).sum().item()
            seen += len(keywords)
            step += 1
            print(f"step {step} loss {total / step:.4f} accuracy {right / seen:.3f} norm {norm.item():.3f}")
            if step == args.steps:
                break
    print(f"loss {total / step:.4f} accuracy {right / seen:.3f}")
    print(f"done: {args.steps / (time.time() - start):.2f} steps/s")


if __name__ == "__main__":
    main()
