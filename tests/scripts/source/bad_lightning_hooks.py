import lightning as L
import torch
from torch import nn


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.scale = torch.ones(8)

    def forward(self, x):
        return self.net(x * self.scale.to(x.device))  # CPY004

    def shared(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.shared(batch)
        if torch.isnan(loss):  # SYN002
            return None
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        print(outputs["loss"])  # SYN003

    def validation_step(self, batch, batch_idx):
        self.log("val", self.shared(batch).item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
