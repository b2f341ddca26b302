"""Items per second that a loop consumes: our DataLoader, Sync and Async, against torch's.

Cases: the data-loading tutorial's (random 1x128x128 floats, 16 x 50 device iterations per step)
and uint8 images with augmentation. Each loop reads only, or also computes for about as long as
torch's DataLoader takes to load a step; loading ahead pays there.

A model that trains has an upper bound: its own speed on synthetic data, which the device makes. The
last rows say how near to it our loaders come.

Usage: python benchmarks/dataloader.py [--json] [--seconds 3] [--workers 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from popdist_py import poptorch


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    dataset: Any
    batch_size: int
    device_iterations: int


@dataclass(frozen=True, slots=True)
class Result:
    case: str
    workers: int
    loader: str
    loop: str
    items_per_second: float
    against_torch: float


@dataclass(frozen=True, slots=True)
class BoundResult:
    """A training's items per second, and as a part of those on synthetic data."""

    case: str
    workers: int
    data: str
    items_per_second: float
    against_synthetic: float


class Images(torch.utils.data.Dataset):
    """Random uint8 images, flipped and cropped at random as for training."""

    def __init__(self, count: int, size: int = 96, crop: int = 80) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(
            0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator
        )
        self.crop = crop

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        top, left = torch.randint(0, image.shape[-1] - self.crop, (2,)).tolist()
        image = image[:, top : top + self.crop, left : left + self.crop]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image.contiguous(), index % 10


def cases() -> list[Case]:
    features = torch.randn(4000, 1, 128, 128)
    labels = torch.randint(0, 10, (4000,))
    tutorial = torch.utils.data.TensorDataset(features, labels)
    return [Case("tutorial", tutorial, 16, 50), Case("images", Images(8192), 16, 16)]


def loaders(case: Case, workers: int) -> dict[str, Callable[[], Iterable[Any]]]:
    """Return the functions that make the loaders to compare, by name."""
    arguments = {"shuffle": True, "drop_last": True, "num_workers": workers}

    def torch_loader() -> Iterable[Any]:
        return torch.utils.data.DataLoader(
            case.dataset,
            batch_size=case.batch_size * case.device_iterations,
            persistent_workers=workers > 0,
            **arguments,
        )

    def ours(mode: poptorch.DataLoaderMode) -> Iterable[Any]:
        options = poptorch.Options().deviceIterations(case.device_iterations)
        return poptorch.DataLoader(options, case.dataset, case.batch_size, mode=mode, **arguments)

    return {
        "torch": torch_loader,
        "Sync": lambda: ours(poptorch.DataLoaderMode.Sync),
        "Async": lambda: ours(poptorch.DataLoaderMode.Async),
    }


def computing(seconds: float) -> Callable[[Any], None]:
    """Return a step that computes for about ``seconds``, independent of the batch."""
    matrix = torch.randn(256, 256)
    start = time.perf_counter()
    for _ in range(20):
        torch.mm(matrix, matrix)
    num_products = round(seconds / (time.perf_counter() - start) * 20)

    def step(batch: Any) -> None:
        reading(batch)
        for _ in range(num_products):
            torch.mm(matrix, matrix)

    return step


def reading(batch: Any) -> None:
    # The sum of int64 reads every byte at the speed of memory; a sum of bytes would cost more than
    # loading does.
    batch[0].view(-1).view(torch.int64).sum()


def measure(
    make_loader: Callable[[], Iterable[Any]], step: Callable[[Any], None], seconds: float
) -> float:
    """Return items per second over whole epochs, after a first one to warm up."""
    loader = make_loader()
    for batch in loader:
        step(batch)
    items, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for batch in loader:
            step(batch)
            items += len(batch[0])
    rate = items / (time.perf_counter() - start)
    if isinstance(loader, poptorch.DataLoader):
        loader.terminate()
    return rate


def compare(case: Case, workers: int, seconds: float) -> list[Result]:
    results = []
    torch_rate = 0.0
    for loop in ("reading", "computing"):
        items_per_step = case.batch_size * case.device_iterations
        step = reading if loop == "reading" else computing(items_per_step / torch_rate)
        rates = {
            name: measure(make_loader, step, seconds)
            for name, make_loader in loaders(case, workers).items()
        }
        torch_rate = rates["torch"]
        results += [
            Result(case.name, workers, name, loop, rate, rate / torch_rate)
            for name, rate in rates.items()
        ]
    return results


class Classifier(torch.nn.Module):
    """A model that is small enough for the loader to matter."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 8, 5, stride=4),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(128, 10),
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(images.float()), labels)


def training_rate(case: Case, workers: int, data: str, seconds: float) -> float:
    """Return items per second of a training on ``Sync``, ``Async`` or ``synthetic`` data."""
    options = poptorch.Options().deviceIterations(case.device_iterations)
    options.showCompilationProgressBar(False).enableSyntheticData(data == "synthetic")
    loader = poptorch.DataLoader(
        options,
        case.dataset,
        case.batch_size,
        shuffle=True,
        num_workers=workers,
        mode=poptorch.DataLoaderMode.Async if data == "Async" else poptorch.DataLoaderMode.Sync,
    )
    model = Classifier(case.dataset[0][0].shape[0])
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, optimizer)
    if data != "synthetic":
        return measure(lambda: loader, lambda batch: training(*batch), seconds)
    # The model alone: one batch of the loader says its shapes, again and again.
    first = next(iter(loader))
    return measure(lambda: [first] * len(loader), lambda batch: training(*batch), seconds)


def compare_bound(case: Case, workers: int, seconds: float) -> list[BoundResult]:
    rates = {
        data: training_rate(case, workers, data, seconds) for data in ("synthetic", "Sync", "Async")
    }
    bound = rates["synthetic"]
    return [
        BoundResult(case.name, workers, data, rate, rate / bound) for data, rate in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--case", choices=["tutorial", "images"], help="only this case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = [
        (case, workers)
        for case in cases()
        if arguments.case in (None, case.name)
        for workers in arguments.workers
    ]
    results = [result for run in runs for result in compare(*run, arguments.seconds)]
    bounds = [bound for run in runs for bound in compare_bound(*run, arguments.seconds)]
    if arguments.json:
        print(json.dumps([asdict(result) for result in [*results, *bounds]], indent=1))
        return
    print(f"{'case':10}{'workers':>8}  {'loop':10}{'loader':7}{'items/s':>10}{'x torch':>9}")
    for r in results:
        print(
            f"{r.case:10}{r.workers:8}  {r.loop:10}{r.loader:7}"
            f"{r.items_per_second:10.0f}{r.against_torch:9.2f}"
        )
    print(f"\n{'case':10}{'workers':>8}  {'training on':12}{'items/s':>10}{'x synthetic':>13}")
    for b in bounds:
        print(
            f"{b.case:10}{b.workers:8}  {b.data:12}"
            f"{b.items_per_second:10.0f}{b.against_synthetic:13.2f}"
        )


if __name__ == "__main__":
    main()
