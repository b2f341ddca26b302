"""Collectives on float32 within a host: ours against MPI's, gloo's and a plain copy.

"ours" is our call on an array of the process's own, and "window" our all-reduce of an array in
shared memory, where gradients lie too. For "copy" every instance copies its array at the same time.
MPI, like ours, gathers and scatters into a new array. The size is that of the whole array: of
all_gather's result, and of what reduce_scatter is given. Two settings:

hot   calls one after the other on the same arrays; the slowest instance's time of a call.
cold  before each call every instance writes 64 MB of other memory, which leaves the caches without
      arrays and code, and takes each its own time of some milliseconds. The time is that from the
      last instance's arrival until the last one has its result, by the clock that all processes of
      a host share: waiting for instances that are late counts for nobody, waking up counts. Arrays
      above 128 MB, which leave the caches by themselves, are left out.
python
      a hot call of ours with one number for each instance: there is nothing to move, so it takes
      what Python takes, and one meeting. "slices" is the way of large arrays, with three meetings.

The implementations take turns; a time is the median over the turns, of which large arrays get 3.

Usage: python benchmarks/allreduce.py [--json] [--instances 2 4 8] [--sizes 4096 ...] [--turns 9]
    [--collectives all_reduce broadcast all_gather reduce_scatter] [--settings hot cold python]
    [--ways ours window mpi gloo copy]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from show_rows import show_rows

SIZES = [
    4 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    100_000_000,
    400_000_000,
]
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
SETTINGS = ("hot", "cold", "python")
WAYS = ("ours", "window", "mpi", "gloo", "copy")
# Each implementation repeats its call for about this long in every turn.
_SECONDS_PER_TURN = 0.02
_OTHER_MEMORY_BYTES, _MAX_COLD_BYTES = 64 << 20, 128_000_000
_MAX_BYTES_FOR_ALL_TURNS, _TURNS_ABOVE = 32_000_000, 3

Calls = dict[str, Callable[[], object]]


def implementations(collective: str, size: int) -> Calls:
    """Return the calls that are compared, by name, on arrays of ``size`` bytes."""
    import numpy as np
    from mpi4py import MPI

    import popdist_py
    from popdist_py import context

    world, count = MPI.COMM_WORLD, popdist_py.getNumInstances()
    own = np.zeros((count, size // 4 // count), np.float32)
    target = np.empty_like(own)
    copy: Calls = {"copy": lambda: np.copyto(target, own)}
    if collective == "broadcast":
        return {
            "ours": lambda: popdist_py.broadcast(own),
            "mpi": lambda: world.Bcast(own),
            **copy,
        }
    if collective == "all_gather":
        row = own[0]
        return {
            "ours": lambda: popdist_py.all_gather(row),
            "mpi": lambda: world.Allgather(row, np.empty_like(own)),
            **copy,
        }
    if collective == "reduce_scatter":
        return {
            "ours": lambda: popdist_py.reduce_scatter(own),
            "mpi": lambda: world.Reduce_scatter_block(own, np.empty_like(own[0])),
            **copy,
        }
    window = context.communicator().gradient_buffer(own.nbytes).view(np.float32)
    calls: Calls = {
        "ours": lambda: popdist_py.all_reduce(own),
        "window": lambda: popdist_py.all_reduce(window),
        "mpi": lambda: world.Allreduce(MPI.IN_PLACE, own),
        **copy,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        tensor = torch.from_numpy(own)
        calls["gloo"] = lambda: torch.distributed.all_reduce(tensor)
    return calls


def measure_hot(calls: Calls, turns: int) -> dict[str, float]:
    """Return the seconds of one call among many, by implementation."""
    import popdist_py

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
    return {name: statistics.median(times) for name, times in slowest.items()}


def measure_cold(calls: Calls, turns: int) -> dict[str, float]:
    """Return the seconds from the last arrival to the last result, by implementation."""
    import numpy as np

    import popdist_py

    other_memory = np.zeros(_OTHER_MEMORY_BYTES, np.uint8)
    arrivals: dict[str, list[float]] = {name: [] for name in calls}
    ends: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            popdist_py.barrier()
            other_memory.fill(turn)
            arrivals[name].append(time.perf_counter())
            call()
            ends[name].append(time.perf_counter())
    arrivals = popdist_py.all_reduce(arrivals, "max")
    ends = popdist_py.all_reduce(ends, "max")
    return {
        # The first call of each prepares what later ones use again.
        name: statistics.median(np.subtract(ends[name][1:], arrivals[name][1:]))
        for name in calls
    }


def measure_python(collective: str, turns: int) -> dict[str, float]:
    """Return the seconds of one call of ours that has nothing to move."""
    import numpy as np

    import popdist_py
    from popdist_py import context

    array = np.zeros((popdist_py.getNumInstances(), 1), np.float32)
    calls = {
        "all_reduce": lambda: popdist_py.all_reduce(array),
        "broadcast": lambda: popdist_py.broadcast(array),
        "all_gather": lambda: popdist_py.all_gather(array[0]),
        "reduce_scatter": lambda: popdist_py.reduce_scatter(array),
    }
    seconds = measure_hot({"ours": calls[collective]}, turns)
    if collective == "all_reduce":
        host = context.communicator()._host
        limit, host.one_shot_bytes = host.one_shot_bytes, 0
        in_slices = lambda: popdist_py.all_reduce(array, name="slices")  # noqa: E731
        seconds |= measure_hot({"slices": in_slices}, turns)
        host.one_shot_bytes = limit
    return seconds


MEASURES = {"hot": measure_hot, "cold": measure_cold}


def work(arguments: argparse.Namespace) -> None:
    """Measure as one of the instances; instance 0 prints a line for every row."""
    import popdist_py

    popdist_py.init()
    with_gloo = "gloo" in arguments.ways and "all_reduce" in arguments.collectives
    if with_gloo:
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
    for collective in arguments.collectives:
        if "python" in arguments.settings:
            _show(collective, "python", 4, measure_python(collective, arguments.turns))
        for size in arguments.sizes:
            calls = implementations(collective, size)
            calls = {name: calls[name] for name in arguments.ways if name in calls}
            turns = arguments.turns
            if size > _MAX_BYTES_FOR_ALL_TURNS:
                turns = min(turns, _TURNS_ABOVE)
            for setting in arguments.settings:
                if setting == "hot" or (setting == "cold" and size <= _MAX_COLD_BYTES):
                    _show(collective, setting, size, MEASURES[setting](calls, turns))
                calls.pop("gloo", None)  # it is slow, and its worst is known from the hot calls
    if with_gloo:
        torch.distributed.destroy_process_group()


def _show(collective: str, setting: str, size: int, seconds: dict[str, float]) -> None:
    import popdist_py

    if popdist_py.getInstanceIndex() == 0:
        print(json.dumps(_row(collective, setting, size, seconds)), flush=True)


def _row(
    collective: str, setting: str, size: int, seconds: dict[str, float]
) -> dict[str, str | float]:
    """Return what is published; ``a/b`` is how many times faster than b is a."""
    import popdist_py

    pairs = ("window/gloo", "window/mpi", "window/copy", "ours/gloo", "ours/mpi", "ours/copy")
    ratios = {}
    for pair in pairs:
        ours, other = pair.split("/")
        if ours in seconds and other in seconds:
            ratios[pair] = round(seconds[other] / seconds[ours], 2)
    return {
        "collective": collective,
        "setting": setting,
        "instances": popdist_py.getNumInstances(),
        "bytes": size,
        **{f"{name}_us": round(1e6 * time, 1) for name, time in seconds.items()},
        **ratios,
    }


def launch(instances: int, options: Sequence[object]) -> list[dict[str, float]]:
    """Run one job and return its rows."""
    placed = ["--num-instances", instances, "--num-replicas", instances, "--oversubscribe"]
    program = [__file__, "--worker", *options]
    completed = subprocess.run(
        [sys.executable, "-m", "poprun_py", *map(str, placed), *map(str, program)],
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
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    options = ["--turns", arguments.turns]
    for name in ("sizes", "collectives", "settings", "ways"):
        options += [f"--{name}", *getattr(arguments, name)]
    rows = (row for instances in arguments.instances for row in launch(instances, options))
    show_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
