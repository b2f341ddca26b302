"""Trains a little with what touches folders: a cache of executables and a loader process."""

import torch

import popdist_py
from popdist_py import poptorch


class Model(torch.nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out, poptorch.identity_loss(out, reduction="mean")


def main():
    popdist_py.init()
    options = poptorch.DistributedOptions().showCompilationProgressBar(False).randomSeed(1)
    data = torch.utils.data.TensorDataset(torch.ones(16, 2))
    loader = poptorch.DataLoader(
        options, data, batch_size=2, shuffle=True, mode=poptorch.DataLoaderMode.Async
    )
    model = Model(2, 1)
    training = poptorch.trainingModel(model, options, poptorch.optim.Adam(model.parameters()))
    steps = [training(x) for (x,) in loader]
    print(f"instance {popdist_py.getInstanceIndex()} trained {len(steps)} steps")


if __name__ == "__main__":
    main()
