"""Train FashionCNN on FashionMNIST with one device. The other programs distribute this training.

python examples/course/fashion_mnist.py --epochs 2

The program reads FashionMNIST's files from DIR/FashionMNIST/raw. If they are missing, it first
makes a substitute in the same format, with outlines of handwritten digits instead of clothes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import HelpFormat, Parser, from_zero, positive, rate
from common.running import make_once, run

IS_FIRST = os.environ.get("RANK", "0") == "0"  # poprun-py and torchrun set it


class FashionCNN(nn.Module):
    """Two convolution blocks and three linear layers map images [N, 1, 28, 28] to scores [N, 10].

    The network has 1,475,338 weights. The first linear layer has 94 % of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.fc1 = nn.Linear(64 * 6 * 6, 600)
        self.drop = nn.Dropout(0.25)
        self.fc2 = nn.Linear(600, 120)
        self.fc3 = nn.Linear(120, 10)

    def forward(self, images):
        features = torch.flatten(self.layer2(self.layer1(images)), 1)
        return self.fc3(self.fc2(self.drop(self.fc1(features))))


def load(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the test set.

    A set has images [N, 1, 28, 28] with values from 0 to 1, and labels [N].
    """
    from torchvision.datasets import FashionMNIST

    _make_stand_in(folder)
    try:
        parts = [FashionMNIST(folder, train=train) for train in (True, False)]
    except RuntimeError:
        sys.exit(
            f"no FashionMNIST in {folder / 'FashionMNIST' / 'raw'}: expected its four train-* and "
            "t10k-* idx files, unpacked; without the folder a stand-in is made"
        )
    return tuple(TensorDataset(part.data.unsqueeze(1) / 255, part.targets) for part in parts)


def _make_stand_in(folder: Path) -> None:
    """Make outlines of digits if the data set is missing."""
    from common.sample_data import make_fashion_mnist

    try:
        made = make_once(folder / "FashionMNIST", make_fashion_mnist)
    except OSError as error:
        sys.exit(f"--data-dir {folder}: {error.strerror}; give a folder that can be written")
    if made and IS_FIRST:
        print(f"{folder / 'FashionMNIST'}: made of outlines of handwritten digits")


def train_epoch(model: nn.Module, loader: DataLoader, optimizer, *, name: str) -> float:
    """Train ``model`` on every batch once and return the mean loss."""
    model.train()
    total = 0.0
    for images, labels in tqdm(loader, desc=name, disable=not IS_FIRST):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Return the accuracy of ``model`` on ``dataset``, in per cent."""
    model.eval()
    loader = DataLoader(dataset, batch_size=200)
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    return 100 * right / len(dataset)


def first(dataset: TensorDataset, items: int) -> TensorDataset:
    """Return the first ``items`` samples of ``dataset``; 0 stands for all samples."""
    return TensorDataset(*dataset[: items or len(dataset)])


def training_arguments(description: str, *, epochs: int, batch_size: int) -> Parser:
    """Return a parser with the arguments that all programs of this folder share."""
    parser = Parser(description=description, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--data-dir", type=Path, default="data", help="where FashionMNIST is, or is made")
    add("--epochs", type=positive, default=epochs, help="passes over the data")
    add("--batch-size", type=positive, default=batch_size, help="images of a step of one process")
    add("--items", type=from_zero, default=0, help="train on the first ones only; 0: on all")
    add("--learning-rate", type=rate, default=1e-3, help="of Adam")
    return parser


def main(argv: list[str] | None = None) -> float:
    """Train and return the accuracy on the test set in per cent."""
    parser = training_arguments(__doc__, epochs=2, batch_size=64)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    training_set, test_set = load(args.data_dir)
    model = FashionCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(first(training_set, args.items), args.batch_size, shuffle=True)
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, loader, optimizer, name=f"epoch {epoch}")
        if IS_FIRST:
            print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
    result = accuracy(model, test_set)
    if IS_FIRST:
        print(f"test accuracy {result:.1f} %")
        if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            print(f"all {processes} processes did the same: distributed_example.py shares the work")
    return result


if __name__ == "__main__":
    run(main)
