"""Datasets that go wrong, each in one way; every function gives a Dataset or a DataLoader."""

import os
import signal
import sys
import tempfile
import time

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Rows(Dataset):
    length = 400

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((16,), float(index))


class Sleeps(Rows):
    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)


class Disturbed(Sleeps):
    """Two rows wait for something from outside that does not come back."""

    waited = 0

    def __getitem__(self, index):
        if index in (20, 60) and self.waited < 2:
            self.waited += 1
            time.sleep(0.1)
        return super().__getitem__(index)


class Raises(Rows):
    def __getitem__(self, index):
        if index == 37:
            raise ValueError("row 37 is broken")
        return super().__getitem__(index)


class RaisesLate(Sleeps):
    def __getitem__(self, index):
        if index == 100:
            raise KeyError("no such label")
        return super().__getitem__(index)


class Stops(Rows):
    def __getitem__(self, index):
        if index == 200:
            return next(iter(()))
        return super().__getitem__(index)


class Hangs(Rows):
    def __getitem__(self, index):
        if index == 100:
            time.sleep(3600)
        return super().__getitem__(index)


class Dies(Rows):
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None and index == 120:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Ragged(Rows):
    def __getitem__(self, index):
        return torch.zeros(index % 3 + 1)


class Empty(Rows):
    length = 0


class Three(Rows):
    length = 3


class WithLambda(Rows):
    def __init__(self):
        self.transform = lambda row: row

    def __getitem__(self, index):
        return self.transform(super().__getitem__(index))


class Shared(Rows):
    """An open file and a random generator, both copied by fork."""

    def __init__(self):
        self.random = numpy.random.default_rng(0)
        self.file = tempfile.TemporaryFile()
        self.file.write(numpy.arange(self.length, dtype=numpy.float32).tobytes())
        self.file.flush()

    def __getitem__(self, index):
        self.file.seek(4 * index)
        row = numpy.frombuffer(self.file.read(4), dtype=numpy.float32)[0]
        return torch.tensor(row + self.random.random())


class Unsplit(IterableDataset):
    def __iter__(self):
        for index in range(600):
            yield index


class OneShard(IterableDataset):
    """Split by shards, of which there is one."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        if info is None or info.id == 0:
            yield from range(600)


class NoGrads(Rows):
    """Takes its device from its own attribute."""

    def __init__(self):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def __getitem__(self, index):
        return super().__getitem__(index).to(self.device)


def sleeps():
    return DataLoader(Sleeps(), batch_size=8, num_workers=0)


def raises():
    return DataLoader(Raises(), batch_size=8, num_workers=2)


def raises_late():
    return DataLoader(RaisesLate(), batch_size=8, num_workers=2)


def disturbed():
    return DataLoader(Disturbed(), batch_size=8)


def stops():
    return DataLoader(Stops(), batch_size=8, num_workers=2)


def hangs():
    return DataLoader(Hangs(), batch_size=8, num_workers=2)


def dies():
    return DataLoader(Dies(), batch_size=8, num_workers=2)


def ragged():
    return DataLoader(Ragged(), batch_size=8)


def empty():
    return DataLoader(Empty(), batch_size=8)


def three():
    return DataLoader(Three(), batch_size=8)


def with_lambda():
    return DataLoader(WithLambda(), batch_size=8, num_workers=2, multiprocessing_context="spawn")


def shared():
    return DataLoader(Shared(), batch_size=8, num_workers=2)


def unsplit():
    return DataLoader(Unsplit(), batch_size=8, num_workers=2)


def one_shard():
    return DataLoader(OneShard(), batch_size=8, num_workers=3)


def on_device():
    return DataLoader(NoGrads(), batch_size=8)


def no_loader():
    return 17


def exits():
    sys.exit("nothing here")
