import torch
from torch import nn


class Trainer:
    def __init__(self, model, loader, device="cuda"):
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.loader = loader
        self.opt = torch.optim.AdamW(self.model.parameters())

    def fit(self, epochs):
        for epoch in range(epochs):
            total = self.run_epoch()
            print(f"epoch {epoch}: {total.item():.3f}")
            torch.save(self.model.state_dict(), "last.pt")
            torch.cuda.empty_cache()

    def run_epoch(self):
        total = torch.zeros((), device=self.device)
        for images, labels in self.loader:
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            loss = nn.functional.cross_entropy(self.model(images), labels)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            total += loss.detach()
        return total
