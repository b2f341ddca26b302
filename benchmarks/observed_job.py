"""The training that observe.py looks at in every way: steps of some 10 ms, and what they take.

Instance 0 prints the median of its steps in microseconds. Nothing here knows who looks.

Usage: poprun-py -n 2 benchmarks/observed_job.py STEPS
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import nn

import popdist_py
from popdist_py import poptorch

_WARM_UP = 20
_BATCH = 128


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        self.loss = nn.MSELoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layers(x)
        return out, self.loss(out, y)


def main() -> None:
    """Train, and print what a step took."""
    steps = int(sys.argv[1])
    popdist_py.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = poptorch.Options().showCompilationProgressBar(False)
    net = _Model()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=1e-3)
    model = poptorch.trainingModel(net, options, optimizer)
    x = torch.randn((steps + _WARM_UP) * _BATCH, 512)
    loader = poptorch.DataLoader(options, torch.utils.data.TensorDataset(x, x), batch_size=_BATCH)
    took = []
    before = time.perf_counter()
    for batch, target in loader:
        model(batch, target)
        now = time.perf_counter()
        took.append(now - before)
        before = now
    if popdist_py.getInstanceIndex() == 0:
        print(round(statistics.median(took[_WARM_UP:]) * 1e6, 1))


if __name__ == "__main__":
    main()
