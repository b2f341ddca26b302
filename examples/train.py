"""Train a small CNN on real images, with one instance or with several.

poprun-py --num-instances 2 --num-replicas 8 --print-topology yes examples/train.py
python examples/train.py --replicas 4

Every instance runs this file, and feeds its own shard of the data to its local replicas. At the
end, all instances have the same weights. Instance 0 shows the progress.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common.arguments import Parser, positive, rate
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

import popdist_py
from popdist_py import poptorch

WHERE = {
    "mnist": "the four train-*/t10k-* idx files of MNIST in DIR/MNIST/raw",
    "cifar10": "the unpacked cifar-10-batches-py folder of CIFAR-10's Python version in DIR",
}


class SmallCnn(nn.Module):
    """A network of two convolutions and a linear layer.

    It returns the scores of the classes. If labels are given, it also returns the loss.
    """

    def __init__(self, channels: int, side: int, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2),
        )  # fmt: skip
        self.classify = nn.Linear(32 * (side // 2) ** 2, classes)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images, labels=None):
        scores = self.classify(torch.flatten(self.features(images), 1))
        return scores if labels is None else (scores, self.loss(scores, labels))


def load(name: str, folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the test set.

    A set has images [N, channels, side, side] with values from 0 to 1, and labels [N].
    """
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, test = order[:1440], order[1440:]
        return tuple(TensorDataset(images[part], labels[part]) for part in (train, test))
    from torchvision import datasets

    kind = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name]
    try:
        return tuple(_tensors(kind(folder, train=train)) for train in (True, False))
    except RuntimeError:
        Parser().error(
            f"no {name} data in {folder}: expected {WHERE[name]}. Where the network allows it, "
            f"python -c \"from torchvision.datasets import {kind.__name__} as D; "
            f"D('{folder}', download=True)\" fetches them."
        )  # fmt: skip


def _tensors(dataset) -> TensorDataset:
    images = torch.as_tensor(dataset.data).float() / 255
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    return TensorDataset(images, torch.as_tensor(dataset.targets))


def padded(dataset: TensorDataset, multiple: int) -> TensorDataset:
    """Pad a data set to a multiple with copies of the first image, which have the label -1."""
    images, labels = dataset.tensors
    missing = -len(labels) % multiple
    return TensorDataset(
        torch.cat([images, images[:1].expand(missing, -1, -1, -1)]),
        torch.cat([labels, labels.new_full((missing,), -1)]),
    )


def distributed_options(args: argparse.Namespace) -> poptorch.DistributedOptions:
    """Return the model's options. Without a launcher, --replicas sets the number of replicas."""
    options = poptorch.DistributedOptions()
    if not popdist_py.isPopdistEnvSet():
        options.replicationFactor(args.replicas)
    options.randomSeed(args.seed)
    return options


def train(model: SmallCnn, dataset: TensorDataset, args: argparse.Namespace) -> None:
    """Train ``model`` in place, with a progress bar on instance 0."""
    options = distributed_options(args)
    options.deviceIterations(args.device_iterations)
    options.Training.gradientAccumulation(args.gradient_accumulation)
    options.outputMode(poptorch.OutputMode.All)
    loader = poptorch.DataLoader(options, dataset, batch_size=args.micro_batch, shuffle=True)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=args.learning_rate)
    training_model = poptorch.trainingModel(model, options, optimizer=optimizer)
    bar = tqdm(
        total=args.epochs * len(loader),
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]",
        disable=popdist_py.getInstanceIndex() != 0,
    )
    for epoch in range(1, args.epochs + 1):
        for images, labels in loader:
            scores, losses = training_model(images, labels)
            accuracy = (scores.argmax(1) == labels).float().mean().item()
            bar.set_description(f"epoch {epoch}/{args.epochs}", refresh=False)
            samples = len(labels) * popdist_py.getNumInstances()
            rate = samples * (bar.format_dict["rate"] or 0)
            bar.set_postfix_str(
                f"{rate:.0f} samples/s, accuracy={accuracy:.1%}, loss={losses.mean():.3f}", False
            )
            bar.update()
    bar.close()


def test(model: SmallCnn, dataset: TensorDataset, args: argparse.Namespace) -> float:
    """Return the accuracy of all instances on ``dataset``, in per cent."""
    options = distributed_options(args)
    batch = 16
    step = batch * options.replication_factor * popdist_py.getNumInstances()
    loader = poptorch.DataLoader(options, padded(dataset, step), batch_size=batch)
    inference_model = poptorch.inferenceModel(model.eval(), options)
    correct = 0
    for images, labels in loader:
        correct += int((inference_model(images).argmax(1) == labels).sum())
    return 100 * popdist_py.all_reduce(correct) / len(dataset)


def main(argv: list[str] | None = None) -> float:
    """Train, test and return the test accuracy in per cent."""
    parser = Parser(
        description=__doc__.splitlines()[0],
        epilog="Example: python examples/train.py --replicas 4",
    )
    parser.add_argument("--dataset", choices=["digits", "mnist", "cifar10"], default="digits")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--micro-batch", type=positive, default=4)
    parser.add_argument("--gradient-accumulation", type=positive, default=1)
    parser.add_argument("--device-iterations", type=positive, default=1)
    parser.add_argument("--learning-rate", type=rate, default=2e-3)
    parser.add_argument("--replicas", type=positive, default=8, help="without the launcher only")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    parser.say_idle(
        args,
        (popdist_py.isPopdistEnvSet(), "the launcher gives the replicas", "replicas"),
        (args.dataset == "digits", "scikit-learn has the digits", "data_dir"),
    )

    popdist_py.init()
    torch.manual_seed(args.seed)
    training_set, test_set = load(args.dataset, args.data_dir)
    channels, side = training_set.tensors[0].shape[1:3]
    model = SmallCnn(channels, side)
    train(model, training_set, args)
    accuracy = test(model, test_set, args)
    if popdist_py.getInstanceIndex() == 0:
        print(f"test accuracy {accuracy:.1f} %")
    return accuracy


if __name__ == "__main__":
    main()
