"""Six data sets that are bound by different things; every function gives a DataLoader."""

import io
import os
import random
import tempfile
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    length = 4000

    def __len__(self):
        return self.length


class Sleeping(Rows):
    """Waits for 3 ms, as for a disk or a network."""

    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.zeros(64), index


class HeavyTail(Rows):
    """One row in twenty takes 60 ms, the others 1 ms; which one is fixed."""

    def __getitem__(self, index):
        time.sleep(0.06 if random.Random(index).random() < 0.05 else 0.001)
        return torch.zeros(64), index


class Jpeg(Rows):
    """Decodes and shrinks a photograph-sized JPEG from a folder."""

    length = 600

    def __init__(self):
        from PIL import Image

        self.folder = os.path.join(tempfile.gettempdir(), "gpudoctor-bench-jpeg")
        os.makedirs(self.folder, exist_ok=True)
        if not os.path.exists(os.path.join(self.folder, "31.jpg")):
            generator = torch.Generator().manual_seed(0)
            for number in range(32):
                small = torch.randint(0, 255, (48, 64, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(small.numpy()).resize((640, 480), Image.BICUBIC).save(
                    os.path.join(self.folder, f"{number}.jpg"), quality=90
                )

    def __getitem__(self, index):
        from PIL import Image

        with open(os.path.join(self.folder, f"{index % 32}.jpg"), "rb") as file:
            image = Image.open(io.BytesIO(file.read())).convert("RGB").resize((224, 224))
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(224, 224, 3), index


class PurePython(Rows):
    """Some milliseconds of bytecode, and no library that would let go of the interpreter."""

    def __getitem__(self, index):
        value = index
        for _ in range(40000):
            value = (1103515245 * value + 12345) % 2147483648
        return value, index


class Large(Rows):
    """3 MiB that are only handed over."""

    length = 600

    def __getitem__(self, index):
        return torch.zeros(3, 512, 512)


class Tiny(Rows):
    """A row of a table in memory."""

    length = 60000

    def __init__(self):
        self.table = torch.arange(16.0 * self.length).view(self.length, 16)

    def __getitem__(self, index):
        return self.table[index]


def sleeping():
    return DataLoader(Sleeping(), batch_size=16, shuffle=True)


def heavy_tail():
    return DataLoader(HeavyTail(), batch_size=16, shuffle=True)


def jpeg():
    return DataLoader(Jpeg(), batch_size=16, shuffle=True)


def pure_python():
    return DataLoader(PurePython(), batch_size=16, shuffle=True)


def large():
    return DataLoader(Large(), batch_size=8, shuffle=True)


def tiny():
    return DataLoader(Tiny(), batch_size=64, shuffle=True)
