"""Models and optimizers whose parameters are spread over ranks: FSDP, FSDP2, ZeRO, checkpoints."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from frameworks.parity import assert_equal_on_all_ranks, assert_same, found_over_both, run_programs
from torch import nn

pytestmark = pytest.mark.trainers


def _model():
    return nn.Sequential(nn.Linear(21, 30), nn.ReLU(), nn.Linear(30, 31), nn.ReLU(),
                         nn.Linear(31, 5))  # fmt: skip


def _batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 21, generator=generator)


def _train(rank, model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        model(_batch(rank, step)).float().square().mean().backward()
        optimizer.step()


def _folder(rank):
    """Return a folder that all ranks share."""
    found = [tempfile.mkdtemp(prefix="frameworks-") if rank == 0 else None]
    dist.broadcast_object_list(found)
    return Path(found[0])


# --- FullyShardedDataParallel ---------------------------------------------------------------------


def _fsdp(rank, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        _model(),
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        **options,
    )
    _train(rank, model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return model


def _full_state(model):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found = [state]  # full on rank 0 alone
    dist.broadcast_object_list(found)
    return found[0]


def fsdp_full_shard(rank):
    return _full_state(_fsdp(rank, use_orig_params=True))


def fsdp_flat_parameters(rank):
    return _full_state(_fsdp(rank, use_orig_params=False))


def fsdp_shard_gradients(rank):
    from torch.distributed.fsdp import ShardingStrategy

    return _full_state(_fsdp(rank, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))


def fsdp_no_shard(rank):
    from torch.distributed.fsdp import ShardingStrategy

    return _full_state(_fsdp(rank, sharding_strategy=ShardingStrategy.NO_SHARD))


def fsdp_mixed_precision(rank):
    from torch.distributed.fsdp import MixedPrecision

    kinds = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return _full_state(_fsdp(rank, mixed_precision=kinds))


def fsdp_sharded_state(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = _fsdp(rank)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
        model.load_state_dict(state)
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def fsdp_accumulated_and_clipped(rank):
    model = _fsdp(rank)
    with model.no_sync():
        model(_batch(rank, 7)).sum().backward()
    model(_batch(rank, 8)).sum().backward()
    norm = model.clip_grad_norm_(0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [norm, _full_state(model)]


def fsdp_optimizer_state(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    model = Fsdp(_model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(rank, model, optimizer)
    full = Fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
    saved = copy.deepcopy(full["state"])  # the optimizer goes on with these tensors
    own = Fsdp.shard_full_optim_state_dict(full, model)
    optimizer.load_state_dict(own)
    _train(rank, model, optimizer)
    return [_full_state(model), saved]


# --- FSDP2 ----------------------------------------------------------------------------------------


def _fsdp2(rank, mesh=None, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2(rank):
    model = _fsdp2(rank)
    _train(rank, model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return _full_state(model)


def fsdp2_kept_after_forward(rank):
    model = _fsdp2(rank, reshard_after_forward=False)
    _train(rank, model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return _full_state(model)


def fsdp2_mixed_precision(rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _fsdp2(rank, mp_policy=policy)
    _train(rank, model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return _full_state(model)


def fsdp2_accumulated_and_clipped(rank):
    model = _fsdp2(rank)
    model.set_requires_gradient_sync(False)
    model(_batch(rank, 7)).sum().backward()
    model.set_requires_gradient_sync(True)
    model(_batch(rank, 8)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [norm, _full_state(model)]


# --- ZeroRedundancyOptimizer ----------------------------------------------------------------------


def _zero(rank, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, **options
    )
    return model, optimizer


def zero(rank):
    model, optimizer = _zero(rank)
    _train(rank, model, optimizer)
    return [parameter.data for parameter in model.parameters()]


def zero_in_one_bucket(rank):
    model, optimizer = _zero(rank, parameters_as_bucket_view=True)
    _train(rank, model, optimizer)
    return [parameter.data for parameter in model.parameters()]


def zero_saved(rank):
    model, optimizer = _zero(rank)
    _train(rank, model, optimizer)
    optimizer.consolidate_state_dict(to=1)
    found = [optimizer.state_dict() if rank == 1 else None]
    dist.broadcast_object_list(found, src=1)
    saved = copy.deepcopy(found[0]["state"])  # the optimizer goes on with these tensors
    optimizer.load_state_dict(found[0])
    _train(rank, model, optimizer)
    return [saved, [parameter.data for parameter in model.parameters()]]


def zero_uneven_inputs(rank):
    from torch.distributed.algorithms.join import Join

    model, optimizer = _zero(rank)
    with Join([model, optimizer]):
        _train(rank, model, optimizer, steps=2 + rank)
    return [parameter.data for parameter in model.parameters()]


# --- Checkpoints ----------------------------------------------------------------------------------


def checkpoint_of_fsdp2(rank):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = _folder(rank)
    model = _fsdp2(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(rank, model, optimizer)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder / "saved")
    torch.manual_seed(8)
    other = _fsdp2(rank)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    state, optimizer_state = get_state_dict(other, other_optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder / "saved")
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    _train(rank, other, other_optimizer)
    return _full_state(other)


def checkpoint_saved_meanwhile(rank):
    import torch.distributed.checkpoint as dcp

    folder = _folder(rank)
    model = _fsdp2(rank)
    group = dist.new_group(backend=dist.get_backend())
    saved = {"model": model.state_dict()}
    future = dcp.async_save(saved, checkpoint_id=folder / "saved", process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(rank, model, optimizer)
    future.result()
    dcp.load(loaded := {"model": model.state_dict()}, checkpoint_id=folder / "saved")
    return loaded


def checkpoint_resharded(rank):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

    folder = _folder(rank)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(63.0).view(7, 9)
    dcp.save(
        {"values": distribute_tensor(values, mesh, [Shard(0)])}, checkpoint_id=folder / "saved"
    )
    by_column = {"values": zeros(7, 9, device_mesh=mesh, placements=[Shard(1)])}
    dcp.load(by_column, checkpoint_id=folder / "saved")
    whole = {"values": zeros(7, 9, device_mesh=mesh, placements=[Replicate()])}
    dcp.load(whole, checkpoint_id=folder / "saved")
    return [by_column["values"].full_tensor(), whole["values"].to_local()]


# --- Tensors on a mesh ----------------------------------------------------------------------------


def tensors_on_a_mesh(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(40.0).view(8, 5)
    by_row = distribute_tensor(values, mesh, [Shard(0)])
    by_column = by_row.redistribute(placements=[Shard(1)])
    product = by_row @ distribute_tensor(values.T.contiguous(), mesh, [Replicate()])
    partial = by_column @ distribute_tensor(values.T.contiguous(), mesh, [Shard(0)])
    assert partial.placements == (Partial(),)
    return [by_column, product, partial, by_row.sum(), by_row.mean(0), by_row.max()]


def tensor_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.LayerNorm(21), nn.Linear(21, 32), nn.ReLU(), nn.Linear(32, 6))
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(_batch(0, step)).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


_PROGRAMS = (
    fsdp_full_shard, fsdp_flat_parameters, fsdp_shard_gradients, fsdp_no_shard,
    fsdp_mixed_precision, fsdp_sharded_state,
    fsdp_accumulated_and_clipped, fsdp_optimizer_state, fsdp2, fsdp2_kept_after_forward,
    fsdp2_mixed_precision, fsdp2_accumulated_and_clipped, zero, zero_in_one_bucket, zero_saved,
    zero_uneven_inputs, checkpoint_of_fsdp2, checkpoint_saved_meanwhile, checkpoint_resharded,
    tensors_on_a_mesh, tensor_parallel,
)  # fmt: skip


def _all_programs(rank, folder):
    return run_programs(rank, 2, folder, _PROGRAMS)


@pytest.fixture(scope="module")
def found():
    return found_over_both(2, _all_programs)


@pytest.mark.parametrize("name", [program.__name__ for program in _PROGRAMS])
def test_training_ends_with_what_it_ends_with_over_gloo(found, name):
    assert_same(found, name)
    assert_equal_on_all_ranks(found, name)
