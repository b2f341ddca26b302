"""Reads shuffled data without a seed of its own; every instance prints what it read, as JSON."""

import json
import sys

import torch

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.data import shared_seed

DATA = torch.utils.data.TensorDataset(torch.arange(30))


def main(mode):
    options = poptorch.DistributedOptions()
    mode = poptorch.DataLoaderMode[mode]

    def make(**arguments):
        return poptorch.DataLoader(options, DATA, mode=mode, **arguments)

    def epochs(loader):
        return [[int(x) for (batch,) in loader for x in batch] for _ in range(2)]

    loader = make(shuffle=True)
    saved = loader.state_dict()
    found = {"shuffled": epochs(loader), "seed": shared_seed.shared_seed(options)}
    found["sampler"] = epochs(make(sampler=torch.utils.data.RandomSampler(DATA)))
    # Like a later run: it draws another seed, and goes on with the order that was saved.
    shared_seed._seeds.clear()
    resumed = make(shuffle=True)
    resumed.load_state_dict(saved)
    found |= {"resumed": epochs(resumed), "later seed": shared_seed.shared_seed(options)}
    # One instance that is alone in a call agrees with itself, and waits for nobody.
    found["alone"] = popdist_py.execute_on_instances({1}, shared_seed.shared_seed, options)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
