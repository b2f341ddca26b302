"""MLOps course, "Distributed data loading": a data set and its loader, with the blanks filled in.
"""

# %% from the text
from torch.utils.data import Dataset, DataLoader

# %% typed by the reader: what the dots stand for, and the spelling of the loader that the block uses
import torch

Dataloader = DataLoader

# %% from the text, with its dots filled in
class MyDataset(Dataset):
    def __init__(self, items=32):
        # whatever logic is needed to init the data set
        self.data = torch.arange(items)

    def __getitem__(self, idx):
        # return one item
        return self.data[idx]

# %% typed by the reader: a data set has a length
    def __len__(self):
        return len(self.data)

# %% from the text
dataset = MyDataset()
dataloader = Dataloader(
    dataset,
    batch_size=8,
    num_workers=4  # this is the number of threds we want to parallize workload over
)

# %% typed by the reader: one batch, "e.g. next(dataloader)"
print(next(iter(dataloader)))
print(len(dataloader), "batches")
