"""Parallel execution using pipelining: Training on handwritten digits over four IPUs.

python examples/pipelining/mnist_pipeline.py --steps 2
python examples/pipelining/mnist_pipeline.py --strategy sharded --profile --profile-dir sharded
poprun-py -n 2 --num-replicas 2 --ipus-per-replica 4 examples/pipelining/mnist_pipeline.py

The network has four blocks, which a strategy places on IPUs. With the strategy pipelined, each IPU
computes its own micro-batch at a time. With the strategy sharded, one micro-batch passes all IPUs
before the next one begins. Both compute the same numbers. The schedule and the memory of the IPUs
are modelled.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torchvision
from torch import nn
from tqdm import tqdm

import popdist_py
from popdist_py import poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import Parser, from_zero, positive, rate, worker_count
from common.running import make_once, run
from common.sample_data import make_mnist

IPUS = 4
#: The least number of micro-batches that fill the pipeline. They are forwards on all IPUs, and
#: backwards on all IPUs except the last one.
LEAST_ACCUMULATION = 2 * IPUS - 1
STRATEGIES = {"pipelined": poptorch.PipelinedExecution, "sharded": poptorch.ShardedExecution}


class ConvLayer(nn.Module):
    """Convolution, max pooling, ReLU."""

    def __init__(self, in_channels: int, num_filters: int, kernel_size: int, pool_size: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, num_filters, kernel_size=kernel_size)
        self.pool = nn.MaxPool2d(kernel_size=pool_size)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.pool(self.conv(x)))


class Network(nn.Module):
    """A network of four blocks. The execution strategy chooses the IPU of each block."""

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


class TrainingModelWithLoss(nn.Module):
    """The network and its loss, which is in the block of the last layer."""

    def __init__(self, model: Network):
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()

    def forward(self, args, labels=None):
        output = self.model(args)
        if labels is None:
            return output
        with poptorch.Block("B4"):
            loss = self.loss(output, labels)
        return output, loss


@dataclass(frozen=True)
class Outcome:
    """The trained network, and its accuracy on the test set in per cent, over all instances."""

    model: Network
    accuracy: float


def say(line: str) -> None:
    """Print a line on one instance only."""
    if popdist_py.getInstanceIndex() == 0:
        print(line, flush=True)


def progress_bar(steps, total: int) -> tqdm:
    """Return a bar over ``steps``, which only instance 0 shows."""
    return tqdm(steps, total=total, disable=popdist_py.getInstanceIndex() != 0)


def get_training_options(args: argparse.Namespace) -> poptorch.Options:
    """Return the options of the training model.

    The launcher chooses the numbers of instances and replicas.
    """
    options = poptorch.DistributedOptions()
    options.randomSeed(args.seed)
    options.Emulator.device(args.device)
    options.deviceIterations(args.device_iterations)
    options.Training.gradientAccumulation(args.gradient_accumulation)
    options.outputMode(poptorch.OutputMode.All)  # accuracy and loss of every micro-batch
    stages = [poptorch.Stage(f"B{ipu + 1}").ipu(ipu) for ipu in range(IPUS)]
    options.setExecutionStrategy(STRATEGIES[args.strategy](*stages))
    if args.offload_optimiser:
        off_chip = poptorch.TensorLocationSettings().useOnChipStorage(False)
        options.TensorLocations.setOptimizerLocation(off_chip)
    if args.profile:
        options.enableProfiling(str(args.profile_dir))
    return options


def get_inference_options(options: poptorch.Options, iterations: int) -> poptorch.Options:
    """Return the options of the inference model.

    They are the same as for training, but without the options that only weight updates need.
    """
    options = options.clone()
    options.Training.gradientAccumulation(1)
    options.deviceIterations(iterations)
    return options


def get_training_model(
    options: poptorch.Options, model: Network, learning_rate: float
) -> poptorch.PoplarExecutor:
    """Wrap a network with the loss and the optimiser into a training model."""
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=learning_rate)
    return poptorch.trainingModel(TrainingModelWithLoss(model), options, optimizer=optimizer)


def prepare_mnist(folder: Path) -> None:
    """Make digits in MNIST's format in ``folder``/MNIST, unless this folder exists.

    Raises:
        OSError: The folder cannot be written.
    """
    make = partial(make_mnist, training=60_000, test=10_000)
    if popdist_py.getInstanceIndex() == 0 and make_once(folder / "MNIST", make):
        print(f"no MNIST in {folder}: 70,000 digits made of scikit-learn's are in its place")
    popdist_py.barrier()


def get_mnist(folder: Path, train: bool) -> torchvision.datasets.MNIST:
    """Return pictures [1, 28, 28] with the mean 0 and the deviation 1 of MNIST, and labels.

    Raises:
        RuntimeError: A file is missing.
    """
    transform = torchvision.transforms.Compose(
        [
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize((0.1307,), (0.3081,)),
        ]
    )
    return torchvision.datasets.MNIST(folder, train=train, transform=transform)


def get_loader(
    options: poptorch.Options, dataset: torchvision.datasets.MNIST, batch_size: int, workers: int
) -> poptorch.DataLoader:
    """Return a loader that prepares the next step in its own process while the model runs.

    Raises:
        ValueError: The data set is too small for one step.
    """
    step = batch_size * options.device_iterations * options.Training.gradient_accumulation
    step *= options.replication_factor * popdist_py.getNumInstances()
    if len(dataset) < step:
        raise ValueError(
            f"a step takes {step:,} pictures and there are {len(dataset):,}: lower the batch size, "
            "the iterations or the gradient accumulation"
        )
    return poptorch.DataLoader(
        options,
        dataset,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        mode=poptorch.DataLoaderMode.Async,
        num_workers=workers,
    )


def accuracy(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of correct predictions in per cent."""
    labels = labels[-len(predictions) :]
    return (predictions.argmax(1) == labels).float().mean().item() * 100


