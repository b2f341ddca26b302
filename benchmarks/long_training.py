"""Trains and validates a small net for a long time; run by long_run.py.

Arguments: seconds and steps, of which the first that is reached ends it. Every instance writes one
line of JSON a window of steps: the step, and microseconds of a step of the window, in the median
and in the fast tenth, beside the fast tenth of hand-written steps of the same net in between.
What else the machine does slows both, and the fast tenth least.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import nn

import popdist_py
from popdist_py import poptorch

WINDOW, MICRO_BATCH, SAMPLES = 250, 4, 4096
HAND_WRITTEN = 20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        scores = self.body(x)
        return scores if y is None else (scores, self.loss(scores, y))


def epochs(loader):
    """Give the batches of the loader again and again."""
    while True:
        yield from loader


def hand_written(x, y):
    """Return a function that takes a plain step of such a net and returns its seconds."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step():
        start = time.perf_counter()
        optimizer.zero_grad()
        net(x, y)[1].backward()
        optimizer.step()
        return time.perf_counter() - start

    return step


def fast_tenth(seconds):
    """Return the microseconds that a tenth of the steps does not exceed."""
    return round(1e6 * sorted(seconds)[len(seconds) // 10], 1)


def main():
    seconds, steps = float(sys.argv[1]), int(sys.argv[2])
    popdist_py.init()
    torch.manual_seed(1)
    net = Net()
    options = poptorch.DistributedOptions()
    data = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 64), torch.randint(0, 10, (SAMPLES,))
    )
    loader = poptorch.DataLoader(options, data, batch_size=MICRO_BATCH, shuffle=True)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    training = poptorch.trainingModel(net, options, optimizer=optimizer)
    validation = poptorch.inferenceModel(net, poptorch.DistributedOptions())
    plain_step = hand_written(*(tensor[:MICRO_BATCH] for tensor in data.tensors))
    batches, began, step, taken = epochs(loader), time.monotonic(), 0, []
    while True:
        x, y = next(batches)
        start = time.perf_counter()
        training(x, y)
        taken.append(time.perf_counter() - start)
        step += 1
        if step % WINDOW:
            continue
        validation(x)
        window = {
            "step": step,
            "median_us": round(1e6 * statistics.median(taken)),
            "fast_us": fast_tenth(taken),
            "plain_us": fast_tenth([plain_step() for _ in range(HAND_WRITTEN)]),
        }
        taken.clear()
        print(json.dumps(window), flush=True)
        is_over = time.monotonic() - began > seconds or step >= steps
        if any(popdist_py.all_gather_object({"step": step, "is_over": is_over})[i]["is_over"]
               for i in range(popdist_py.getNumInstances())):  # fmt: skip
            break


if __name__ == "__main__":
    main()
