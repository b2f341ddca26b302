"""Trains a pipeline over two IPUs, logs its loss, and starts processes that log too."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import torch

import popdist_py
import popdist_py.poptorch as poptorch

STEPS = 10
MICRO_BATCHES = 4
_CHILD = "import popdist_py; m = popdist_py.Metrics(); m.update(loss=-1); m.log(99)"


class Pipeline(torch.nn.Module):
    """Two stages, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and loss."""
        with poptorch.Block("first", ipu_id=0):
            x = self.first(x).relu()
        with poptorch.Block("second", ipu_id=1):
            x = self.second(x)
            return x, torch.nn.functional.cross_entropy(x, y)


def main() -> None:
    """Train; ``processes`` as the only argument has others log as well."""
    options = popdist_py.poptorch.DistributedOptions()
    options.showCompilationProgressBar(False)
    options.Training.gradientAccumulation(MICRO_BATCHES)
    module = Pipeline()
    samples = torch.rand(2 * 8 * MICRO_BATCHES * (STEPS + 2), 64)
    data = torch.utils.data.TensorDataset(samples, torch.zeros(len(samples)).long())
    loader = poptorch.DataLoader(
        options, data, batch_size=8, mode=poptorch.DataLoaderMode.Async, num_workers=1
    )
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))
    metrics = popdist_py.Metrics()
    for step, (x, y) in zip(range(1, STEPS + 1), loader, strict=False):
        with popdist_py.span("mine", number=step):
            _, loss = model(x, y)
        print(step, repr(loss.item()), flush=True)
        metrics.update(loss=loss, odd=math.nan if step % 2 else 1.0)
        metrics.log(step)
    if sys.argv[1:] == ["processes"]:
        alone = {k: v for k, v in os.environ.items() if k != "POPDIST_NUM_TOTAL_REPLICAS"}
        subprocess.run([sys.executable, "-c", _CHILD], check=True, env=alone)
        popdist_py.execute_on_instances({1}, _log_alone)
    popdist_py.barrier()


def _log_alone() -> None:
    metrics = popdist_py.Metrics()
    metrics.update(alone=1)
    metrics.log(STEPS + 1)


if __name__ == "__main__":
    main()
