"""The cost of a state in memory after each step: steps with and without it, which take turns.

The model has layers with 50 MB of weights, and SGD with momentum keeps 50 MB more, so a state has
100 MB. The number of samples is chosen so that a step without states takes about 100 ms. Blocks of
steps with states and blocks without them take turns, so that other load of the machine meets both.
Each instance has one thread. The measured time of a step contains the time of ``save()``. The CPU
time of the training's thread, with the time in ``save()``, hardly depends on other load. The CPU
time of the process also contains the copy.

poptorch  TrainingCheckpoints of a PopTorch model
loop      LoopCheckpoints of a plain PyTorch loop

With one instance on two cores, one core is spare for the copy. With as many instances as cores,
the copy takes its time from the training.

Usage: python benchmarks/memory_checkpoints.py [--json] [--instances 1 2] [--ways poptorch loop]
    [--blocks 12]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from show_rows import rows_of_job, show_rows

WAYS = ("poptorch", "loop")
STEPS_OF_BLOCK = 5
_WIDTH, _LAYERS = 1024, 12
_MILLISECONDS = 100.0

Step = Callable[[], Any]


def network() -> Any:
    import torch

    return torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def poptorch_training(folder: Path, samples: int) -> tuple[Step, Any]:
    """Return a step of a PopTorch model, and its checkpoints."""
    import torch

    import popdist_py
    from popdist_py import poptorch
    from popdist_py.poptorch.checkpoint import TrainingCheckpoints

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Any) -> Any:
            return poptorch.identity_loss(self.network(x).square(), "mean")

    options = poptorch.Options().showCompilationProgressBar(False)
    options.Distributed.configureProcessId(
        popdist_py.getInstanceIndex(), popdist_py.getNumInstances()
    )
    net = WithLoss()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    model = poptorch.trainingModel(net, options, optimizer=optimizer)
    x = torch.randn(samples, _WIDTH)
    return lambda: model(x), TrainingCheckpoints(folder, model, memory_every=1, disk_every=10**9)


def loop_training(folder: Path, samples: int) -> tuple[Step, Any]:
    """Return a step of a PyTorch loop, and its checkpoints."""
    import torch

    import popdist_py
    from popdist_py.checkpoint import LoopCheckpoints

    net = network()
    if popdist_py.getNumInstances() > 1:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    x = torch.randn(samples, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    options: dict[str, Any] = {"memory_every": 1, "disk_every": 10**9}
    return step, LoopCheckpoints(folder, model=net, optimizer=optimizer, **options)


_TRAININGS = {"poptorch": poptorch_training, "loop": loop_training}


def milliseconds(
    step: Step, clock: Callable[[], float] = time.perf_counter, times: int = 1
) -> float:
    """Return the time of one step by a clock; the mean if the step runs several times."""
    start = clock()
    for _ in range(times):
        step()
    return 1000 * (clock() - start) / times


def fitting_samples(way: str, folder: Path) -> int:
    """Return the number of samples for which a step takes about 100 ms."""
    import popdist_py

    samples = 64
    step, _ = _TRAININGS[way](folder / "fitting", samples)
    step()
    taken = min(milliseconds(step) for _ in range(5))
    # The time of a step without samples is that of the update.
    smaller, _ = _TRAININGS[way](folder / "fitting", samples // 8)
    smaller()
    update = min(milliseconds(smaller) for _ in range(5))
    of_sample = max((taken - update) / (samples - samples // 8), 1e-3)
    fitting = samples + (_MILLISECONDS - taken) / of_sample
    return max(8, int(popdist_py.all_reduce(fitting, "mean")))


def work(way: str, folder: Path, blocks: int) -> None:
    """Measure as one instance of a job; the first prints the times."""
    import torch

    import popdist_py
    from popdist_py.torch_states.memory_copies import wait_for_copies

    torch.set_num_threads(1)
    popdist_py.init()
    samples = fitting_samples(way, folder)
    step, checkpoints = _TRAININGS[way](folder / "c", samples)
    done, saves = 0, []

    def saved_step() -> None:
        nonlocal done
        step()
        done += 1
        saves.append(milliseconds(lambda: checkpoints.save(done), time.thread_time))

    for _ in range(6):
        saved_step()
    saves.clear()
    times: dict[Step, list[float]] = {step: [], saved_step: []}
    cpu_times: dict[Step, list[float]] = {step: [], saved_step: []}
    process_times: dict[Step, list[float]] = {step: [], saved_step: []}
    for _ in range(blocks):
        for each, taken in times.items():
            popdist_py.barrier()
            start, start_of_process = time.thread_time(), time.process_time()
            taken.append(milliseconds(each, times=STEPS_OF_BLOCK))
            cpu_times[each].append(1000 * (time.thread_time() - start) / STEPS_OF_BLOCK)
            wait_for_copies()
            process_times[each].append(
                1000 * (time.process_time() - start_of_process) / STEPS_OF_BLOCK
            )
    if popdist_py.getInstanceIndex() == 0:
        # Blocks that are next to each other meet the same load of the machine.
        pairs = zip(times[step], times[saved_step], strict=True)
        overheads = [with_it / without - 1 for without, with_it in pairs]
        cpu_without, cpu_with = map(statistics.median, cpu_times.values())
        all_without, all_with = map(statistics.median, process_times.values())
        memory = Path(os.environ["POPDIST_CHECKPOINT_MEMORY"])
        sizes = [path.stat().st_size for path in memory.rglob("slot-*")]
        row = {
            "way": way,
            "instances": popdist_py.getNumInstances(),
            "cores": len(os.sched_getaffinity(0)),
            "state MB": round(max(sizes) / 1e6, 1),
            "ms without": round(statistics.median(times[step]), 2),
            "ms with": round(statistics.median(times[saved_step]), 2),
            "overhead %": round(100 * statistics.median(overheads), 2),
            "overhead of the fastest %": round(
                100 * (min(times[saved_step]) / min(times[step]) - 1), 2
            ),
            "cpu ms without": round(cpu_without, 2),
            "cpu ms with": round(cpu_with, 2),
            "cpu overhead %": round(100 * (cpu_with / cpu_without - 1), 2),
            "cpu ms of save()": round(statistics.median(saves), 2),
            "process cpu ms without": round(all_without, 2),
            "process cpu ms with": round(all_with, 2),
        }
        print(json.dumps(row), flush=True)


def rows(arguments: argparse.Namespace) -> Any:
    for way in arguments.ways:
        for instances in arguments.instances:
            with tempfile.TemporaryDirectory() as folder:
                job = ("poprun_py", "--num-instances", instances, "--num-replicas", instances)
                program = (__file__, "--worker", way, folder, arguments.blocks)
                yield from rows_of_job([*job, *arguments.launcher, sys.executable, *program])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--launcher", nargs="*", default=[], help="more options of poprun-py")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        way, folder, blocks = arguments.worker
        work(way, Path(folder), int(blocks))
    else:
        show_rows(rows(arguments), as_json=arguments.json)


if __name__ == "__main__":
    main()
