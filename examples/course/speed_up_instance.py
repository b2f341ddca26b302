"""One instance of a job of speed_up.py: measures steps, and rank 0 prints their seconds as JSON.

poprun-py -n 2 examples/course/speed_up_instance.py --batch-size 128 --steps 20
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from fashion_mnist import FashionCNN
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import HelpFormat, Parser, positive
from common.running import run

ROUNDS = 3  # number of measurements of each kind of step
IMAGES = 2048  # random images, since their content does not change the time
Step = Callable[[], None]


def step_of(model: nn.Module, batch_size: int) -> tuple[Step, Step]:
    """Return two functions: a whole training step of ``model``, and the optimiser's part of it."""
    images, labels = torch.rand(IMAGES, 1, 28, 28), torch.randint(10, (IMAGES,))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        chosen = torch.randint(IMAGES, (batch_size,))
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, optimizer.step


def kinds_of_steps(batch_size: int) -> dict[str, Step]:
    """Return the kinds of steps to measure by name. ``run`` is a step of the training."""
    alone, _ = step_of(FashionCNN(), batch_size // 2)
    if dist.get_world_size() == 1:
        run, optimizer = step_of(FashionCNN(), batch_size)
        return {"run": run, "half batch": alone, "optimiser": optimizer}
    model = DistributedDataParallel(FashionCNN())
    run, _ = step_of(model, batch_size // dist.get_world_size())

    def without_reduction() -> None:
        with model.no_sync():
            run()

    # All instances run the half batch at once, without waiting for each other.
    return {
        "run": run, "half batch": alone, "without reduction": without_reduction,
        "with reduction": run,
    }  # fmt: skip


def seconds_of_one(step: Step, count: int, meet: Callable[[], None] = lambda: None) -> float:
    """Return the mean seconds of ``count`` steps of this process, after a call of ``meet``."""
    step()  # an unmeasured first step fills the caches
    meet()
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


def seconds_of(step: Step, count: int) -> float:
    """Return the mean seconds of a step, over ``count`` steps and all instances."""
    total = torch.tensor(seconds_of_one(step, count, dist.barrier))
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Measure, and return the seconds by name."""
    parser = Parser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--batch-size", type=positive, default=128, help="of the global batch")
    parser.add_argument("--steps", type=positive, default=30, help="of each kind of steps")
    parser.add_argument("--began", type=float, help="when the job was started, in s since 1970")
    args = parser.parse_args(argv)

    torch.set_num_threads(1)  # an instance has one core
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    kinds = kinds_of_steps(args.batch_size)
    kinds["run"]()
    found = {"start": time.time() - (args.began or time.time())}
    found["run"] = seconds_of(kinds.pop("run"), args.steps)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, step in kinds.items():
            times[name].append(seconds_of(step, max(1, args.steps // ROUNDS)))
    found |= {name: statistics.median(values) for name, values in times.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    # The models are freed before the process group. Otherwise, freeing the group can deadlock: the
    # main thread waits for gloo's thread and holds the GIL, which gloo's thread may need.
    kinds.clear()
    del step
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    run(main)
