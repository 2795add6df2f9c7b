# Calls in the layouts that people use.
import torch
import torch.utils.data as data
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)
from torch.utils.data import BatchSampler, RandomSampler

table = TensorDataset(torch.arange(32.0))

one_a_line = DataLoader(
    table,
    sampler=BatchSampler(RandomSampler(table), 8, drop_last=False),
    batch_size=None,
    num_workers=2,
)
no_comma = DataLoader(
	table,
	batch_size=8,  # a tab indents here
	num_workers=2,
	pin_memory=True
)
aligned = DataLoader(table, batch_size=8,
                     shuffle=True, num_workers=2)
positional = DataLoader(table, 8, True, num_workers=2, prefetch_factor=4)
by_module = data.DataLoader(table, sampler=data.BatchSampler(data.RandomSampler(table), 8, drop_last=False),
                            batch_size=None, num_workers=4)
replaced = DataLoader(table, num_workers=(8))
removed = DataLoader(
    table,
    num_workers=0,
    batch_size=4,
)
if True: guarded = data.DataLoader(table, sampler=data.BatchSampler(data.SequentialSampler(table), 8, drop_last=False),
                                   batch_size=None)
long = DataLoader(table, batch_size=8, shuffle=False, drop_last=False, timeout=0, worker_init_fn=None, collate_fn=None,
                  num_workers=2)
