import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
table = torch.randn(100, 4, device=dev)
for _ in range(20):
    ids = torch.randint(0, 100, (32,), device=dev)
    rows = table[ids]
    keep = rows.norm(dim=1) > 1
    rows = rows[keep]  # SYN004
    reps = torch.randint(1, 3, (rows.shape[0],), device=dev)
    rows = rows.repeat_interleave(reps, dim=0)  # SYN004
    hot = torch.nn.functional.one_hot(ids)  # SYN004
    values = torch.zeros(32, device=dev)
    values[keep] = rows.sum(dim=1)  # SYN004
