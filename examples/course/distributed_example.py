"""Train FashionCNN with DistributedDataParallel, and show the purpose of each part.

examples/course/distributed_example.sh --show-samples
poprun-py -n 2 examples/course/distributed_example.py --without-ddp
torchrun --nproc-per-node 2 examples/course/distributed_example.py --late-rank 2

The launcher of the processes sets environment variables: the rank of each process and the address
of rank 0. Without these variables, as with plain python, the program has one rank.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from fashion_mnist import FashionCNN, accuracy, first, load, training_arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import running
from common.arguments import rate

VARIABLES = {
    "MASTER_ADDR": "the host of rank 0, where all meet",
    "MASTER_PORT": "the port there",
    "WORLD_SIZE": "how many processes there are",
    "RANK": "which of them this is",
    "LOCAL_RANK": "which of those on its host; it chooses the GPU, where there are any",
}


@dataclass(frozen=True)
class Result:
    """The result of a run. The lists on rank 0 have one entry per rank."""

    samples: list[list[int]]
    barrier_seconds: list[float]
    first_step_seconds: list[float]
    largest_difference: float
    accuracy: float


def join_others() -> None:
    """Join the group of all ranks. A process without the variable RANK makes its own group.

    Raises:
        ValueError: A variable is missing, or RANK and WORLD_SIZE contradict each other.
    """
    if "RANK" in os.environ:
        rank, size = (int(os.environ.get(name, "1")) for name in ("RANK", "WORLD_SIZE"))
        if "WORLD_SIZE" in os.environ and not 0 <= rank < size:
            # torch would wait for ranks that never join.
            raise ValueError(f"RANK={rank} is given, WORLD_SIZE={size} accepts 0 to {size - 1}")
        dist.init_process_group("gloo")  # torch reads the first four VARIABLES
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def say(*words: object) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def of_all_ranks(value):
    """Return the values of all ranks, in the order of the ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def load_once(folder: Path):
    """Let rank 0 make or check the data before the other ranks load it."""
    problem = [None]
    if dist.get_rank() == 0:
        try:
            load(folder)
        except SystemExit as error:
            problem = [error.code]
    dist.broadcast_object_list(problem)
    if problem[0]:
        sys.exit(problem[0] if dist.get_rank() == 0 else 1)
    return load(folder)


def show_samples(samples: list[list[int]], items: int) -> None:
    """Print the samples that each rank got."""
    for rank, own in enumerate(samples):
        say(f"rank {rank}: {len(own)} samples: {', '.join(map(str, own[:8]))}, ...")
    given = [index for own in samples for index in own]
    twice = len(given) - len(set(given))
    say(f"together {len(set(given))} of {items} samples; {twice} given twice")


def largest_difference(model: nn.Module) -> float:
    """Return the largest difference between a weight of any rank and of rank 0."""
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    return max(float((other - others[0]).abs().max()) for other in others)


def meet(late_rank: float, *, with_barrier: bool) -> float:
    """Delay the last rank, call the barrier, and return the seconds that this rank waits in it."""
    if late_rank and dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(late_rank)  # stands for a slow disk
    began = time.perf_counter()
    if with_barrier:
        dist.barrier()
    return time.perf_counter() - began


def train(model: nn.Module, loader: DataLoader, args) -> float:
    """Train ``model`` in place and return the seconds of the first step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    first_step, began = 0.0, time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        loader.sampler.set_epoch(epoch - 1)  # another order in every epoch, on all ranks the same
        for images, labels in tqdm(loader, f"epoch {epoch}", disable=dist.get_rank() != 0):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients of all ranks
            optimizer.step()
            first_step = first_step or time.perf_counter() - began
        total = loss.detach()
        dist.all_reduce(total)
        apart = largest_difference(model)
        say(f"epoch {epoch}: last loss {total / dist.get_world_size():.3f}, "
            f"weights of the ranks differ by {apart:.1e} at most")  # fmt: skip
    return first_step


def run(args) -> Result:
    """Train and test. This process must be a member of the group of all ranks."""
    if args.show_environment:
        for name, meaning in VARIABLES.items():
            say(f"{name}={os.environ.get(name, '')}".ljust(24), meaning)
    torch.manual_seed(0)
    training_set, test_set = load_once(args.data_dir)
    training_set = first(training_set, args.items)
    sampler = DistributedSampler(training_set, seed=0)
    samples = of_all_ranks(list(sampler))
    if args.show_samples:
        show_samples(samples, len(training_set))
    model = FashionCNN()  # the same on all ranks by the seed; DDP also sends rank 0's weights
    if not args.without_ddp:
        model = DistributedDataParallel(model)
    loader = DataLoader(training_set, args.batch_size, sampler=sampler)
    waited = meet(args.late_rank, with_barrier=not args.without_barrier)
    first_step = train(model, loader, args)
    waited, first_step = of_all_ranks(waited), of_all_ranks(first_step)
    if args.late_rank:
        for rank, (barrier, step) in enumerate(zip(waited, first_step, strict=True)):
            say(f"rank {rank}: {barrier:.2f} s in the barrier, {step:.2f} s in the first step")
    result = Result(
        samples, waited, first_step, largest_difference(model), accuracy(model, test_set)
    )
    say(f"test accuracy {result.accuracy:.1f} % on {dist.get_world_size()} rank(s)")
    return result


def main(argv: list[str] | None = None) -> Result:
    """Join the group of all ranks, train, test and leave the group."""
    parser = training_arguments(__doc__, epochs=2, batch_size=32)
    add = parser.add_argument
    add(
        "--show-samples",
        action="store_true",
        help="the samples that DistributedSampler gives each rank",
    )
    add("--show-environment", action="store_true", help="which variables are read")
    add("--without-ddp", action="store_true", help="leave the wrapper out: each trains for itself")
    add("--late-rank", type=rate, metavar="SECONDS", help="the last rank comes that late")
    add("--without-barrier", action="store_true", help="leave the barrier before training out")
    args = parser.parse_args(argv)
    try:
        join_others()
    except ValueError as error:
        parser.error(f"the variables {', '.join(VARIABLES)} do not define this process: {error}")
    try:
        result = run(args)
        # The barrier releases the GIL while it waits. gloo's thread needs the GIL to free the last
        # tensor.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    running.run(main)
