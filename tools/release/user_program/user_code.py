"""A user's program as type checkers read it: every line says what they are to make of it.

It is checked, never run. A line that ends in an ignore is wrong on purpose: where a checker does
not complain about it, it complains about the ignore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import popdist_py
import poprun_py
from popdist_py import poptorch
from popdist_py.collectives.background import Handle
from poprun_py import (
    InstanceResult,
    JobFailedError,
    JobHandle,
    JobStatus,
    LaunchConfig,
    LaunchPlan,
    LaunchResult,
)


@dataclass
class Statistics:
    loss: torch.Tensor
    samples: int


# --- collectives --------------------------------------------------------------------------------


def reductions(tensor: torch.Tensor, array: NDArray[np.float32], stats: Statistics) -> None:
    assert_type(popdist_py.all_reduce(tensor), torch.Tensor)
    assert_type(popdist_py.all_reduce(array, "mean"), NDArray[np.float32])
    assert_type(popdist_py.all_reduce(1.5), float)
    assert_type(popdist_py.all_reduce(3), int)
    assert_type(popdist_py.all_reduce(3, "mean"), float)
    assert_type(popdist_py.all_reduce(True), int)
    assert_type(popdist_py.all_reduce({"loss": tensor}), dict[str, torch.Tensor])
    assert_type(popdist_py.all_reduce((1.0, [tensor])), tuple[float, list[torch.Tensor]])
    assert_type(popdist_py.all_reduce(stats, op="max", name="statistics"), Statistics)
    handle = popdist_py.all_reduce(tensor, async_op=True)
    assert_type(handle, Handle[torch.Tensor])
    assert_type(handle.wait(), torch.Tensor)
    assert_type(popdist_py.all_reduce(2, "mean", async_op=True).wait(), float)
    assert_type(popdist_py.reduce_scatter(tensor), torch.Tensor)
    assert_type(popdist_py.reduce_scatter(array, async_op=True).wait(), NDArray[np.float32])
    popdist_py.all_reduce(tensor, op="average")  # type: ignore[call-overload]  # pyright: ignore
    print(popdist_py.all_reduce(tensor).losses)  # type: ignore[attr-defined]  # pyright: ignore


def exchanges(tensor: torch.Tensor, names: dict[str, list[str]]) -> None:
    assert_type(popdist_py.broadcast(tensor), torch.Tensor)
    assert_type(popdist_py.broadcast(names, root=1), dict[str, list[str]])
    assert_type(popdist_py.broadcast_object(Path("a")), Path)
    assert_type(popdist_py.broadcast_object(Path("a"), async_op=True).wait(), Path)
    assert_type(popdist_py.all_gather(tensor), list[torch.Tensor])
    assert_type(popdist_py.all_gather(3), list[int])
    assert_type(popdist_py.all_gather_object(names), list[dict[str, list[str]]])
    assert_type(popdist_py.gather(tensor), list[torch.Tensor] | None)
    assert_type(popdist_py.gather_object("a", async_op=True).wait(), list[str] | None)
    popdist_py.broadcast(tensor, root="first")  # type: ignore[call-overload]  # pyright: ignore
    for each in popdist_py.gather(tensor):  # type: ignore[union-attr]  # pyright: ignore
        each.sum()


# --- PopTorch -----------------------------------------------------------------------------------


def training(model: torch.nn.Module, data: torch.utils.data.Dataset[Any]) -> None:
    options = poptorch.Options()
    options.deviceIterations(4).replicationFactor(2)
    assert_type(options, poptorch.Options)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    trained = poptorch.trainingModel(model, options=options, optimizer=optimizer)
    assert_type(trained, poptorch.PoplarExecutor)
    assert_type(poptorch.inferenceModel(model), poptorch.PoplarExecutor)
    loader = poptorch.DataLoader(options, data, batch_size=4, shuffle=True)
    assert_type(len(loader), int)
    assert_type(iter(loader), Iterator[Any])
    for images, labels in loader:
        trained(images, labels)
    trained.setOptimizer(0.1)  # type: ignore[arg-type]  # pyright: ignore


# --- launches -----------------------------------------------------------------------------------


def configurations() -> None:
    config = LaunchConfig.from_file("job.toml", num_instances=2)
    assert_type(config, LaunchConfig)
    changed = config.replace(program=["train.py", "--lr", 0.1], hosts=["a", "b:2"], env={"X": 1})
    assert_type(changed, LaunchConfig)
    config.replace(num_instances="two")  # type: ignore[arg-type]  # pyright: ignore
    config.replace(num_instnces=2)  # type: ignore[call-arg]  # pyright: ignore
    config.replace(output="loud")  # type: ignore[arg-type]  # pyright: ignore
    assert_type(poprun_py.plan(config), LaunchPlan)


def results(config: LaunchConfig) -> None:
    result = poprun_py.launch(config)
    assert_type(result, LaunchResult)
    assert_type(poprun_py.launch(poprun_py.plan(config)), LaunchResult)
    assert_type(result.raise_for_failure(), LaunchResult)
    assert_type(result.instances, tuple[InstanceResult, ...])
    try:
        result.raise_for_failure()
    except JobFailedError as error:
        assert_type(error.exit_code, int)


def train(rate: float, *, steps: int = 1) -> dict[str, float]:
    return {"loss": rate * steps}


def programs() -> None:
    result = poprun_py.launch(["train.py", "--lr", 0.1, Path("data")], num_instances=2, timeout=60)
    assert_type(result, LaunchResult)
    poprun_py.launch(["train.py"], num_instances="two")  # type: ignore[call-overload]  # pyright: ignore
    poprun_py.launch(["train.py", None])  # type: ignore[list-item]  # pyright: ignore


def functions() -> None:
    values = poprun_py.launch(train, args=(0.1,), kwargs={"steps": 2}, num_instances=4)
    assert_type(values, list[dict[str, float]])
    assert_type(poprun_py.launch(lambda: 3, num_replicas=8, num_instances=2), list[int])


async def handles() -> None:
    job = poprun_py.start(train, args=(0.1,), hosts=["a", "b:2"], env={"X": "1"})
    assert_type(job, JobHandle[list[dict[str, float]]])
    assert_type(job.result(timeout=60), list[dict[str, float]])
    assert_type(await job, list[dict[str, float]])
    assert_type(job.wait(), LaunchResult)
    assert_type(job.status(), JobStatus)
    assert_type(job.status().exit_code, int | None)
    assert_type(job.output(1, stream="stderr"), str)
    job.output(stream="log")  # type: ignore[arg-type]  # pyright: ignore
    with poprun_py.start(["train.py"], num_instances=2) as other:
        assert_type(other.result(), LaunchResult)
        other.stop(grace=5)
