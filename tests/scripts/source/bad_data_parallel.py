import torch
from torch import nn

model = nn.DataParallel(nn.Linear(8, 1)).cuda()  # PLN017


class Split(nn.Module):  # PLN017
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8).to("cuda:0")
        self.b = nn.Linear(8, 8).to("cuda:1")

    def forward(self, x):
        return self.b(self.a(x.to("cuda:0")).to("cuda:1"))
