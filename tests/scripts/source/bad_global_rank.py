import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)  # LCH017
model = nn.Linear(8, 8).to(torch.device("cuda", int(os.environ["RANK"])))  # LCH017
