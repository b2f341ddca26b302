"""The training of slow_jobs.py, which can be made slow in one way and mended again.

Instance 0 prints the microseconds of a sample, without those of the first steps.

Usage: poprun-py -n 2 benchmarks/slow_job.py CAUSE [--mended] [--steps 60] [--cpu 1]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import torch
from torch import nn

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

CAUSES = ("none", "loader", "uneven", "own-code", "cores", "link", "batches", "saving", "compile")
_WARM_UP = 10
_WIDTH = 256
_BATCH = 16


class _Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that each take some time to read, as from a disk or over a network."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._seconds)
        return torch.full((_WIDTH,), index / self._count), torch.zeros(_WIDTH)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(8)))
        self.loss = nn.MSELoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layers(x)
        return out, self.loss(out, y)


def main() -> None:
    """Train, and print how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cause", choices=CAUSES)
    parser.add_argument("--mended", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cpu", type=int, help="instance 1 runs on this CPU only")
    arguments = parser.parse_args()
    popdist_py.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    slow = "none" if arguments.mended else arguments.cause
    if arguments.cpu is not None and popdist_py.getInstanceIndex() == 1:
        os.sched_setaffinity(0, [arguments.cpu])
    took = _train(arguments.cause, slow, arguments.steps)
    if popdist_py.getInstanceIndex() == 0:
        print(took)


def _train(cause: str, slow: str, steps: int) -> float:
    """Train for some steps, which ``slow`` makes slow, and return the microseconds of a sample."""
    options = poptorch.DistributedOptions().showCompilationProgressBar(False)
    options.Training.gradientAccumulation(accumulated := 8 if cause == "link" != slow else 1)
    model = _compiled_later(options)
    batch = 1 if slow == "batches" else _BATCH
    samples = batch * accumulated * popdist_py.getNumTotalReplicas()
    loader = poptorch.DataLoader(
        options,
        _Samples((steps + _WARM_UP) * samples, _seconds_to_read(cause, slow)),
        batch_size=batch,
        num_workers=8 if cause == "loader" != slow else 0,
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = None
        if cause == "saving":
            every = 1 if slow == "saving" else 50
            checkpoints = TrainingCheckpoints(folder, model, disk_every=every)
        since = 0.0
        for step, (x, y) in enumerate(loader, start=1):
            if slow == "compile" and step % 5 == 0:
                model.destroy()
                model = _compiled_later(options)
            model(x, y)
            if slow == "own-code" and popdist_py.getInstanceIndex() == 0:
                time.sleep(0.02)
            if checkpoints is not None:
                checkpoints.save(step)
            if step == _WARM_UP:
                since = time.perf_counter()
        seconds = time.perf_counter() - since
    return round(seconds / steps / samples * 1e6, 1)


def _compiled_later(options: poptorch.Options) -> poptorch.PoplarExecutor:
    """Return a new model, which its first call compiles."""
    net = _Model()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    return poptorch.trainingModel(net, options, optimizer)


def _seconds_to_read(cause: str, slow: str) -> float:
    """Return the seconds that this instance needs to read a sample."""
    if cause == "loader":
        return 0.002
    if slow == "uneven":
        return 0.002 * popdist_py.getInstanceIndex()
    return 0.001 if cause == "uneven" else 0.0


if __name__ == "__main__":
    main()