def train(training_model, loader, *, epochs: int, steps: int) -> None:
    """Train with one progress bar for each epoch."""
    for epoch in range(1, epochs + 1):
        say(f"Epoch {epoch}/{epochs}")
        bar = progress_bar(islice(loader, steps), steps)
        for data, labels in bar:
            predictions, losses = training_model(data, labels)
            percent = accuracy(predictions, labels)
            bar.set_description(f"Loss:{losses.mean():0.4f} | Accuracy:{percent:0.2f}%")


def test(inference_model, loader, *, steps: int) -> float:
    """Print and return the accuracy on the test set in per cent, over all instances."""
    found = [
        accuracy(inference_model(data), labels)
        for data, labels in progress_bar(islice(loader, steps), steps)
    ]
    mean = popdist_py.all_reduce(sum(found) / steps) / popdist_py.getNumInstances()
    say(f"Accuracy on test set: {mean:0.2f}%")
    return mean


def parse_arguments(argv: list[str] | None) -> tuple[Parser, argparse.Namespace]:
    """Return the parser, for later errors, and the arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--batch-size", type=positive, default=40, help="micro-batch of training (40)")
    add("--device-iterations", type=positive, default=10, help="updates of a step (10)")
    add("--test-batch-size", type=positive, default=8, help="micro-batch of the test (8)")
    add("--epochs", type=positive, default=3, help="to train for (3)")
    add("--learning-rate", type=rate, default=0.001, help="of AdamW (0.001)")
    add("--profile", action="store_true", help="write reports of the device, and a timeline")
    add("--profile-dir", type=Path, default=Path("profile"), help="where to (./profile)")
    add("--strategy", choices=STRATEGIES, default="pipelined", help="how IPUs take turns")
    add("--debug", action="store_true", help="show PopTorch's log at the level DEBUG")
    add("--offload-optimiser", action="store_true", help="keep AdamW's state off the chip")
    add("--gradient-accumulation", type=positive, default=10, help="of an update (10)")
    add("--inference-iterations", type=positive, default=100, help="device iterations of the test")
    add("--data-dir", type=Path, default=Path("mnist_data"), help="where MNIST is, or is made")
    add("--steps", type=positive, help="of an epoch and of the test at most (all)")
    add("--workers", type=worker_count, default=2, help="of each data loader (2)")
    add("--device", choices=["mk1", "mk2", "bow"], default="mk2", help="the IPUs (mk2)")
    add("--seed", type=from_zero, default=42, help="of weights and of the shuffled order (42)")
    args = parser.parse_args(argv)
    if args.strategy == "pipelined" and args.gradient_accumulation < LEAST_ACCUMULATION:
        parser.error(
            f"--gradient-accumulation {args.gradient_accumulation} does not fill a pipeline of "
            f"{IPUS} IPUs: give {LEAST_ACCUMULATION} or more, or --strategy sharded"
        )
    if args.strategy == "pipelined" and args.inference_iterations < IPUS:
        parser.error(
            f"--inference-iterations {args.inference_iterations} does not fill a pipeline of "
            f"{IPUS} IPUs: give {IPUS} or more, or --strategy sharded"
        )
    parser.say_idle(args, (not args.profile, "no --profile", "profile_dir"))
    return parser, args


def get_loaders(
    args: argparse.Namespace, options: poptorch.Options, test_options: poptorch.Options
) -> tuple[poptorch.DataLoader, poptorch.DataLoader]:
    """Return the loaders of training and of the test.

    Raises:
        OSError: The data cannot be written.
        RuntimeError: Files of the data are missing.
        ValueError: There is not enough data for a step.
    """
    prepare_mnist(args.data_dir)
    training_set, test_set = (get_mnist(args.data_dir, train) for train in (True, False))
    return (
        get_loader(options, training_set, args.batch_size, args.workers),
        get_loader(test_options, test_set, args.test_batch_size, args.workers),
    )


def main(argv: list[str] | None = None) -> Outcome:
    """Train and test, and write a profile if --profile is given."""
    parser, args = parse_arguments(argv)
    if args.debug:
        poptorch.setLogLevel("DEBUG")
    popdist_py.init()
    if popdist_py.isPopdistEnvSet() and not popdist_py.checkNumIpusPerReplica(IPUS):
        parser.error(f"the network lies on {IPUS} IPUs: start with --ipus-per-replica {IPUS}")
    torch.manual_seed(args.seed)

    options = get_training_options(args)
    test_options = get_inference_options(options, args.inference_iterations)
    try:
        if args.profile:
            args.profile_dir.mkdir(parents=True, exist_ok=True)
        training_data, test_data = get_loaders(args, options, test_options)
    except OSError as error:
        parser.error(f"{error.filename or args.data_dir}: {error.strerror}")
    except RuntimeError:
        parser.error(f"{args.data_dir}/MNIST/raw lacks some of MNIST's four idx files: complete it")
    except ValueError as error:
        parser.error(str(error))

    model = Network()
    training_model = get_training_model(options, model, args.learning_rate)
    steps = min(args.steps or len(training_data), len(training_data))
    train(training_model, training_data, epochs=args.epochs, steps=steps)

    inference_model = poptorch.inferenceModel(model, test_options)
    steps = min(args.steps or len(test_data), len(test_data))
    percent = test(inference_model, test_data, steps=steps)
    if args.profile and popdist_py.getInstanceIndex() == 0:
        from profile_folder import write_profile  # only profiles need it

        write_profile(args.profile_dir, training_model, args.strategy)
        say(
            f"profile: open {args.profile_dir}/profile.html in a browser; the timeline that is "
            "written beside it at the end opens at ui.perfetto.dev"
        )
    return Outcome(model, percent)


if __name__ == "__main__":
    run(main)
