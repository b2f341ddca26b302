"""Trains a few steps with a loader of its own process; instance 1 may be killed in the middle."""

from __future__ import annotations

import os
import signal
import sys

import torch

import popdist_py
import popdist_py.poptorch as poptorch

STEPS = 12


class Model(torch.nn.Module):
    """A loss that has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return poptorch.identity_loss(self.layer(x).sum(), reduction="none")


def main() -> None:
    """Train; ``kill`` as the only argument ends instance 1 without a word."""
    options = popdist_py.poptorch.DistributedOptions()
    options.showCompilationProgressBar(False)
    data = torch.utils.data.TensorDataset(torch.ones(1000, 4))
    loader = poptorch.DataLoader(
        options, data, batch_size=4, mode=poptorch.DataLoaderMode.Async, num_workers=1
    )
    module = Model()
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))
    for number, (x,) in enumerate(loader):
        with popdist_py.span("mine", number=number):
            model(x)
        if number + 1 == STEPS:
            break
        if sys.argv[1:] == ["kill"] and number == 5 and popdist_py.getInstanceIndex() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    popdist_py.barrier()


if __name__ == "__main__":
    main()
