import lightning as L
import torch
from torch import nn


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        self.log("loss", loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


trainer = L.Trainer(accelerator="cpu", max_epochs=1)
