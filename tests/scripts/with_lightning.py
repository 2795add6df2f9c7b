"""Lightning owns the loop and wraps the loader."""
import warnings

warnings.filterwarnings("ignore")
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)

    def training_step(self, batch, number):
        x, y = batch
        x = x.to("cpu")  # COPY
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.last = loss.item()  # SYNC
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


loader = DataLoader(data, batch_size=8, shuffle=True)  # LOADER
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), loader)
