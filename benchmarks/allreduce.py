"""Collectives on float32 within a host: ours against MPI's, gloo's and a plain copy.

"ours" is our call on an array of the process's own, and "window" our all-reduce of an array in
shared memory, where gradients lie too. For "copy" every instance copies its array at the same time.
MPI, like ours, gathers and scatters into a new array. The size is that of the whole array: of
all_gather's result, and of what reduce_scatter is given. The settings:

hot   calls one after the other on the same arrays; the slowest instance's time of a call.
cold  before each call every instance writes 64 MB of other memory, which leaves the caches without
      arrays and code, and takes each its own time of some milliseconds. The time is that from the
      last instance's arrival until the last one has its result, by the clock that all processes of
      a host share: waiting for instances that are late counts for nobody, waking up counts. Arrays
      above 128 MB, which leave the caches by themselves, are left out.
rewritten
      each implementation has an array of its own, ours a torch tensor. Before each call all
      instances meet, and every instance rewrites the arrays of all implementations, as a training
      step writes its gradients. The time is that of cold, and so are the sizes.
python
      a hot call of ours with one number for each instance: there is nothing to move, so it takes
      what Python takes, and one meeting. "slices" is the way of large arrays, with three meetings.

The implementations take turns; a time is the median over the turns, of which large arrays get 3.

Usage: python benchmarks/allreduce.py [--json] [--instances 2 4 8] [--sizes 4096 ...] [--turns 9]
    [--collectives all_reduce broadcast all_gather reduce_scatter]
    [--settings hot cold rewritten python] [--ways ours window mpi gloo copy]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
SETTINGS = ("hot", "cold", "rewritten", "python")
WAYS = ("ours", "window", "mpi", "gloo", "copy")
# Each implementation repeats its call for about this long in every turn.
_SECONDS_PER_TURN = 0.02
_OTHER_MEMORY_BYTES, _MAX_COLD_BYTES = 64 << 20, 128_000_000
_MAX_BYTES_FOR_ALL_TURNS, _TURNS_ABOVE = 32_000_000, 3
# Rewritten arrays get more turns, because each turn has a single call of each implementation.
_MORE_TURNS, _MAX_BYTES_FOR_MORE_TURNS = 10, 5_000_000

Calls = dict[str, Callable[[], object]]
# Seconds of a call, by implementation.
Seconds = dict[str, float]


def one_array(size: int) -> dict[str, Any]:
    """Return the array of ``size`` bytes that all implementations use, by implementation."""
    import numpy as np

    import popdist_py

    count = popdist_py.getNumInstances()
    return dict.fromkeys(WAYS, np.zeros((count, size // 4 // count), np.float32))


def own_arrays(size: int) -> dict[str, Any]:
    """Return an array of ``size`` bytes for each implementation."""
    import torch

    arrays = {way: array.copy() for way, array in one_array(size).items()}
    return arrays | {"ours": torch.zeros(arrays["ours"].shape)}


def implementations(collective: str, arrays: dict[str, Any]) -> Calls:
    """Return the calls that are compared, by name, on the array of each implementation."""
    import numpy as np
    from mpi4py import MPI

    import popdist_py
    from popdist_py import context

    world = MPI.COMM_WORLD
    ours, mpi, source = arrays["ours"], arrays["mpi"], arrays["copy"]
    target = np.empty_like(source)
    copy: Calls = {"copy": lambda: np.copyto(target, source)}
    if collective == "broadcast":
        return {
            "ours": lambda: popdist_py.broadcast(ours),
            "mpi": lambda: world.Bcast(mpi),
            **copy,
        }
    if collective == "all_gather":
        row, mpi_row = ours[0], mpi[0]
        return {
            "ours": lambda: popdist_py.all_gather(row),
            "mpi": lambda: world.Allgather(mpi_row, np.empty_like(mpi)),
            **copy,
        }
    if collective == "reduce_scatter":
        return {
            "ours": lambda: popdist_py.reduce_scatter(ours),
            "mpi": lambda: world.Reduce_scatter_block(mpi, np.empty_like(mpi[0])),
            **copy,
        }
    window = context.communicator().gradient_buffer(mpi.nbytes).view(np.float32)
    arrays["window"] = window
    calls: Calls = {
        "ours": lambda: popdist_py.all_reduce(ours),
        "window": lambda: popdist_py.all_reduce(window),
        "mpi": lambda: world.Allreduce(MPI.IN_PLACE, mpi),
        **copy,
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        tensor = torch.from_numpy(arrays["gloo"])
        calls["gloo"] = lambda: torch.distributed.all_reduce(tensor)
    return calls


def measure_hot(calls: Calls, turns: int) -> Seconds:
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


def measure_prepared(calls: Calls, turns: int, prepare: Callable[[], None]) -> Seconds:
    """Return the seconds from the last arrival to the last result, by implementation.

    Args:
        calls: The calls.
        turns: Number of calls of each.
        prepare: What every instance does between a barrier and each call.
    """
    import numpy as np

    import popdist_py

    arrivals: dict[str, list[float]] = {name: [] for name in calls}
    ends: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(turns + 1):
        # The order changes, because gloo's threads leave other memory in the caches for the next
        # call. All instances draw the same order.
        random.Random(turn).shuffle(names)
        for name in names:
            popdist_py.barrier()
            prepare()
            arrivals[name].append(time.perf_counter())
            calls[name]()
            ends[name].append(time.perf_counter())
    arrivals = popdist_py.all_reduce(arrivals, "max")
    ends = popdist_py.all_reduce(ends, "max")
    return {
        # The first call of each prepares what later ones use again.
        name: statistics.median(np.subtract(ends[name][1:], arrivals[name][1:]))
        for name in calls
    }


def measure_cold(calls: Calls, turns: int) -> Seconds:
    """Return the seconds of a call after other memory was written, by implementation."""
    import numpy as np

    other_memory = np.zeros(_OTHER_MEMORY_BYTES, np.uint8)
    return measure_prepared(calls, turns, partial(other_memory.fill, 1))


def measure_rewritten(collective: str, size: int, ways: Sequence[str], turns: int) -> Seconds:
    """Return the seconds of a call after all arrays were rewritten, by implementation."""
    arrays = own_arrays(size)
    calls = implementations(collective, arrays)
    calls = {name: calls[name] for name in ways if name in calls}

    def rewrite() -> None:
        for array in arrays.values():
            array[...] = 1.0

    return measure_prepared(calls, turns, rewrite)


def measure_python(collective: str, turns: int) -> Seconds:
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


def work(arguments: argparse.Namespace) -> None:
    """Measure as one of the instances; instance 0 prints a line for every row."""
    import popdist_py

    popdist_py.init()
    with_gloo = "gloo" in arguments.ways and "all_reduce" in arguments.collectives
    if with_gloo or "rewritten" in arguments.settings:
        import torch

        torch.set_num_threads(1)
    if with_gloo:
        torch.distributed.init_process_group("gloo")
    for collective in arguments.collectives:
        if "python" in arguments.settings:
            _show(collective, "python", 4, measure_python(collective, arguments.turns))
        for size in arguments.sizes:
            _measure_size(collective, size, arguments)
    if with_gloo:
        torch.distributed.destroy_process_group()


def _measure_size(collective: str, size: int, arguments: argparse.Namespace) -> None:
    """Measure the calls on arrays of one size in all settings."""
    turns, settings = arguments.turns, arguments.settings
    if size > _MAX_BYTES_FOR_ALL_TURNS:
        turns = min(turns, _TURNS_ABOVE)
    calls = implementations(collective, one_array(size))
    calls = {name: calls[name] for name in arguments.ways if name in calls}
    if "hot" in settings:
        _show(collective, "hot", size, measure_hot(calls, turns))
    if size > _MAX_COLD_BYTES:
        return
    if "cold" in settings:
        calls.pop("gloo", None)  # it is slow, and its worst is known from the hot calls
        _show(collective, "cold", size, measure_cold(calls, turns))
    if "rewritten" in settings:
        calls.clear()
        turns *= _MORE_TURNS if size < _MAX_BYTES_FOR_MORE_TURNS else 1
        seconds = measure_rewritten(collective, size, arguments.ways, turns)
        _show(collective, "rewritten", size, seconds)


def _show(collective: str, setting: str, size: int, seconds: Seconds) -> None:
    import popdist_py

    if popdist_py.getInstanceIndex() == 0:
        print(json.dumps(_row(collective, setting, size, seconds)), flush=True)


def _row(collective: str, setting: str, size: int, seconds: Seconds) -> dict[str, str | float]:
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
