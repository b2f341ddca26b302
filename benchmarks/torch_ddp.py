"""DistributedDataParallel's steps over the back end popdist, beside gloo.

Both train an equal model in the same processes, turn and turn about: ``gloo/popdist`` is how many
times as many steps ours makes, ``cpu gloo/popdist`` how many times as much time of the cores gloo
takes, which other work on the machine disturbs less. ``gloo/none`` is what a back end would reach
that takes no time at all: a third model fills its buckets, which nobody reduces.
Targets for steps: >= 1.4 for mlp and bert within a host, and never below 1.

Usage: python benchmarks/torch_ddp.py [--json] [--instances 2 4] [--models mlp ...] [--turns 9]
    [--seconds 4] [--host A,B] [--torchrun]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from show_rows import rows_of_job, show_rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Samples of one instance in a step.
MODELS = {"mlp": 16, "resnet18": 4, "resnet50": 4, "bert": 1, "bert-32": 1}
# Tokens of the sequence, where they are fewer than 128.
_TOKENS = {"bert-32": 32}
_RATE = 1e-5
_WARM_UP = 8  # DDP makes new buckets after the first step, and ours tries two ways six times


class Perceptron(nn.Module):
    """25 million parameters, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1024, 2944, 2944, 2944, 1024]
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return F.cross_entropy(x, labels)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Perceptron() if name == "mlp" else models.make(name.partition("-")[0])


def batch(name: str, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "mlp":
        return torch.randn(samples, 1024), torch.randint(0, 1024, (samples,))
    inputs, labels = models.batch(name.partition("-")[0], samples)
    return (inputs[:, : _TOKENS[name]] if name in _TOKENS else inputs), labels


def not_reduced(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
    """Be a communication hook that leaves the gradients as they are."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def step_of(name: str, group: Any, reduces: bool) -> Callable[[], tuple[float, float]]:
    """Return what makes one step over a process group, and returns its seconds and the cores'."""
    model = DistributedDataParallel(make(name), process_group=group, gradient_as_bucket_view=True)
    if not reduces:
        model.register_comm_hook(None, not_reduced)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    inputs, labels = batch(name, MODELS[name])

    def step() -> tuple[float, float]:
        began, computed = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        model(inputs, labels).backward()
        optimizer.step()
        return time.perf_counter() - began, time.process_time() - computed

    return step


def row(name: str, turns: int, seconds: float) -> dict[str, Any]:
    """Train a model over both back ends; collective."""
    groups = {backend: dist.new_group(backend=backend) for backend in ("popdist", "gloo")}
    steps = {backend: step_of(name, group, True) for backend, group in groups.items()}
    steps["none"] = step_of(name, groups["popdist"], False)
    counts = {}
    for backend, step in steps.items():
        taken, _ = [step() for _ in range(_WARM_UP)][-1]
        common = torch.tensor([seconds / turns / taken])
        dist.all_reduce(common, dist.ReduceOp.MIN)  # as many steps on all instances
        counts[backend] = max(1, int(common))
    found: dict[str, list[tuple[float, float]]] = {backend: [] for backend in steps}
    for _ in range(turns):
        for backend, step in steps.items():
            found[backend] += [step() for _ in range(counts[backend])]
    ours, theirs, none = (
        [1e3 * statistics.median(column) for column in zip(*found[backend], strict=True)]
        for backend in steps
    )
    return {
        "model": name,
        "instances": dist.get_world_size(),
        "popdist_ms": round(ours[0], 2),
        "gloo_ms": round(theirs[0], 2),
        "none_ms": round(none[0], 2),
        "gloo/popdist": round(theirs[0] / ours[0], 2),
        "gloo/none": round(theirs[0] / none[0], 2),
        "cpu gloo/popdist": round(theirs[1] / ours[1], 2),
    }


def work(arguments: argparse.Namespace) -> None:
    """Measure as one of the instances; instance 0 prints a line for every row."""
    import popdist_py.torch_backend  # noqa: F401

    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(1)
    dist.init_process_group("popdist")
    for name in arguments.models:
        found = row(name, arguments.turns, arguments.seconds)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def launch(instances: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run one job and yield its rows."""
    if arguments.torchrun:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={instances}"]
    else:
        launcher = ["poprun_py", "--num-instances", instances, "--num-replicas", instances]
        launcher += ["--oversubscribe", *(["--host", arguments.host] if arguments.host else [])]
    program = [__file__, "--worker", "--turns", arguments.turns, "--seconds", arguments.seconds]
    program += ["--models", *arguments.models]
    return rows_of_job([*launcher, *program])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each model and back end")
    parser.add_argument("--host", default="", help="as poprun-py takes it")
    parser.add_argument("--torchrun", action="store_true", help="start with torchrun")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    rows = (found for count in arguments.instances for found in launch(count, arguments))
    show_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
