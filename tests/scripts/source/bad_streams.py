import torch


class Prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.preload()

    def preload(self):
        batch = next(self.loader)
        with torch.cuda.stream(self.stream):  # CPY009
            self.batch = batch.to("cuda", non_blocking=True)

    def next(self):
        batch = self.batch
        self.preload()
        return batch


def double(x):
    side = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(side):  # CPY009
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        x = y + 1
    return x
