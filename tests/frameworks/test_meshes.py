"""Four ranks in meshes and pipelines: hybrid sharding, two kinds of parallelism, stages."""

import pytest
import torch
import torch.distributed as dist
from frameworks.parity import assert_equal_on_all_ranks, assert_same, found_over_both, run_programs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.trainers


def _model():
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))


def _batch(seed):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def _train(model, optimizer, seed):
    for step in range(3):
        optimizer.zero_grad()
        model(_batch(10 * step + seed)).square().mean().backward()
        optimizer.step()


def hybrid_fsdp(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp import ShardingStrategy

    model = Fsdp(
        _model(),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")),
        use_orig_params=True,
    )
    _train(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank)
    with Fsdp.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def hybrid_fsdp2(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(_model(), mesh=mesh)
    _train(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank)
    return list(model.parameters())


def sharded_and_tensor_parallel(rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = _model()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    _train(model, torch.optim.AdamW(model.parameters(), lr=0.01), mesh["data"].get_local_rank())
    return list(model.parameters())


def tensors_on_two_dimensions(rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    values = torch.arange(45.0).view(9, 5)
    given = distribute_tensor(values, mesh, [Shard(0), Shard(1)])
    return [
        given,
        given.redistribute(placements=[Shard(1), Shard(0)]),
        given.redistribute(placements=[Replicate(), Replicate()]),
        given.sum(),
    ]


def _pipeline(rank, schedule):
    from torch.distributed.pipelining import PipelineStage

    layers = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)]
    module = layers[rank]
    stage = PipelineStage(module, rank, 4, torch.device("cpu"))
    run = schedule(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    target = torch.ones(8, 8)
    for step in range(3):
        optimizer.zero_grad()
        if rank == 0:
            run.step(_batch(step))
        elif rank == 3:
            run.step(target=target, losses=[])
        else:
            run.step()
        optimizer.step()
    found = [None] * 4
    dist.all_gather_object(found, module.state_dict())
    return found


def pipeline_in_turns(rank):
    from torch.distributed.pipelining import Schedule1F1B

    return _pipeline(rank, Schedule1F1B)


def pipeline_as_gpipe(rank):
    from torch.distributed.pipelining import ScheduleGPipe

    return _pipeline(rank, ScheduleGPipe)


_PROGRAMS = (
    hybrid_fsdp, hybrid_fsdp2, sharded_and_tensor_parallel, tensors_on_two_dimensions,
    pipeline_in_turns, pipeline_as_gpipe,
)  # fmt: skip


def _all_programs(rank, folder):
    return run_programs(rank, 4, folder, _PROGRAMS)


@pytest.fixture(scope="module")
def found():
    return found_over_both(4, _all_programs)


@pytest.mark.parametrize("name", [program.__name__ for program in _PROGRAMS])
def test_four_ranks_end_with_what_they_end_with_over_gloo(found, name):
    # Sums of four depend on their order.
    assert_same(found, name, exact=False)
    assert_equal_on_all_ranks(found, name)
