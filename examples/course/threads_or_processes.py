"""Measures how much faster distributed data parallel is than data parallel.

python examples/course/threads_or_processes.py
python examples/course/threads_or_processes.py --batch-size 512 --repetitions 9

Both train FashionCNN on the same global batch with two devices; a device is a core. Data parallel
(DP) is one process with a thread for each device, and does in every step what the course lists:
copy the model to the devices, scatter the batch, forward in parallel, gather the outputs, scatter
the gradients of the loss, backward in parallel, sum the gradients, update. Distributed data
parallel (DDP) is two processes that keep their models and reduce the gradients. Runs of both
alternate, and the medians are printed. Run no other programs at the same time.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from fashion_mnist import FashionCNN
from speed_up import job
from speed_up_instance import IMAGES, seconds_of_one
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import HelpFormat, Parser, positive
from common.running import run

DEVICES = 2
PARTS = ("replicate the model", "forward", "backward", "reduce and update")


@dataclass(frozen=True)
class Found:
    """The measured seconds of a step in each run, and the medians of the parts of a DP step."""

    dp: Sequence[float]
    ddp: Sequence[float]
    parts: dict[str, float]

    @property
    def ratio(self) -> float:
        """The speed of DDP, divided by that of DP."""
        return statistics.median(self.dp) / statistics.median(self.ddp)


class DataParallelThreads:
    """Training steps of data parallel, in one process with a thread for each device."""

    def __init__(self, model: nn.Module, devices: int = DEVICES) -> None:
        self.model = model
        self.devices = devices
        self.optimizer = torch.optim.Adam(model.parameters())
        self.threads = ThreadPoolExecutor(devices)
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Train on a batch, and return its loss."""
        began = time.perf_counter()
        replicas = [self.model, *(copy.deepcopy(self.model) for _ in range(self.devices - 1))]
        for replica in replicas:
            replica.zero_grad()
        began = self._note("replicate the model", began)
        shares = images.tensor_split(self.devices)
        outputs = self._on_devices(nn.Module.__call__, replicas, shares)
        began = self._note("forward", began)
        scores = torch.cat([output.detach() for output in outputs]).requires_grad_()
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()
        gradients = scores.grad.split([len(output) for output in outputs])
        self._on_devices(torch.Tensor.backward, outputs, gradients)
        began = self._note("backward", began)
        for replica in replicas[1:]:
            for weights, own in zip(self.model.parameters(), replica.parameters(), strict=True):
                weights.grad += own.grad
        self.optimizer.step()
        self._note("reduce and update", began)
        return loss.item()

    def _on_devices(self, call: Callable, *values: Sequence) -> list:
        """Call ``call`` in a thread for each device, with the device's value of each sequence."""
        return list(self.threads.map(call, *values))

    def _note(self, part: str, began: float) -> float:
        now = time.perf_counter()
        self.seconds[part].append(now - began)
        return now


def dp_seconds(batch_size: int, steps: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step of data parallel, and the medians of its parts."""
    torch.manual_seed(0)
    trained = DataParallelThreads(FashionCNN())
    images, labels = torch.rand(IMAGES, 1, 28, 28), torch.randint(10, (IMAGES,))

    def step() -> None:
        chosen = torch.randint(IMAGES, (batch_size,))
        trained.step(images[chosen], labels[chosen])

    seconds = seconds_of_one(step, steps)
    trained.threads.shutdown()
    return seconds, {part: statistics.median(times) for part, times in trained.seconds.items()}


def print_result(found: Found, args) -> None:
    """Print both times, the parts of a DP step, and the ratio with the settings."""
    for name, times in (("DP, 2 threads of a process", found.dp), ("DDP, 2 processes", found.ddp)):
        low, middle, high = (1e3 * f(times) for f in (min, statistics.median, max))
        print(f"{name:27} {middle:7.1f} ms a step ({low:.1f} to {high:.1f})")
    parts = ", ".join(f"{part} {1e3 * seconds:.1f} ms" for part, seconds in found.parts.items())
    print(f"a step of DP: {parts}")
    print(
        f"DDP is {found.ratio:.2f} times as fast as DP (FashionCNN, global batch "
        f"{args.batch_size}, 2 of {os.cpu_count()} cores; medians of {args.repetitions} runs of "
        f"{args.steps} steps, in turn)"
    )


def arguments(argv: list[str] | None):
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--batch-size", type=positive, default=128, help="images of the global batch")
    add("--steps", type=positive, default=30, help="training steps of a run")
    add("--repetitions", type=positive, default=5, help="runs of which the median counts")
    add("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(argv)
    if args.batch_size % DEVICES:
        parser.error(f"--batch-size {args.batch_size}: two devices share it, give an even number")
    if "RANK" in os.environ:
        parser.error("the program starts its processes itself: run it without a launcher")
    return args


def main(argv: list[str] | None = None) -> Found:
    """Measure, and print and return the result."""
    from tqdm import tqdm

    args = arguments(argv)
    torch.set_num_threads(1)  # a device has one core
    dp, ddp = [], []
    with tqdm(total=2 * args.repetitions, desc="runs") as bar:
        for _ in range(args.repetitions):
            seconds, parts = dp_seconds(args.batch_size, args.steps)
            dp.append((seconds, parts))
            bar.update()
            ddp.append(job(DEVICES, args.batch_size, args.steps)["run"])
            bar.update()
    parts = {part: statistics.median(one[part] for _, one in dp) for part in PARTS}
    found = Found([seconds for seconds, _ in dp], ddp, parts)
    if args.json:
        print(json.dumps({**asdict(found), "ratio": found.ratio}, indent=2))
    else:
        print_result(found, args)
    return found


if __name__ == "__main__":
    run(main)
