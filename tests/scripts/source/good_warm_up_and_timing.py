import torch
from torch import nn

import time

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 1).to(dev)
x = torch.randn(4, 8, device=dev)
for _ in range(10):
    model(x)
torch.cuda.synchronize()
times = []
for _ in range(100):
    begin = time.perf_counter()
    model(x)
    torch.cuda.synchronize()
    times.append(time.perf_counter() - begin)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for _ in range(10):
    start.record()
    model(x)
    end.record()
    torch.cuda.synchronize()
    print(start.elapsed_time(end))
