"""An instance leaves while weights are updated; the other one tries to save them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from jobs import join
from torch import nn

import popdist_py
from popdist_py import poptorch

WIDTH = 2200  # four buckets let some parameters be updated before others


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])

    def forward(self, x):
        return poptorch.identity_loss((self.layers(x) ** 2).mean(), reduction="none")


comm = join()
me = comm.instance_index
net = Net()
options = poptorch.Options().showCompilationProgressBar(False)
options.Distributed.configureProcessId(me, comm.num_instances)
model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=1.0))
model(torch.ones(2, WIDTH))
if me == 1:
    training = model._compiled.program.training
    parts = type(training.gradients).in_parts

    def one_part(gradients):
        yield next(iter(parts(gradients)))
        os._exit(0)

    if training.optimizer.updates_each_alone:
        type(training.gradients).in_parts = one_part
    else:
        training.optimizer._communicator.agree = lambda *_: os._exit(0)
try:
    model(torch.ones(2, WIDTH))
except popdist_py.InstanceLostError:
    for save in (model.copyWeightsToHost, model.instance_state, model.training_state):
        try:
            save()
            print("saved a mixture", flush=True)
        except poptorch.Error as error:
            print(f"refused: {error.message}", flush=True)
os._exit(0)
