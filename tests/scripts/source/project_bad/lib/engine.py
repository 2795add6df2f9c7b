import torch

from .meter import Average


def train_one_epoch(model, loader, optimizer, device):
    meter = Average()
    for images, labels in loader:
        images = images.to(device)  # CPY001
        labels = labels.to(device, non_blocking=True)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss, len(images))
    return meter.mean
