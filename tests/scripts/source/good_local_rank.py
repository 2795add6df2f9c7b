import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
model = nn.Linear(8, 8).to(torch.device("cuda", dist.get_rank() % torch.cuda.device_count()))
other = nn.Linear(8, 8).to(f"cuda:{local}")
