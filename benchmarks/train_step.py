"""Training steps per second: ours with 2 instances against DDP over gloo, and one process.

Every row trains one model with the same global batch in five ways, started as users start them:
poprun-py starts ours, plain and with the tree of the deterministic mode; torchrun starts DDP over
gloo with 2 processes, and the same 2 processes without any reduction (what two unconnected
processes reach); and one process has 2 threads. The steps of a job take turns, and so do the jobs;
a time is the median over all.

Usage: python benchmarks/train_step.py [--json] [--models cnn mlp resnet18] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from show_rows import show_rows

ROOT = Path(__file__).resolve().parent.parent
INSTANCES = 2
# Samples that each of two instances trains on in a step, and the shape of one.
BATCHES = {"cnn": (16, (1, 128, 128)), "mlp": (64, (2048,)), "resnet18": (8, (3, 64, 64))}


def network(name: str) -> Any:
    """Return the bare network, with 10 classes."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":  # 25.2 million parameters
        hidden = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(2048, 10))
    if name == "resnet18":
        from popdist_py import poptorch  # noqa: F401, I001 (lets torchvision be imported)
        from torchvision.models import resnet18

        return resnet18(num_classes=10)
    return nn.Sequential(  # that of the data-loading tutorial
        nn.Conv2d(1, 5, 3),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(5, 12, 5),
        nn.ReLU(),
        nn.GroupNorm(3, 12),
        nn.Flatten(),
        nn.Linear(41772, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    )


def with_loss(name: str) -> Any:
    """Return the network with its loss, as PopTorch trains it."""
    from torch import nn

    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(name)
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x: Any, labels: Any) -> Any:
            return self.loss(self.network(x), labels)

    return Training()


def batch(name: str, instances: int) -> tuple[Any, Any]:
    import torch

    samples, shape = BATCHES[name]
    samples *= INSTANCES // instances
    return torch.randn(samples, *shape), torch.randint(0, 10, (samples,))


def ours(
    name: str, deterministic: bool = False, compression: tuple[Any, ...] = ("none",)
) -> Callable[[], Any]:
    """Return a step of ours; ``compression`` is what gradientCompression() is given."""
    import popdist_py
    from popdist_py import poptorch

    options = poptorch.Options()
    options.broadcastBuffers(False)
    options.Distributed.configureProcessId(
        popdist_py.getInstanceIndex(), popdist_py.getNumInstances()
    )
    options.Emulator.deterministicReduction(deterministic)
    options.Training.gradientCompression(*compression)
    net = with_loss(name)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    model = poptorch.trainingModel(net, options, optimizer=optimizer)
    x, labels = batch(name, INSTANCES)
    return lambda: model(x, labels)


def plain(name: str, instances: int, ddp: bool) -> Callable[[], Any]:
    """Return a step of PyTorch, with DDP over gloo or without any reduction."""
    import torch

    net = with_loss(name)
    if ddp:
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    x, labels = batch(name, instances)

    def step() -> None:
        optimizer.zero_grad()
        net(x, labels).backward()
        optimizer.step()

    return step


def timed(
    steps: dict[str, Callable[[], Any]],
    seconds: float,
    barrier: Callable[[], Any],
    slowest: Callable[[float], float],
) -> Any:
    """Return the milliseconds of every step; the steps take turns.

    Args:
        steps: the steps to compare, by name.
        seconds: how long to measure; at least three turns.
        barrier: waits for the other processes.
        slowest: returns the largest of a number over all processes, so that all stop together.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    seconds_per_turn = 0.0
    while seconds_per_turn == 0.0 or len(next(iter(milliseconds.values()))) < max(
        3, int(seconds / seconds_per_turn)
    ):
        turn_start = time.perf_counter()
        for name, step in steps.items():
            barrier()
            start = time.perf_counter()
            step()
            barrier()
            milliseconds[name].append(1000 * (time.perf_counter() - start))
        seconds_per_turn = seconds_per_turn or slowest(time.perf_counter() - turn_start)
    return milliseconds


def work_for_poprun(name: str, seconds: float) -> Any:
    """Measure ours as one of the instances."""
    import popdist_py

    popdist_py.init()
    steps = {"ours": ours(name), "deterministic": ours(name, deterministic=True)}

    def slowest(number: float) -> float:
        return float(popdist_py.all_reduce(number, "max"))

    return timed(steps, seconds, popdist_py.barrier, slowest)


def work_for_torchrun(name: str, seconds: float) -> Any:
    """Measure DDP, and no reduction at all, as one of torchrun's processes."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    steps = {
        "ddp": plain(name, INSTANCES, ddp=True),
        "unconnected": plain(name, INSTANCES, ddp=False),
    }

    def slowest(number: float) -> float:
        largest = torch.tensor(number)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return float(largest)

    milliseconds = timed(steps, seconds, distributed.barrier, slowest)
    distributed.destroy_process_group()
    return milliseconds


def work(worker: str, name: str, seconds: float) -> None:
    """Measure as one process of a job; the first prints the times."""
    import torch

    torch.set_num_threads(INSTANCES if worker == "alone" else 1)
    if worker == "poprun-py":
        milliseconds = work_for_poprun(name, seconds)
    elif worker == "torchrun":
        milliseconds = work_for_torchrun(name, seconds)
    else:
        steps = {"one process": plain(name, 1, ddp=False)}
        milliseconds = timed(steps, seconds, lambda: None, lambda number: number)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(milliseconds), flush=True)


def run(command: list[object]) -> dict[str, list[float]]:
    """Run a Python program and return the line of JSON that it prints."""
    completed = subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    line = next(line for line in completed.stdout.splitlines() if '": [' in line)
    return json.loads(line.removeprefix("[1,0]<stdout>:"))


def rows(names: list[str], rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield one row for every model."""
    launchers: dict[str, list[object]] = {
        "poprun-py": ["-m", "poprun_py", "--num-instances", INSTANCES, "--num-replicas", INSTANCES],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", INSTANCES],
        "alone": [],
    }
    for name in names:
        milliseconds: dict[str, list[float]] = {}
        for _ in range(rounds):
            for worker, launcher in launchers.items():
                program = [__file__, "--models", name, "--seconds", seconds, "--worker", worker]
                for step_name, times in run([*launcher, *program]).items():
                    milliseconds.setdefault(step_name, []).extend(times)
        ms = {step_name: statistics.median(times) for step_name, times in milliseconds.items()}
        yield {
            "model": name,
            **{f"{step_name}_ms": round(value, 2) for step_name, value in ms.items()},
            "ours/ddp": round(ms["ddp"] / ms["ours"], 3),
            "ours/one process": round(ms["one process"] / ms["ours"], 3),
            "ours/unconnected": round(ms["unconnected"] / ms["ours"], 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each job")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--worker", choices=["poprun-py", "torchrun", "alone"], help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.models[0], arguments.seconds)
        return
    show_rows(rows(arguments.models, arguments.rounds, arguments.seconds), as_json=arguments.json)


if __name__ == "__main__":
    main()
