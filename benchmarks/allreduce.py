"""All-reduce of float32 within a host: ours against MPI_Allreduce, gloo and a plain copy.

Every instance adds its own array and those of the others. "ours" is our all-reduce, and "window" is
ours on an array in shared memory, where gradients lie too. For "copy" every instance copies its
array at the same time. The implementations take turns; a time is the median over the turns of the
slowest instance.

Usage: python benchmarks/allreduce.py [--json] [--instances 2 4 8] [--sizes 4096 ...] [--turns 9]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from show_rows import show_rows

SIZES = [
    4 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    32 << 20,
    100_000_000,
    400_000_000,
]
# Each implementation repeats its call for about this long in every turn.
_SECONDS_PER_TURN = 0.02


def implementations(size: int) -> dict[str, Callable[[], None]]:
    """Return the calls that are compared, by name, on arrays of ``size`` bytes."""
    import numpy as np
    import torch
    from mpi4py import MPI

    import popdist_py
    from popdist_py import context

    own = np.zeros(size // 4, np.float32)
    target = np.empty_like(own)
    tensor = torch.from_numpy(own)
    window = context.communicator().gradient_buffer(size).view(np.float32)
    return {
        "ours": lambda: popdist_py.all_reduce(own),
        "window": lambda: popdist_py.all_reduce(window),
        "mpi": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, own),
        "gloo": lambda: torch.distributed.all_reduce(tensor),
        "copy": lambda: np.copyto(target, own),
    }


def measure(size: int, turns: int) -> dict[str, float]:
    """Return the microseconds of one call, by implementation."""
    import popdist_py

    calls = implementations(size)
    repetitions = {}
    for name, call in calls.items():
        call()
        popdist_py.barrier()
        start = time.perf_counter()
        call()
        seconds_per_call = popdist_py.all_reduce(time.perf_counter() - start, "max")
        repetitions[name] = max(1, min(1000, int(_SECONDS_PER_TURN / seconds_per_call)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            popdist_py.barrier()
            start = time.perf_counter()
            for _ in range(repetitions[name]):
                call()
            seconds[name].append((time.perf_counter() - start) / repetitions[name])
    slowest = popdist_py.all_reduce(seconds, "max")
    return {name: 1e6 * statistics.median(turn_times) for name, turn_times in slowest.items()}


def work(sizes: list[int], turns: int) -> None:
    """Measure as one of the instances; instance 0 prints a line for every size."""
    import torch

    import popdist_py

    torch.set_num_threads(1)
    popdist_py.init()
    torch.distributed.init_process_group("gloo")
    for size in sizes:
        times = measure(size, turns)
        row = {
            "instances": popdist_py.getNumInstances(),
            "bytes": size,
            **{f"{name}_us": round(us, 1) for name, us in times.items()},
            "window/gloo": round(times["gloo"] / times["window"], 2),
            "window/mpi": round(times["mpi"] / times["window"], 2),
            "ours/mpi": round(times["mpi"] / times["ours"], 2),
            "window/copy": round(times["copy"] / times["window"], 2),
        }
        if popdist_py.getInstanceIndex() == 0:
            print(json.dumps(row), flush=True)
    torch.distributed.destroy_process_group()


def launch(instances: int, sizes: list[int], turns: int) -> list[dict[str, float]]:
    """Run one job and return its rows."""
    options = ["--num-instances", instances, "--num-replicas", instances, "--oversubscribe"]
    program = [__file__, "--worker", "--turns", turns, "--sizes", *sizes]
    completed = subprocess.run(
        [sys.executable, "-m", "poprun_py", *map(str, options), *map(str, program)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
    )
    lines = [line.partition("<stdout>:")[2] for line in completed.stdout.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.sizes, arguments.turns)
        return
    rows = (
        row
        for instances in arguments.instances
        for row in launch(instances, arguments.sizes, arguments.turns)
    )
    show_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
