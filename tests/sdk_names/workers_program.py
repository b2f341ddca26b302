"""Sends objects of the SDK's names through every kind of worker process."""

import multiprocessing
import pickle
import sys

import popdist
import poptorch
import torch
from poptorch.optim import AdamW


class Data(torch.utils.data.Dataset):
    """Items that a worker makes; it holds objects of poptorch."""

    def __init__(self):
        self.mode = poptorch.OutputMode.All
        self.options = poptorch.Options().deviceIterations(2)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert self.mode is poptorch.OutputMode.All
        assert type(self.options) is poptorch.Options
        return torch.full((2,), float(index))


def work(arguments):
    mode, options, optimizer = arguments
    assert mode is poptorch.OutputMode.All
    assert isinstance(options, poptorch.Options)
    assert optimizer is AdamW
    import popdist_py.poptorch

    assert poptorch.Options is popdist_py.poptorch.Options
    return options.deviceIterations(5), sys.modules["poptorch"].__file__


def main():
    options = popdist.poptorch.Options().randomSeed(3)
    sent = (poptorch.OutputMode.All, poptorch.Options(), AdamW)
    for method in sys.argv[1:]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            ((back, file),) = pool.map(work, [sent])
        assert (back.device_iterations, file) == (5, poptorch.__file__)
        print(method, "pool")
    for arguments in ({}, {"mode": poptorch.DataLoaderMode.Async}, {"num_workers": 1}):
        loader = poptorch.DataLoader(options, Data(), batch_size=2, **arguments)
        print("loader", sum(float(batch.sum()) for batch in loader))
    again = pickle.loads(pickle.dumps(options))
    assert type(again) is popdist.poptorch.Options


if __name__ == "__main__":
    main()
