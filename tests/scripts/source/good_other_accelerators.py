import torch
import torch.distributed as dist
from torch import nn

from my_platform import DistributedType, is_torch_xla_available, is_xpu_available


def gather(value, kind):
    if kind == DistributedType.MULTI_NEURON:
        sizes = torch.tensor([value.numel()], device=value.device)
        return value[: int(sizes.item())]
    elif kind in ("xla", "tpu"):
        return value.cpu()
    if is_xpu_available():
        torch.xpu.synchronize()
    return value


device = torch.device("cuda")
model = nn.Linear(8, 1).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
for _ in range(100):
    loss = model(torch.randn(4, 8, device=device)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    gather(loss.detach(), dist.get_backend())
    if is_torch_xla_available():
        print(loss.item())
