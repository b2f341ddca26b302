"""DistributedDataParallel as users write it: parameters after training equal those over gloo."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from frameworks.parity import assert_equal_on_all_ranks, assert_same, found_over_both, run_programs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.trainers


class _Branches(nn.Module):
    """Uses one of two branches in each step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(20, 30)
        self.left = nn.Linear(30, 5)
        self.right = nn.Linear(30, 5)

    def forward(self, x, left=True):
        hidden = self.body(x).relu()
        return (self.left if left else self.right)(hidden)


def _plain_model():
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(),
                         nn.Linear(30, 5))  # fmt: skip


def _batch(rank, step, rows=8):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 20, generator=generator)


def _loss(output):
    return output.float().square().mean()


def _train(rank, model, steps=3, optimizer=None, **forward):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model(_batch(rank, step), **forward)).backward()
        optimizer.step()
    return [parameter.data for parameter in model.parameters()]


def plain(rank):
    return _train(rank, DistributedDataParallel(_plain_model(), gradient_as_bucket_view=False))


def bucket_views(rank):
    return _train(rank, DistributedDataParallel(_plain_model(), gradient_as_bucket_view=True))


def many_buckets(rank):
    model = DistributedDataParallel(_plain_model(), bucket_cap_mb=0.001)
    return _train(rank, model)


