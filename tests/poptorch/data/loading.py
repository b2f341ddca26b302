"""Data sets and readers for the tests of data loading."""

from __future__ import annotations

import torch

from popdist_py.poptorch import DataLoaderMode, SharingStrategy

torch.set_num_threads(1)
FORK = {"sharing_strategy": SharingStrategy.Fork}
ASYNC = {"mode": DataLoaderMode.Async, "async_options": FORK}
REBATCHED = {"mode": DataLoaderMode.AsyncRebatched, "async_options": FORK}


def numbers(count):
    return torch.utils.data.TensorDataset(torch.arange(count), torch.arange(count) * 0.5)


def flat(lists):
    return [element for elements in lists for element in elements]


def read(batches):
    return [batch[0].tolist() for batch in batches]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(torch.arange(start, self.count, step))

    def __len__(self):
        return self.count


class Broken(torch.utils.data.Dataset):
    def __init__(self, at):
        self.at = at

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == self.at:
            raise KeyError("this element is broken")
        return torch.tensor([index])


def print_nothing(_):
    pass
