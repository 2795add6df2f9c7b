import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 1).to(dev)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
batches = [(torch.randn(4, 8, pin_memory=True), torch.randn(4, 1, pin_memory=True)) for _ in range(8)]
import logging

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

log = logging.getLogger(__name__)
writer = SummaryWriter()
bar = tqdm(batches)
for step, (x, y) in enumerate(bar):
    x, y = x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    writer.add_scalar("loss", loss, step)  # SYN001
    bar.set_postfix(loss=loss)  # SYN001
    log.info("loss %s", loss)  # SYN003
    bar.set_description(f"loss {loss:.3f}")  # SYN003
    text = "%.3f" % loss  # SYN003
    other = "{:.3f}".format(loss)  # SYN003