def gradients_set_to_zeros(rank):
    model = DistributedDataParallel(_plain_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        _loss(model(_batch(rank, step))).backward()
        optimizer.step()
    return [parameter.data for parameter in model.parameters()]


def unused_parameters(rank):
    model = DistributedDataParallel(_Branches(), find_unused_parameters=True)
    _train(rank, model, left=rank == 0)
    return _train(rank, model, left=False)


def static_graph(rank):
    model = DistributedDataParallel(_Branches(), static_graph=True)
    return _train(rank, model)


def accumulated_gradients(rank):
    model = DistributedDataParallel(_plain_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        inside = step % 3 < 2
        with model.no_sync() if inside else contextlib.nullcontext():
            _loss(model(_batch(rank, step))).backward()
        if not inside:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.data for parameter in model.parameters()]


def clipped_gradients(rank):
    model = DistributedDataParallel(_plain_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        _loss(model(_batch(rank, step))).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return [*norms, *(parameter.data for parameter in model.parameters())]


def mixed_dtypes(rank):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.single = nn.Linear(20, 30)
            self.as_double = nn.Linear(30, 10, dtype=torch.float64)
            self.as_bfloat16 = nn.Linear(10, 5, dtype=torch.bfloat16)
            self.as_half = nn.Linear(5, 5, dtype=torch.float16)

        def forward(self, x):
            x = self.as_double(self.single(x).double())
            return self.as_half(self.as_bfloat16(x.bfloat16()).half())

    return _train(rank, DistributedDataParallel(Mixed()))


def mixed_precision(rank):
    model = DistributedDataParallel(_plain_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = _loss(model(_batch(rank, step)))
        loss.backward()
        optimizer.step()
    return [parameter.data for parameter in model.parameters()]


def complex_parameters(rank):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(20, 5, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).abs()

    return _train(rank, DistributedDataParallel(Complex()))


def buffers_of_rank_0(rank):
    model = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    with torch.no_grad():
        model[0].weight.add_(rank)  # rank 0 decides what all begin with
    model = DistributedDataParallel(model)
    _train(rank, model, steps=4)
    model.eval()
    model(_batch(0, 0))
    return list(model.state_dict().values())


def checkpointed_activations(rank):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = _plain_model()
            self.head = nn.Linear(5, 5)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    return _train(rank, DistributedDataParallel(Checkpointed()))


def reentrant_checkpoints(rank):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(20, 20)
            self.body = _plain_model()

        def forward(self, x):
            return checkpoint(self.body, self.first(x), use_reentrant=True)

    return _train(rank, DistributedDataParallel(Checkpointed(), static_graph=True))


def _with_hook(rank, state, hook, **options):
    model = DistributedDataParallel(_plain_model(), **options)
    model.register_comm_hook(state, hook)
    return _train(rank, model)


def hook_all_reduce(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return _with_hook(rank, None, allreduce_hook)


def hook_half_precision(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return _with_hook(rank, None, fp16_compress_hook)


def hook_power_sgd(rank):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model = DistributedDataParallel(_plain_model())
    model.register_comm_hook(state, power.powerSGD_hook)
    return _train(rank, model, steps=5)


def hook_post_local_sgd(rank):
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(_plain_model())
    state = local.PostLocalSGDState(None, dist.new_group([rank]), start_localSGD_iter=2)
    model.register_comm_hook(state, local.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        PeriodicModelAverager(period=2, warmup_steps=2),
    )
    return _train(rank, model, steps=5, optimizer=optimizer)


def hook_in_cpp(rank):
    model = DistributedDataParallel(_plain_model(), gradient_as_bucket_view=True)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return _train(rank, model)


def hook_of_a_user(rank):
    def gather_and_add(group, bucket):
        parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size(group))]
        work = dist.all_gather(parts, bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda _: torch.stack(parts).mean(0))

    return _with_hook(rank, dist.group.WORLD, gather_and_add)


def hook_of_chained_calls(rank):
    def scatter_and_gather(group, bucket):
        size = dist.get_world_size(group)
        padded = nn.functional.pad(bucket.buffer(), (0, -bucket.buffer().numel() % size))
        own = padded.chunk(size)[rank].clone()
        first = dist.all_reduce(padded, group=group, async_op=True).get_future()

        def gather(_):
            own.copy_(padded.chunk(size)[rank] / size)
            whole = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(whole, own, group=group)
            return torch.cat(whole)[: bucket.buffer().numel()]

        return first.then(gather)

    return _with_hook(rank, dist.group.WORLD, scatter_and_gather)


def uneven_inputs(rank):
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(_plain_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            _loss(model(_batch(rank, step))).backward()
            optimizer.step()
    return [parameter.data for parameter in model.parameters()]


def uneven_inputs_throw(rank):
    model = DistributedDataParallel(_plain_model())
    done = 0
    try:
        with model.join(throw_on_early_termination=True):
            for step in range(3 + 2 * rank):
                _loss(model(_batch(rank, step))).backward()
                done += 1
    except RuntimeError as error:
        return [done, "Detected at least one rank" in str(error)]
    return [done, False]


def two_models_on_groups(rank):
    first = DistributedDataParallel(_plain_model(), process_group=dist.new_group())
    second = DistributedDataParallel(_plain_model(), process_group=dist.new_group())
    first_optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    second_optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    for step in range(3):
        batch = _batch(rank, step)
        (_loss(first(batch)) + _loss(second(batch))).backward()
        first_optimizer.step()
        second_optimizer.step()
    return [parameter.data for model in (first, second) for parameter in model.parameters()]


def distributed_sampler(rank):
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    data = TensorDataset(torch.randn(37, 20, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data, shuffle=True)
    model = DistributedDataParallel(_plain_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (rows,) in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            _loss(model(rows)).backward()
            optimizer.step()
    return [parameter.data for parameter in model.parameters()]


def logged(rank):
    model = DistributedDataParallel(_plain_model())
    _train(rank, model)
    data = model._get_ddp_logging_data()
    return [data["world_size"], data["backend_name"] == dist.get_backend()]


_PROGRAMS = (
    plain, bucket_views, many_buckets, gradients_set_to_zeros, unused_parameters, static_graph,
    accumulated_gradients, clipped_gradients, mixed_dtypes, mixed_precision, complex_parameters,
    buffers_of_rank_0, checkpointed_activations, reentrant_checkpoints, hook_all_reduce,
    hook_half_precision, hook_power_sgd,     hook_post_local_sgd, hook_in_cpp, hook_of_a_user,
    hook_of_chained_calls, uneven_inputs, uneven_inputs_throw, two_models_on_groups,
    distributed_sampler, logged,
)  # fmt: skip
_NAMES = [program.__name__ for program in _PROGRAMS]
# What a rank keeps for itself.
_OF_ONE_RANK = {"uneven_inputs_throw"}


def _all_programs(rank, folder):
    return run_programs(rank, 2, folder, _PROGRAMS)


@pytest.fixture(scope="module")
def found():
    return found_over_both(2, _all_programs)


@pytest.mark.parametrize("name", _NAMES)
def test_training_ends_with_what_it_ends_with_over_gloo(found, name):
    assert_same(found, name)
    if name not in _OF_ONE_RANK:
        assert_equal_on_all_ranks(found, name)
