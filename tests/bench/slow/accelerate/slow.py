"""A text classifier under accelerate: tokens are made row by row, and every step gathers its loss for the log."""
import argparse
import random
import re
import time
import zlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 20_000
SYLLABLES = ["ka", "to", "mi", "re", "lan", "dor", "es", "qui", "vo", "shu", "ber", "in"]


class Reviews(Dataset):
    """Made-up reviews; an item is its token ids, cut or filled to a fixed length, and the sentiment."""

    def __init__(self, count, length):
        self.length = length
        maker = random.Random(0)
        words = ["".join(maker.choices(SYLLABLES, k=maker.randint(1, 4))) for _ in range(3000)]
        self.labels = [maker.randint(0, 1) for _ in range(count)]
        self.texts = [
            " ".join(maker.choices(words, k=maker.randint(length // 2, length)) + ["good" if label else "bad"])
            for label in self.labels
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        words = re.findall(r"\w+|[^\w\s]", self.texts[index].lower())
        ids = []
        for word in words:
            ids.append(zlib.crc32(word.encode()) % (VOCABULARY - 1) + 1)
            if len(word) > 6:  # long words also by their halves
                ids += [zlib.crc32(part.encode()) % (VOCABULARY - 1) + 1 for part in (word[: len(word) // 2], word[len(word) // 2:])]
        ids = ids[-self.length:]
        return {"ids": torch.tensor(ids + [0] * (self.length - len(ids))), "label": torch.tensor(self.labels[index])}


class Classifier(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.encoder(x).mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator()
    loader = DataLoader(Reviews(args.batch_size * 25, args.length), batch_size=args.batch_size, shuffle=True)
    model = Classifier(args.width, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, total, right, seen = 0, 0.0, 0, 0
    start = time.time()
    while step < args.steps:
        for batch in loader:
            output = model(batch["ids"])
            loss = nn.functional.cross_entropy(output, batch["label"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += accelerator.gather(loss).mean().item()
            guesses, labels = accelerator.gather_for_metrics((output.argmax(1), batch["label"]))
            right += sum(int(guess == label) for guess, label in zip(guesses, labels))
            seen += len(labels)
            step += 1
            accelerator.print(f"step {step} loss {total / step:.4f} accuracy {right / seen:.3f}")
            if step == args.steps:
                break
    accelerator.print(f"loss {total / step:.4f} accuracy {right / seen:.3f}")
    accelerator.print(f"done: {args.steps / (time.time() - start):.2f} steps/s")


if __name__ == "__main__":
    main()
