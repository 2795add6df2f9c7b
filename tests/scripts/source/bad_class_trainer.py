import torch
from torch import nn
from torch.utils.data import DataLoader


class Trainer:
    def __init__(self, model, loader, device="cuda"):
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.loader = loader
        self.opt = torch.optim.AdamW(self.model.parameters())
        self.history = []

    def fit(self, epochs):
        for epoch in range(epochs):
            self.run_epoch(epoch)

    def run_epoch(self, epoch):
        self.model.train()
        for batch in self.loader:
            self.history.append(self.step(batch))

    def step(self, batch):
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        return loss.item()  # SYN001
