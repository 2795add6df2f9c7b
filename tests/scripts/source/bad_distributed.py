import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

local = int(os.environ["LOCAL_RANK"])
torch.distributed.init_process_group("nccl")
model = DDP(nn.Linear(8, 1).cuda(local), device_ids=[local])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 8))
first = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)  # LDR022
sampler = DistributedSampler(data)  # LDR022
second = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2, pin_memory=True, persistent_workers=True)
for epoch in range(3):
    for (x,) in first:
        model(x.cuda(local, non_blocking=True)).mean().backward()
        opt.step()
    for (x,) in second:
        model(x.cuda(local, non_blocking=True)).mean().backward()
        opt.step()
