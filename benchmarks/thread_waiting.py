"""Times of a training step in half precision for several settings of waiting OpenMP threads.

python benchmarks/thread_waiting.py [--rounds 15] [--threads N] [--busy 2] [--json]

Each setting has a process of its own that trains a ResNet-18 (16.16, 8 images of 32x32). In each
round, each process makes one step while the others sleep. The steps are measured alone, and beside
``--busy`` processes in endless loops. Rows have the median and the least time in milliseconds, and
the median of the ratio to "passive" in the same round. On a machine with other load, the least time
is the best estimate for a machine without it.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from show_rows import show_rows

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# "default" is the library's setting, "runtime's" is libgomp's own default.
WAYS: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "1000 spins": {"GOMP_SPINCOUNT": "1000"},
    "10000 spins": {"GOMP_SPINCOUNT": "10000"},
    "100000 spins": {"GOMP_SPINCOUNT": "100000"},
    "runtime's": {"GOMP_SPINCOUNT": "300000"},
}
BASE = "passive"


def main() -> None:
    """Measure, or with --trains run one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--busy", type=int, default=2, help="processes that load the machine")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trains", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trains:
        train()
    else:
        show_rows(rows(args), as_json=args.json)


def train() -> None:
    """Make one step for each line of stdin, and print its seconds."""
    # Before torch, so that the library's setting has its effect.
    from popdist_py import poptorch  # noqa: I001
    import torch
    import torchvision
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torchvision.models.resnet18(num_classes=10)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            out = self.net(x)
            return out, nn.functional.cross_entropy(out, y)

    torch.manual_seed(0)
    model = Net().half()
    options = poptorch.Options().showCompilationProgressBar(False).randomSeed(0)
    options.Emulator.replicaExecution("loop")
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.001)
    training = poptorch.trainingModel(model, options, optimizer)
    x, y = torch.randn(8, 3, 32, 32).half(), torch.arange(8)
    training(x, y)
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        training(x, y)
        print(time.perf_counter() - began, flush=True)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each setting and load."""
    with ExitStack() as stack:
        trainings = {
            way: stack.enter_context(started(WAYS[way], args.threads)) for way in args.ways
        }
        busy = [stack.enter_context(endless_loop()) for _ in range(args.busy)]
        for load in sorted({0, args.busy}):
            signal_all(busy, signal.SIGCONT if load else signal.SIGSTOP)
            seconds: dict[str, list[float]] = {way: [] for way in trainings}
            for _ in range(args.rounds):
                for way, process in trainings.items():
                    seconds[way].append(step(process))
            base = seconds.get(BASE) or next(iter(seconds.values()))
            for way, own in seconds.items():
                ratios = [mine / theirs for mine, theirs in zip(own, base, strict=True)]
                yield {
                    "way": way,
                    "busy": load,
                    "threads": args.threads,
                    "ms": round(1e3 * statistics.median(own), 1),
                    "least ms": round(1e3 * min(own), 1),
                    f"of {BASE}": round(statistics.median(ratios), 3),
                }
        signal_all(busy, signal.SIGCONT)


@contextmanager
def started(variables: dict[str, str], threads: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process that trains, and end it."""
    environ = {name: value for name, value in os.environ.items() if name not in NAMES}
    environ |= {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), **variables}
    with subprocess.Popen(
        [sys.executable, __file__, "--trains"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("a training process ended before its first step")
        yield process
        process.kill()


@contextmanager
def endless_loop() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in an endless loop, and end it."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def signal_all(processes: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


def step(process: subprocess.Popen[str]) -> float:
    """Return the seconds of one step."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


if __name__ == "__main__":
    main()
