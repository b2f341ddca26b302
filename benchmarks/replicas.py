"""What a training step costs: ours beside a plain PyTorch loop, interleaved, as ratios of medians.

python benchmarks/replicas.py [--models mlp cnn transformer] [--replicas 1 2 4 8 16]
                              [--micro-batches 1 2 8 16] [--seconds 1.0] [--threads 1] [--json]

For every model, number of replicas R and micro-batch: milliseconds of
  ours      one call of poptorch.trainingModel with R replicas
  plain     one hand-written step over the same global batch in one piece
  separate  R hand-written forward and backward passes and one update
and ours/plain, ours/separate. Targets: at R = 1 ours/plain at most 1.03; at R >= 4 ours/plain at
most 1.05, and ours/separate below 1 for micro-batches 1 and 2.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from show_rows import show_rows
from torch import nn

import popdist_py.poptorch as poptorch

CLASSES = 10


class Classifier(nn.Module):
    def __init__(self, layers: nn.Module):
        super().__init__()
        self.layers = layers

    def forward(self, x, y):
        out = self.layers(x)
        return out, F.cross_entropy(out, y)


class Encoder(nn.Module):
    """Two transformer layers over 16 tokens of 64 numbers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.out(self.encoder(x.flatten(1).unflatten(1, (16, 64))).mean(1))


def make(name: str) -> nn.Module:
    """Return a model of images of 1 x 32 x 32."""
    if name == "mlp":
        return Classifier(
            nn.Sequential(
                nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                nn.Linear(512, CLASSES),
            )
        )  # fmt: skip
    if name == "cnn":
        return Classifier(
            nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, CLASSES),
            )
        )  # fmt: skip
    return Classifier(Encoder())


def sgd(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def steps(name: str, replicas: int, micro_batch: int):
    """Return the three implementations of a step, by name, and how ours runs its replicas."""
    model = make(name)
    # Each has its own model: the second to use a shared one would find its weights in the cache.
    plain_model, separate_model = copy.deepcopy(model), copy.deepcopy(model)
    x = torch.randn(replicas * micro_batch, 1, 32, 32)
    y = torch.randint(0, CLASSES, (replicas * micro_batch,))
    options = poptorch.Options().replicationFactor(replicas).showCompilationProgressBar(False)
    ours = poptorch.trainingModel(model, options, sgd(model))
    ours(x, y)
    optimizer, separate_optimizer = sgd(plain_model), sgd(separate_model)

    def plain() -> None:
        optimizer.zero_grad()
        plain_model(x, y)[1].backward()
        optimizer.step()

    def separate() -> None:
        separate_optimizer.zero_grad()
        for part, labels in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
            (separate_model(part, labels)[1] / replicas).backward()
        separate_optimizer.step()

    implementations = {"ours": lambda: ours(x, y), "plain": plain, "separate": separate}
    return implementations, ours._compiled.program.back_end


def measure(implementations, seconds: float, turns: int = 0) -> dict[str, float]:
    """Return the median milliseconds by implementation; they take turns, in every order.

    At least so many turns are taken, or two for each implementation.
    """
    turns = turns or 2 * len(implementations)
    milliseconds: dict[str, list[float]] = {name: [] for name in implementations}
    for step in implementations.values():
        step()
    deadline = time.perf_counter() + seconds
    # The order changes, because a step finds in the caches what the step before it left there.
    orders = itertools.cycle(itertools.permutations(implementations))
    while time.perf_counter() < deadline or len(milliseconds["ours"]) < turns:
        for name in next(orders):
            start = time.perf_counter()
            implementations[name]()
            milliseconds[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in milliseconds.items()}


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row for every model, number of replicas and micro-batch."""
    for name in arguments.models:
        for replicas in arguments.replicas:
            for micro_batch in arguments.micro_batches:
                implementations, execution = steps(name, replicas, micro_batch)
                times = measure(implementations, arguments.seconds)
                yield {
                    "model": name,
                    "replicas": replicas,
                    "micro_batch": micro_batch,
                    "execution": execution,
                    **{
                        f"{implementation}_ms": round(ms, 3) for implementation, ms in times.items()
                    },
                    "ours/plain": round(times["ours"] / times["plain"], 3),
                    "ours/separate": round(times["ours"] / times["separate"], 3),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "transformer"])
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2, 8, 16])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    show_rows(rows(arguments), as_json=arguments.json)


if __name__ == "__main__":
    main()
