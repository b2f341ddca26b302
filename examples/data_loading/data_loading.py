"""Is the DataLoader or the model the bottleneck? The program of PopTorch's data-loading tutorial.

python examples/data_loading/data_loading.py
python examples/data_loading/data_loading.py --case 1
python examples/data_loading/data_loading.py --item-time 0.005 --workers 1
python -m poprun_py --num-instances 2 --num-replicas 2 examples/data_loading/data_loading.py

Measures the loader alone, the model on synthetic data, and the model on the loader's batches. A
loader that is at least as fast as the model on synthetic data does not slow the model down.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice, repeat
from math import ceil
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common.arguments import Parser, positive, rate, worker_count
from common.running import run
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from tqdm import tqdm

import popdist_py
from popdist_py import poptorch

#: The arguments of the tutorial's two experiments that differ from this program's defaults.
TEXT = {"batch_size": 16, "device_iterations": 50, "workers": 32, "items": 10_000, "side": 128}
CASES = {1: {**TEXT, "replicas": 1}, 2: {**TEXT, "replicas": 4}}
LOADER, SYNTHETIC, REAL = "DataLoader alone", "synthetic data", "real data"
_LEAST_SECONDS = 1.0  # a shorter measurement of the loader would not be precise
_WARM_UP_UPDATES = 18  # the emulation tries ways to run replicas in the first updates
# torch warns of more workers than cores, but this program prints its own line about that. The
# filter is set at import, because the loader's process imports this file and must not warn either.
warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)


class ClassificationModel(nn.Module):
    """The tutorial's network for grey pictures of height and width ``side``."""

    def __init__(self, side: int = 128) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(5, 12, 5)
        self.norm = nn.GroupNorm(3, 12)
        self.fc1 = nn.Linear(12 * ((side - 2) // 2 - 4) ** 2, 100)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(100, 10)
        # The tutorial has dim=0, so that the sum of the probabilities over the pictures of a
        # micro-batch is 1. Here the sum over the ten classes of a picture is 1.
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


class SlowDataset(Dataset):
    """A data set with a delay for each item, as if a disk or a network were slow."""

    def __init__(self, dataset: TensorDataset, seconds: float) -> None:
        self.dataset = dataset
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int):
        time.sleep(self.seconds)
        return self.dataset[index]


@dataclass(frozen=True)
class Sizes:
    """The factors of the number of samples in a step, over all instances."""

    micro_batch: int
    replicas: int
    gradient_accumulation: int
    device_iterations: int

    @property
    def global_batch(self) -> int:
        """The number of samples for one weight update."""
        return self.micro_batch * self.replicas * self.gradient_accumulation

    @property
    def step(self) -> int:
        """The number of samples for one call of the model."""
        return self.global_batch * self.device_iterations

    def __str__(self) -> str:
        return (
            f"global batch {self.global_batch:,} = {self.micro_batch} (micro-batch) x "
            f"{self.replicas} (replicas) x {self.gradient_accumulation} (gradient accumulation)\n"
            f"one step takes {self.step:,} items = {self.global_batch:,} (global batch) x "
            f"{self.device_iterations} (device iterations)"
        )


@dataclass(frozen=True)
class Measurement:
    """A throughput of all instances in items/s, measured and, if known, modelled for an IPU."""

    what: str
    items_per_second: float
    modelled: float | None = None


@dataclass(frozen=True)
class Report:
    """The sizes of a run, its measurements, and the conclusion."""

    sizes: Sizes
    measurements: tuple[Measurement, ...]
    verdict: str

    def __getitem__(self, what: str) -> float:
        """Return the measured throughput with the given name."""
        return next(one.items_per_second for one in self.measurements if one.what == what)


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Return the given sizes. A launcher overrides the number of replicas."""
    launched = popdist_py.isPopdistEnvSet()
    replicas = popdist_py.getNumTotalReplicas() if launched else args.replicas
    return Sizes(args.batch_size, replicas, args.gradient_accumulation, args.device_iterations)


def make_options(args: argparse.Namespace, *, synthetic: bool = False) -> poptorch.Options:
    """Return the options of this instance."""
    options = poptorch.DistributedOptions()
    if not popdist_py.isPopdistEnvSet():
        options.replicationFactor(args.replicas)
    options.deviceIterations(args.device_iterations)
    options.Training.gradientAccumulation(args.gradient_accumulation)
    options.enableSyntheticData(synthetic)
    options.showCompilationProgressBar(False)
    options.Emulator.device(args.device)
    return options


def make_dataset(args: argparse.Namespace) -> TensorDataset:
    """Return random pictures [items, 1, side, side] with labels [items]."""
    features = torch.randn([args.items, 1, args.side, args.side])
    labels = torch.empty([args.items], dtype=torch.long).random_(10)
    return TensorDataset(features, labels)


def make_loader(dataset: TensorDataset, args: argparse.Namespace) -> poptorch.DataLoader:
    """Return the loader. It has its own processes unless the mode is "sync" without workers."""
    mode = {"async": poptorch.DataLoaderMode.Async, "sync": poptorch.DataLoaderMode.Sync}
    options = make_options(args).randomSeed(42)  # all instances shuffle in one order
    return poptorch.DataLoader(
        options,
        dataset=SlowDataset(dataset, args.item_time) if args.item_time else dataset,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        mode=mode[args.mode],
    )


def endless(loader: Iterable) -> Iterator:
    """Yield the batches of an endless number of epochs."""
    return chain.from_iterable(repeat(loader))


def drain(loader: poptorch.DataLoader) -> float:
    """Load one epoch, and return its duration in seconds.

    A loader fills its buffers in advance, so its first batches come faster than it can load. After
    an epoch of reading without computing, the buffers are empty, and the measurement is fair.
    """
    began = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - began


def throughput(batches: Iterator, steps: int, step: Callable, what: str, sizes: Sizes) -> float:
    """Return items/s, over all instances, of ``steps`` steps on ``batches``."""
    bar = tqdm(
        total=steps * sizes.step,
        desc=f"{what:16}",
        unit=" items",
        unit_scale=True,
        disable=popdist_py.getInstanceIndex() != 0,
    )
    began = time.perf_counter()
    for batch in islice(batches, steps):
        step(*batch)
        bar.update(sizes.step)
    seconds = time.perf_counter() - began
    bar.close()
    # Training instances have the same speed, but each loader has its own.
    return popdist_py.all_reduce(steps * sizes.step / popdist_py.getNumInstances() / seconds)


def measure_loader(dataset: TensorDataset, args: argparse.Namespace) -> Measurement:
    """Measure the loader's throughput over whole epochs, while the model is idle."""
    sizes = sizes_of(args)
    loader = make_loader(dataset, args)
    drain(loader)  # and start the workers
    epochs = ceil(_LEAST_SECONDS / drain(loader))
    items = throughput(endless(loader), epochs * len(loader), lambda *_: None, LOADER, sizes)
    loader.terminate()
    return Measurement(LOADER, items)


def measure_model(
    dataset: TensorDataset, args: argparse.Namespace, *, synthetic: bool
) -> Measurement:
    """Measure the training's throughput, after the compilation and a warm-up.

    With synthetic data, the loader is not used. Each call gets the same batch, and only its shapes
    matter.
    """
    sizes = sizes_of(args)
    options = make_options(args, synthetic=synthetic)
    model = ClassificationModel(args.side)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    training_model = poptorch.trainingModel(model, options, optimizer)

    first = [part[: sizes.step // popdist_py.getNumInstances()] for part in dataset.tensors]
    training_model.compile(*first)
    for _ in range(ceil(_WARM_UP_UPDATES / sizes.device_iterations)):
        training_model(*first)
    modelled = training_model.executionReport().report.throughput

    steps = args.steps or args.items // sizes.step
    what = SYNTHETIC if synthetic else REAL
    if synthetic:
        items = throughput(repeat(first), steps, training_model, what, sizes)
    else:
        loader = make_loader(dataset, args)
        drain(loader)
        items = throughput(endless(loader), steps, training_model, what, sizes)
        loader.terminate()
    training_model.destroy()
    return Measurement(what, items, modelled)


def verdict(loader: float, synthetic: float, args: argparse.Namespace, cores: int) -> str:
    """Return a text that names the bottleneck, its factor, and advice about what to try next."""
    ratio = loader / synthetic
    times = f"{ratio:,.2f}" if ratio < 10 else f"{ratio:,.0f}"
    if ratio >= 1:
        advice = "a larger global batch (--replicas, --gradient-accumulation, --batch-size)"
        if args.mode == "sync":
            advice = "--mode async, as in mode sync loading and computing take turns"
        return f"the device limits: the loader gives {times} times what it takes; try {advice}"
    if args.mode == "sync":
        advice = "--mode async"
    elif args.workers < cores or args.item_time:
        advice = f"--workers {2 * max(args.workers, 1)}"
    elif args.workers > cores:
        advice = f"--workers {cores}, one for each core"
    else:
        advice = "a larger global batch or more --device-iterations, for fewer and larger steps"
    return f"the loader limits: it gives {times} of what the device takes; try {advice}"


def table(report: Report, device: str) -> str:
    """Return the lines of a table, which marks the throughput of an IPU as modelled."""
    ipu = f"{device.capitalize()}, modelled"
    lines = [f"{'':18}{'items/s':>10}{'x synthetic':>13}{ipu:>16}"]
    for one in report.measurements:
        share = one.items_per_second / report[SYNTHETIC]
        modelled = "" if one.modelled is None else f"{one.modelled:,.0f}"
        line = f"{one.what:18}{one.items_per_second:10,.0f}{share:13,.2f}{modelled:>16}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments. Other options override the settings of ``--case``."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--case", type=int, choices=CASES, help="sizes of an experiment of the tutorial")
    add("--synthetic-data", action="store_true", help="leave out the training on real data")
    add("--replicas", type=positive, default=1, help="without the launcher only (1)")
    add("--batch-size", type=positive, default=16, help="the micro-batch (16)")
    add("--gradient-accumulation", type=positive, default=1, help="micro-batches (1)")
    add("--device-iterations", type=positive, default=4, help="of a step (4)")
    add("--workers", type=worker_count, default=2, help="processes that load (2)")
    add("--items", type=positive, default=512, help="pictures of the data set (512)")
    add("--side", type=positive, default=64, help="height and width of a picture (64)")
    add("--steps", type=positive, help="calls of the model that are measured (the data set's)")
    add("--item-time", type=rate, metavar="SECONDS", help="wait so long for each item (not)")
    add("--mode", choices=["async", "sync"], default="async", help="of the loader (async)")
    add("--device", choices=["mk1", "mk2", "bow"], default="mk2", help="the IPU's model (mk2)")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    if args.case:
        parser.set_defaults(**CASES[args.case])
        args = parser.parse_args(argv)
    step = sizes_of(args).step
    if args.side < 12:
        parser.error(f"--side {args.side} is given, 12 or more leaves something to convolve")
    if args.items < step:
        parser.error(f"--items {args.items} is given, one step takes {step}: give at least that")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json} is given, its folder does not exist")
    if args.json and not _is_writable(args.json.absolute()):
        parser.error(f"--json {args.json} is given, it cannot be written: give another file")
    parser.say_idle(
        args, (popdist_py.isPopdistEnvSet(), "the launcher gives the replicas", "replicas")
    )
    return args


def _is_writable(file: Path) -> bool:
    """Check that ``file`` can be written, before minutes of measuring."""
    return not file.is_dir() and os.access(file if file.exists() else file.parent, os.W_OK)


def main(argv: list[str] | None = None) -> Report:
    """Measure, and print the measurements and the conclusion."""
    args = parse(argv)
    popdist_py.init()
    is_first = popdist_py.getInstanceIndex() == 0
    sizes, cores = sizes_of(args), len(os.sched_getaffinity(0))
    if is_first:
        print(sizes)
        if args.workers > cores and not args.item_time:  # who waits needs no core
            print(f"{args.workers} workers share the {cores} cores of an instance here; "
                  f"--workers {cores} gives each one of its own")  # fmt: skip

    dataset = make_dataset(args)
    measurements = [
        measure_loader(dataset, args),
        measure_model(dataset, args, synthetic=True),
    ]
    if not args.synthetic_data:
        measurements.append(measure_model(dataset, args, synthetic=False))
    found = verdict(*(one.items_per_second for one in measurements[:2]), args, cores)
    report = Report(sizes, tuple(measurements), found)
    if is_first:
        print(table(report, args.device))
        print(report.verdict)
        if args.json:
            args.json.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return report


if __name__ == "__main__":
    run(main)
