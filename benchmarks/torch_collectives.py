"""Single collectives of torch.distributed on float32: the back end popdist against gloo.

Both groups live in the same processes and take turns. The size is that of the whole array of a
rank: of all_gather's and gather's result, and of what scatter, reduce_scatter_tensor and
all_to_all_single are given. A time is the median over the turns of the slowest rank's time of a
call; "async" is a call with async_op=True, and its wait. Large arrays get fewer turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

SIZES = [4 << 10, 64 << 10, 1 << 20, 10_000_000, 100_000_000, 400_000_000]
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
)
BACK_ENDS = ("popdist", "gloo")
# Each back end repeats its call for about this long in every turn.
_SECONDS_PER_TURN = 0.02
_MAX_BYTES_FOR_ALL_TURNS, _TURNS_ABOVE = 32_000_000, 3

Groups = dict[str, Any]


def join_groups() -> Groups:
    """Return a group of all ranks over each back end."""
    import torch
    import torch.distributed as dist

    import popdist_py.torch_backend

    popdist_py.torch_backend.register()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return {name: dist.new_group(backend=name) for name in BACK_ENDS}


def calls(collective: str, size: int) -> Callable[[Any, bool], Any]:
    """Return a function of a group and ``async_op``, which makes the call on ``size`` bytes."""
    import torch
    import torch.distributed as dist

    rank, count = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(max(1, size // 4 // count) * count)
    part, result = whole.chunk(count)[rank].clone(), torch.zeros_like(whole)
    parts = list(result.chunk(count))
    at_root = parts if rank == 0 else None
    return {
        "all_reduce": lambda group, later: dist.all_reduce(whole, group=group, async_op=later),
        "broadcast": lambda group, later: dist.broadcast(whole, 0, group, later),
        "reduce": lambda group, later: dist.reduce(whole, 0, group=group, async_op=later),
        "all_gather": lambda group, later: dist.all_gather(parts, part, group, later),
        "all_gather_into_tensor": lambda group, later: dist.all_gather_into_tensor(
            result, part, group, later
        ),
        "gather": lambda group, later: dist.gather(part, at_root, 0, group, later),
        "scatter": lambda group, later: dist.scatter(part, at_root, 0, group, later),
        "reduce_scatter_tensor": lambda group, later: dist.reduce_scatter_tensor(
            part, whole, group=group, async_op=later
        ),
        "all_to_all_single": lambda group, later: dist.all_to_all_single(
            result, whole, group=group, async_op=later
        ),
        "barrier": lambda group, later: dist.barrier(group, later),
    }[collective]


def measure(
    collective: str, size: int, groups: Groups, turns: int, later: bool
) -> dict[str, float]:
    """Return the seconds of one call, by back end.

    Args:
        collective: its name.
        size: bytes of the whole array.
        groups: by back end.
        turns: how often each back end is measured.
        later: whether the call is asynchronous.
    """
    function = calls(collective, size)

    def call(group: Any) -> None:
        work = function(group, later)
        if work is not None and later:
            work.wait()

    repetitions = {}
    for name, group in groups.items():
        call(group)
        repetitions[name] = max(1, min(1000, int(_SECONDS_PER_TURN / _seconds(call, group, 1))))
        _seconds(call, group, min(repetitions[name], 8))  # first calls try different ways
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(turns):
        for name, group in groups.items():
            seconds[name].append(_seconds(call, group, repetitions[name]))
    return {name: statistics.median(times) for name, times in seconds.items()}


def _seconds(call: Callable[[Any], None], group: Any, repetitions: int) -> float:
    """Return the seconds of a call on the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(repetitions):
        call(group)
    slowest = torch.tensor((time.perf_counter() - start) / repetitions, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def rows(
    collectives: Sequence[str], sizes: Sequence[int], turns: int, modes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Measure as one of the ranks; yield what is published."""
    import torch.distributed as dist

    groups = join_groups()
    for collective in collectives:
        for size in sizes if collective != "barrier" else (0,):
            counted = turns if size <= _MAX_BYTES_FOR_ALL_TURNS else min(turns, _TURNS_ABOVE)
            for mode in modes:
                seconds = measure(collective, size, groups, counted, mode == "async")
                yield {
                    "collective": collective,
                    "mode": mode,
                    "instances": dist.get_world_size(),
                    "bytes": size,
                    **{f"{name}_us": round(1e6 * each, 1) for name, each in seconds.items()},
                    "popdist/gloo": round(seconds["gloo"] / seconds["popdist"], 2),
                }
    dist.destroy_process_group()
