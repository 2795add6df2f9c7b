import h5py
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Table(Dataset):
    def __init__(self, path):
        self.file = h5py.File(path)  # LDR012

    def __len__(self):
        return 100

    def __getitem__(self, i):
        row = torch.as_tensor(self.file["x"][i])
        return row.to("cuda")  # LDR011


class Lines(IterableDataset):
    def __iter__(self):
        for line in open("lines.txt"):
            yield torch.tensor(float(line))


def main():
    model = nn.Linear(8, 1).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Table("a.h5"), batch_size=8, num_workers=4, pin_memory=True):
        loss = model(batch).mean()
        loss.backward()
        opt.step()
    for batch in DataLoader(Lines(), batch_size=8, num_workers=4, pin_memory=True):  # LDR017
        loss = model(batch.cuda(non_blocking=True)).mean()
        loss.backward()
        opt.step()


main()
