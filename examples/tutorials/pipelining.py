"""Parallel execution using pipelining: MNIST over four IPUs.

The program of PopTorch's pipelining tutorial (mnist_pipeline.py) with its imports and data path
changed only.

python examples/tutorials/pipelining.py --data-dir DIR     # DIR/MNIST/raw holds the idx files
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from popdist_py import poptorch


class ConvLayer(nn.Module):
    """Convolution, max pooling, ReLU."""

    def __init__(self, in_channels, num_filters, kernel_size, pool_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, num_filters, kernel_size=kernel_size)
        self.pool = nn.MaxPool2d(kernel_size=pool_size)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.conv(x)
        x = self.pool(x)
        return self.relu(x)


class Network(nn.Module):
    """Four blocks, placed on IPUs by the strategy."""

    def __init__(self):
        super().__init__()
        self.layer1 = ConvLayer(1, 10, 5, 2)
        self.layer2 = ConvLayer(10, 20, 5, 2)
        self.layer3 = nn.Linear(320, 256)
        self.layer3_act = nn.ReLU()
        self.layer4 = nn.Linear(256, 10)

    def forward(self, x):
        with poptorch.Block("B1"):
            x = self.layer1(x)
        with poptorch.Block("B2"):
            x = self.layer2(x)
        with poptorch.Block("B3"):
            x = x.view(-1, 320)
            x = self.layer3_act(self.layer3(x))
        with poptorch.Block("B4"):
            return self.layer4(x)


class TrainingModelWithLoss(torch.nn.Module):
    """The network and its loss, in the block of the last layer."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, args, labels=None):
        output = self.model(args)
        if labels is None:
            return output
        with poptorch.Block("B4"):
            loss = self.loss(output, labels)
        return output, loss


def get_training_model(opts, model, learning_rate):
    """Wrap a model with the loss and the optimiser into a training model."""
    model_with_loss = TrainingModelWithLoss(model)
    return poptorch.trainingModel(
        model_with_loss,
        opts,
        optimizer=poptorch.optim.AdamW(model.parameters(), lr=learning_rate),
    )


def accuracy(predictions, labels):
    """Return the share of correct predictions in per cent."""
    _, ind = torch.max(predictions, 1)
    labels = labels[-predictions.size()[0] :]
    return torch.sum(torch.eq(ind, labels)).item() / labels.size()[0] * 100.0


def train(training_model, training_data, epochs):
    """Train with one progress bar for each epoch."""
    nr_steps = len(training_data)
    for epoch in range(1, epochs + 1):
        print(f"Epoch {epoch}/{epochs}")
        bar = tqdm(training_data, total=nr_steps)
        for data, labels in bar:
            preds, losses = training_model(data, labels)
            mean_loss = torch.mean(losses).item()
            acc = accuracy(preds, labels)
            bar.set_description(f"Loss:{mean_loss:0.4f} | Accuracy:{acc:0.2f}%")


def test(inference_model, test_data):
    """Print and return the accuracy on the test set in per cent."""
    nr_steps = len(test_data)
    sum_acc = 0.0
    for data, labels in tqdm(test_data, total=nr_steps):
        output = inference_model(data)
        sum_acc += accuracy(output, labels)
    print(f"Accuracy on test set: {sum_acc / len(test_data):0.2f}%")
    return sum_acc / len(test_data)


def main(argv: list[str] | None = None) -> float:
    """Train and test; returns the test accuracy in per cent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--test-batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--device-iterations", type=int, default=10)
    parser.add_argument("--inference-iterations", type=int, default=100)
    parser.add_argument("--gradient-accumulation", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategy", choices=["pipelined", "sharded"], default="pipelined")
    parser.add_argument("--offload-optimiser", action="store_true")
    parser.add_argument(
        "--device", choices=["mk1", "mk2", "bow"], default="mk2", help="the IPUs that it has to fit"
    )
    args = parser.parse_args(argv)

    import torchvision

    transform = torchvision.transforms.Compose(
        [
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize((0.1307,), (0.3081,)),
        ]
    )
    try:
        train_dataset, test_dataset = (
            torchvision.datasets.MNIST(args.data_dir, train=train, transform=transform)
            for train in (True, False)
        )
    except RuntimeError:
        sys.exit(f"no MNIST in {args.data_dir}: expected its idx files in MNIST/raw there")

    train_opts = poptorch.Options()
    train_opts.Emulator.device(args.device)
    train_opts.deviceIterations(args.device_iterations)
    train_opts.Training.gradientAccumulation(args.gradient_accumulation)
    stages = (
        poptorch.Stage("B1").ipu(0),
        poptorch.Stage("B2").ipu(1),
        poptorch.Stage("B3").ipu(2),
        poptorch.Stage("B4").ipu(3),
    )
    if args.strategy == "pipelined":
        train_opts.setExecutionStrategy(poptorch.PipelinedExecution(*stages))
    else:
        train_opts.setExecutionStrategy(poptorch.ShardedExecution(*stages))
    if args.offload_optimiser:
        train_opts.TensorLocations.setOptimizerLocation(
            poptorch.TensorLocationSettings().useOnChipStorage(False)
        )
    train_opts.outputMode(poptorch.OutputMode.All)

    training_data = poptorch.DataLoader(
        train_opts,
        train_dataset,
        batch_size=args.batch_size,
        shuffle=True,
        mode=poptorch.DataLoaderMode.Async,
        num_workers=args.workers,
    )
    test_data = poptorch.DataLoader(
        poptorch.Options().deviceIterations(args.inference_iterations),
        test_dataset,
        batch_size=args.test_batch_size,
        shuffle=True,
        drop_last=True,
        mode=poptorch.DataLoaderMode.Async,
        num_workers=args.workers,
    )
    model = Network()
    training_model = get_training_model(train_opts, model, args.learning_rate)
    train(training_model, training_data, args.epochs)

    inf_options = train_opts.clone()
    inf_options.Training.gradientAccumulation(1)
    inf_options.deviceIterations(args.inference_iterations)
    inference_model = poptorch.inferenceModel(model, inf_options)
    return test(inference_model, test_data)


if __name__ == "__main__":
    main()
