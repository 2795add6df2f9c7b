# Calls in the layouts that people use.
import torch
import torch.utils.data as data
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

table = TensorDataset(torch.arange(32.0))

one_a_line = DataLoader(
    table,
    batch_size=8,
    shuffle=True,  # keep this comment
)
no_comma = DataLoader(
	table,
	batch_size=8  # a tab indents here
)
aligned = DataLoader(table, batch_size=8,
                     shuffle=True)
positional = DataLoader(table, 8, True, num_workers=0, prefetch_factor=None)
by_module = data.DataLoader(table, 8, True, None, None, 2)
replaced = DataLoader(table, num_workers=(2), persistent_workers=True, prefetch_factor=4)
removed = DataLoader(
    table,
    num_workers=2,
    persistent_workers=True,
    batch_size=4,
)
if True: guarded = data.DataLoader(table, batch_size=8)
long = DataLoader(table, batch_size=8, shuffle=False, drop_last=False, timeout=0, worker_init_fn=None, collate_fn=None)
