import torch


def train(loader, thing, device):
    for batch in loader:
        out = thing.process(batch)
        value = out.item()
        other = thing.cpu()
        print(value, other)
        if out.ok:
            thing.step()
