import torch
from torch import nn

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
table = torch.randn(100, 4, device=dev)
for _ in range(20):
    ids = torch.randint(0, 100, (32,), device=dev)
    rows = table[ids]
    keep = rows.norm(dim=1) > 1
    rows = torch.where(keep[:, None], rows, torch.zeros_like(rows))
    rows[keep.logical_not()] = 0.0
    reps = torch.full((32,), 2, device=dev)
    more = rows.repeat_interleave(reps, dim=0, output_size=64)
    twice = rows.repeat_interleave(2, dim=0)
    hot = torch.nn.functional.one_hot(ids, num_classes=100)
    part = rows[:, 1:3]
    first = rows[0] + rows[-1]
    if rows.shape[0] > 3 and rows.ndim == 2 and rows is not None:
        part = part + len(rows)
