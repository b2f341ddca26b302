"""Efficient data loading: is the DataLoader or the model the bottleneck?

The program of PopTorch's data-loading tutorial, with its imports and sizes changed only: measures
the DataLoader alone, the model on synthetic data, and both together.

python examples/tutorials/data_loading.py
python examples/tutorials/data_loading.py --synthetic-data --replicas 4
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from popdist_py import poptorch


class ClassificationModel(nn.Module):
    """The tutorial's network; ``side`` is the height and width of the images."""

    def __init__(self, side: int = 128) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(5, 12, 5)
        self.norm = nn.GroupNorm(3, 12)
        self.fc1 = nn.Linear(12 * ((side - 2) // 2 - 4) ** 2, 100)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(100, 10)
        self.log_softmax = nn.LogSoftmax(dim=1)
        self.loss = nn.NLLLoss()

    def forward(self, x, labels=None):
        x = self.pool(self.relu(self.conv1(x)))
        x = self.norm(self.relu(self.conv2(x)))
        x = torch.flatten(x, start_dim=1)
        x = self.relu(self.fc1(x))
        x = self.log_softmax(self.fc2(x))
        if self.training:
            return x, self.loss(x, labels)
        return x


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Return the throughputs in items/s, by what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--device-iterations", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--items", type=int, default=1024)
    parser.add_argument("--side", type=int, default=64, help="height and width of the images")
    parser.add_argument("--synthetic-data", action="store_true", help="data made on the IPU")
    parser.add_argument(
        "--device", choices=["mk1", "mk2", "bow"], default="mk2", help="the IPUs that it has to fit"
    )
    args = parser.parse_args(argv)

    opts = poptorch.Options()
    opts.Emulator.device(args.device)
    opts.deviceIterations(args.device_iterations)
    opts.replicationFactor(args.replicas)
    if args.synthetic_data:
        opts.enableSyntheticData(True)

    features = torch.randn([args.items, 1, args.side, args.side])
    labels = torch.empty([args.items], dtype=torch.long).random_(10)
    dataset = torch.utils.data.TensorDataset(features, labels)
    training_data = poptorch.DataLoader(
        opts,
        dataset=dataset,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        mode=poptorch.DataLoaderMode.Async,
        async_options={"early_preload": True, "miss_sleep_time_in_ms": 0},
    )
    model = ClassificationModel(args.side)
    model.train()
    training_model = poptorch.trainingModel(
        model, opts, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    )
    steps = len(training_data)
    items = steps * args.device_iterations * args.batch_size * args.replicas
    print(f"global batch {args.batch_size * args.replicas}, {steps} steps")

    def throughput(step) -> float:
        began = time.perf_counter()
        for data, target in training_data:
            step(data, target)
        return items / (time.perf_counter() - began)

    figures = {"DataLoader": throughput(lambda *_: None)}
    for data, target in training_data:
        training_model.compile(data, target)
        break
    kind = "synthetic data" if args.synthetic_data else "real data"
    figures[kind] = throughput(training_model)
    for what, value in figures.items():
        print(f"{what} throughput: {value:.0f} items/s")
    training_data.terminate()
    return figures


if __name__ == "__main__":
    main()
