"""Checks of ``horovod.torch`` for any number of ranks, and a program that runs all checks."""

from __future__ import annotations

import copy
import functools
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import popdist_py
from popdist_py.horovod import torch as hvd
from popdist_py.horovod.torch.calls import Call

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.uint8, torch.int8, torch.int32, torch.int64]
# Ranks add up the gradients of a batch in another order than one process does.
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def ranks():
    return range(hvd.size())


def of_rank(rank, shape=(3, 5), dtype=torch.float32):
    values = torch.arange(np.prod(shape)).reshape(shape)
    return ((values + rank) % 7).to(dtype)


def check_place():
    assert hvd.is_initialized()
    hvd.init()  # a second call does nothing
    assert hvd.rank() == popdist_py.getInstanceIndex()
    assert hvd.size() == popdist_py.getNumInstances()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.mpi_built()
    assert hvd.mpi_enabled() == (hvd.size() > 1)
    others = (hvd.gloo_built, hvd.gloo_enabled, hvd.nccl_built, hvd.cuda_built, hvd.rocm_built)
    assert not any(built() for built in others)
    assert isinstance(hvd.mpi_threads_supported(), bool)
    assert hvd.global_process_set.ranks == list(ranks())
    hvd.barrier()
    assert hvd.join() == hvd.size() - 1


def check_allreduce():
    for dtype in FLOATS + WHOLE:
        everyone = [of_rank(i, dtype=dtype) for i in ranks()]
        total = torch.stack([x.double() for x in everyone]).sum(0)
        x = of_rank(hvd.rank(), dtype=dtype)
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum), total.to(dtype))
        assert torch.equal(x, of_rank(hvd.rank(), dtype=dtype))
        mean = total / hvd.size()
        mean = mean.to(dtype) if dtype.is_floating_point else mean.trunc().to(dtype)
        assert torch.equal(hvd.allreduce(x), mean), dtype
        for op, function in ((hvd.Min, torch.amin), (hvd.Max, torch.amax)):
            expected = function(torch.stack(everyone), 0)
            assert torch.equal(hvd.allreduce(x, op=op), expected), (dtype, op)
        assert torch.equal(hvd.allreduce(x, op=hvd.Product), functools.reduce(torch.mul, everyone))
        assert hvd.allreduce_(x, op=hvd.Sum) is x
        assert torch.equal(x, total.to(dtype))


def check_scaling_and_names():
    x = torch.full((4,), hvd.rank() + 1.0)
    total = sum(i + 1.0 for i in ranks())
    scaled = hvd.allreduce(x, op=hvd.Sum, name="x", prescale_factor=0.5, postscale_factor=4.0)
    assert torch.equal(scaled, torch.full((4,), total * 2))
    whole = hvd.allreduce(torch.tensor([3]), op=hvd.Sum, prescale_factor=0.5)
    assert whole.item() == hvd.size()  # each rank rounds 1.5 down to 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(hvd.allreduce(x, average=False), torch.full((4,), total))
        assert torch.equal(hvd.allreduce(x, True), torch.full((4,), total / hvd.size()))
        hvd.synchronize(hvd.allreduce_async(x, True))
        hvd.grouped_allreduce_([x.clone()], True)
    assert [(w.category, w.filename) for w in caught] == [(DeprecationWarning, __file__)] * 4
    half = hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert half.dtype is torch.float32
    assert torch.equal(half, torch.full((4,), total))
    scalar = hvd.allreduce(torch.tensor(float(hvd.rank())))
    assert scalar.shape == ()
    assert scalar.item() == (hvd.size() - 1) / 2
    column = torch.zeros(3, 2)
    column[:, 0] = hvd.rank()
    hvd.allreduce_(column[:, 0], op=hvd.Sum)  # this view is not contiguous
    assert column.tolist() == [[float(sum(ranks())), 0.0]] * 3


def check_handles():
    tensors = [torch.full((n,), float(hvd.rank())) for n in (1, 10, 100_000)]
    handles = [hvd.allreduce_async(x, name=f"t{len(x)}", op=hvd.Sum) for x in tensors]
    for x, handle in zip(tensors, handles, strict=True):
        result = hvd.synchronize(handle)
        assert hvd.poll(handle)
        assert hvd.synchronize(handle) is result
        assert torch.equal(result, torch.full_like(x, float(sum(ranks()))))
        assert x[0].item() == hvd.rank()
    x = tensors[0]
    assert hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Sum)) is x
    assert hvd.synchronize(hvd.allgather_async(torch.tensor([hvd.rank()]))).tolist() == [*ranks()]
    assert hvd.synchronize(hvd.broadcast_async(torch.tensor(hvd.rank()), hvd.size() - 1)) == (
        hvd.size() - 1
    )
    received = hvd.synchronize(hvd.alltoall_async(torch.full((hvd.size(),), hvd.rank())))
    assert received.tolist() == [*ranks()]
    rows = hvd.synchronize(hvd.reducescatter_async(torch.arange(hvd.size()), op=hvd.Sum))
    assert rows.tolist() == [hvd.rank() * hvd.size()]


def check_groups():
    pair = [torch.full((2,), float(hvd.rank())), torch.full((3, 1), 1.0)]
    total = float(sum(ranks()))
    first, second = hvd.grouped_allreduce(pair, op=hvd.Sum, name="pair")
    assert first.tolist() == [total] * 2
    assert second.tolist() == [[float(hvd.size())]] * 3
    assert pair[1].tolist() == [[1.0]] * 3
    assert hvd.grouped_allreduce_(pair, op=hvd.Sum)[0] is pair[0]
    assert pair[0].tolist() == [total] * 2
    results = hvd.synchronize(hvd.grouped_allreduce_async(pair))
    assert [x.tolist() for x in results] == [x.tolist() for x in pair]
    gathered = hvd.grouped_allgather([torch.tensor([hvd.rank()]), torch.zeros(2, 3)])
    assert gathered[0].tolist() == [*ranks()]
    assert gathered[1].shape == (2 * hvd.size(), 3)
    assert hvd.synchronize(hvd.grouped_allgather_async([torch.zeros(1)]))[0].shape == (hvd.size(),)
    rows = [torch.ones(2 * hvd.size(), 3)]
    assert hvd.grouped_reducescatter(rows, op=hvd.Sum)[0].tolist() == [[float(hvd.size())] * 3] * 2
    assert torch.equal(hvd.synchronize(hvd.grouped_reducescatter_async(rows))[0], torch.ones(2, 3))


def check_allgather():
    for dtype in [*FLOATS, *WHOLE, torch.bool]:
        x = of_rank(hvd.rank(), (hvd.rank() + 1, 2), dtype)
        expected = torch.cat([of_rank(i, (i + 1, 2), dtype) for i in ranks()])
        assert torch.equal(hvd.allgather(x, name="rows"), expected), dtype
    repeated = torch.tensor([hvd.rank()]).expand(2)
    assert hvd.allgather(repeated).tolist() == [i for i in ranks() for _ in range(2)]
    only_last = torch.zeros(2 if hvd.rank() == hvd.size() - 1 else 0, 3)
    assert hvd.allgather(only_last).shape == (2, 3)


def check_broadcast():
    for dtype in [*FLOATS, *WHOLE, torch.bool]:
        for root in {0, hvd.size() - 1}:
            x = of_rank(hvd.rank(), dtype=dtype)
            assert torch.equal(hvd.broadcast(x, root), of_rank(root, dtype=dtype))
            assert torch.equal(x, of_rank(hvd.rank(), dtype=dtype))
            assert hvd.broadcast_(x, root_rank=root, name="x") is x
            assert torch.equal(x, of_rank(root, dtype=dtype))


def check_alltoall():
    size, me = hvd.size(), hvd.rank()
    equal = torch.arange(2 * size) + 100 * me
    expected = torch.cat([100 * i + torch.arange(2 * me, 2 * me + 2) for i in ranks()])
    assert torch.equal(hvd.alltoall(equal), expected)
    # Rank i sends r + i rows to rank r.
    splits = torch.tensor([r + me for r in ranks()])
    x = torch.repeat_interleave(torch.arange(size), splits).unsqueeze(1) + 100.0 * me
    rows, received = hvd.alltoall(x, splits)
    assert received.dtype is torch.int32
    assert received.tolist() == [me + i for i in ranks()]
    assert rows.squeeze(1).tolist() == [100 * i + me for i in ranks() for _ in range(me + i)]
    with pytest.raises(ValueError, match="add up to"):
        hvd.alltoall(x, [0] * size if len(x) else [1] * size)
    for floats in (splits + 0.9, splits.double(), [float(n) for n in splits]):
        with pytest.raises(ValueError, match=r"splits=\[.*: expected an integer for each rank"):
            hvd.alltoall(x, floats)


def check_reducescatter():
    size, me = hvd.size(), hvd.rank()
    x = torch.arange(2.0 * size + 1).unsqueeze(1) + me  # the first rank has one row more
    total = torch.arange(2.0 * size + 1).unsqueeze(1) * size + sum(ranks())
    first = 2 * me + min(me, 1)
    own = slice(first, first + (3 if me == 0 else 2))
    assert torch.equal(hvd.reducescatter(x, op=hvd.Sum), total[own])
    torch.testing.assert_close(hvd.reducescatter(x), total[own] / size)


def check_sparse():
    reduce_sparse()


def reduce_sparse():
    def of(rank):
        shape = (hvd.size() + 1,)
        indices = torch.tensor([[0, rank]], device="cpu")
        return torch.sparse_coo_tensor(
            indices, torch.tensor([1.0, 2.0], device="cpu"), shape, device="cpu",
            check_invariants=True,
        )  # fmt: skip

    x = of(hvd.rank())
    total = hvd.sparse_allreduce_async(x, "x", hvd.Sum)()
    expected = sum(of(i).to_dense() for i in ranks())
    assert torch.equal(total.to_dense(), expected)
    mean = hvd.sparse_allreduce_async(x, None, hvd.Average)()
    torch.testing.assert_close(mean.to_dense(), expected / hvd.size())


def check_names_of_calls_that_run():
    """A program may use a name again once its call is complete. A name is optional."""
    x = torch.ones(3)
    begin = threading.Event()
    waiting = Call(popdist_py.context.communicator(), "", begin.wait, lambda _: None).start()
    handles = [hvd.allreduce_async(x, name="x"), hvd.allgather_async(x, name="x")]
    handles += [hvd.broadcast_async(x, 0, name="x"), hvd.alltoall_async(x[:0], name="x")]
    handles += [hvd.grouped_allreduce_async([x, x], name="y"), hvd.reducescatter_async(x, "z")]
    for again in (
        lambda: hvd.allreduce_async(x, name="x"),
        lambda: hvd.allreduce(x, name="x"),
        lambda: hvd.allgather_async(x, name="x"),
        lambda: hvd.broadcast_async_(x, 0, name="x"),
        lambda: hvd.alltoall_async(x[:0], name="x"),
        lambda: hvd.grouped_allreduce_async([x, x], name="y"),
        lambda: hvd.reducescatter_async(x, "z"),
    ):
        with pytest.raises(ValueError, match="with the same name as another tensor that is cur"):
            again()
    for _ in range(2):
        handles += [hvd.allreduce_async(x), hvd.grouped_allreduce_async([x, x])]
        handles += [hvd.grouped_allgather_async([x, x])]
    begin.set()
    for handle in (waiting, *handles):
        hvd.synchronize(handle)
    assert torch.equal(hvd.synchronize(hvd.allreduce_async(x, name="x")), x)


def check_rejected_calls_change_no_tensor():
    x = torch.ones(3)
    begin = threading.Event()
    waiting = Call(popdist_py.context.communicator(), "", begin.wait, lambda _: None).start()
    handle = hvd.allreduce_async(x, name="x")
    with pytest.raises(ValueError, match="with the same name"):
        hvd.allreduce_async_(x, name="x", prescale_factor=0.5)
    ones = torch.ones(hvd.size())
    others = hvd.reducescatter_async(ones, name="x", op=hvd.Sum, prescale_factor=0.5)
    begin.set()
    for each in (waiting, handle, others):
        hvd.synchronize(each)
    with pytest.raises(TypeError, match="of booleans"):
        hvd.grouped_allreduce_([x, torch.tensor([True])], prescale_factor=0.5)
    with pytest.raises(ValueError, match="whose elements share memory"):
        hvd.grouped_allreduce_([x, torch.ones(1).expand(2)], prescale_factor=0.5)
    assert x.tolist() == [1.0] * 3


def check_another_default_device():
    with torch.device("meta"):
        reduce_sparse()


def check_gradients():
    size, me = hvd.size(), hvd.rank()
    weights = torch.arange(4.0)

    def gradient_of(function, rows=4):
        x = torch.ones(rows, requires_grad=True)
        y = function(x)
        (y * torch.arange(float(len(y))) * (me + 1)).sum().backward()
        return x.grad

    factors = sum(i + 1 for i in ranks())
    assert torch.equal(gradient_of(lambda x: hvd.allreduce(x, op=hvd.Sum)), weights * factors)
    close = torch.testing.assert_close
    close(gradient_of(hvd.allreduce), weights * factors / size)
    close(gradient_of(lambda x: hvd.grouped_allreduce([x])[0]), weights * factors / size)
    gathered = torch.arange(float(4 * size))[4 * me : 4 * me + 4] * factors / size
    close(gradient_of(hvd.allgather), gathered)
    sent = weights * factors / size if me == 0 else torch.zeros(4)
    close(gradient_of(lambda x: hvd.broadcast(x, 0)), sent)
    way_back = torch.cat([torch.tensor([me * (i + 1.0)]) for i in ranks()])
    close(gradient_of(hvd.alltoall, size), way_back)
    own = torch.cat([torch.tensor([0.0, 1.0]) * (i + 1) for i in ranks()])
    close(gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum), 2 * size), own * size)
    with pytest.raises(NotImplementedError, match="no gradient"):
        gradient_of(lambda x: hvd.allreduce(x, op=hvd.Max))
    x = torch.ones(2, requires_grad=True)
    y = x * 1.0
    product = y * y
    hvd.allreduce_(y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()  # autograd has noticed that y changed


def check_refusals():
    x = torch.zeros(2)
    with pytest.raises(NotImplementedError, match="op=Adasum is not available in popdist_py"):
        hvd.allreduce(x, op=hvd.Adasum)
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="op=7: expected one of Average, Sum"):
        hvd.allreduce(x, op=7)
    with pytest.raises(TypeError, match=r"allreduce\(0\.5\): expected a torch tensor"):
        hvd.allreduce(0.5)
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, lambda x: hvd.broadcast(x, 0)):
        with pytest.raises(
            TypeError, match=r"expected a dense tensor, got a tensor of layout torch\.sparse_coo"
        ):
            call(torch.zeros(2).to_sparse())
    with pytest.raises(TypeError, match=r"sparse_allreduce_async: .* use allreduce_async"):
        hvd.sparse_allreduce_async(x, "x", hvd.Sum)
    with pytest.raises(TypeError, match=r"op=Average.* of booleans"):
        hvd.allreduce(torch.tensor([True]))
    with pytest.raises(ValueError, match="at least one dimension"):
        hvd.allgather(torch.tensor(1.0))
    with pytest.raises(
        ValueError, match=r"broadcast\(root_rank=99\): expected one of the ranks \[0"
    ):
        hvd.broadcast(x, 99)
    with pytest.raises(ValueError, match=r"broadcast_object\(root_rank=-1\)"):
        hvd.broadcast_object(x, -1)
    optimizer = torch.optim.SGD([nn.Parameter(x)], lr=0.1)
    for call in (hvd.allreduce, hvd.reducescatter, hvd.DistributedOptimizer):
        with pytest.raises(TypeError, match="compression='fp16': expected Compression"):
            call(optimizer if call is hvd.DistributedOptimizer else x, compression="fp16")
    for call in (hvd.DistributedOptimizer, hvd.broadcast_optimizer_state):
        with pytest.raises(TypeError, match=f"{call.__name__}: expected an optimizer"):
            call(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="expected global_process_set"):
        hvd.allreduce(x, process_set=[0])
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters(x)
    with pytest.raises(ValueError, match="without arguments"):
        hvd.init(comm=[0])
    with pytest.raises(
        AttributeError,
        match=r"elastic of Horovod is not available in popdist_py: .* --max-restarts",
    ):
        _ = hvd.elastic
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        _ = hvd.no_such
    with pytest.raises(
        ValueError, match=r"broadcast\(root_rank=0\.0\): expected one of the ranks \[0"
    ):
        hvd.broadcast(x, 0.0)
    if hvd.size() > 1:
        for call in (
            hvd.allreduce,
            lambda *_, name: hvd.synchronize(hvd.allreduce_async(x, name=name)),
            hvd.allgather,
            hvd.broadcast_object,
            hvd.allgather_object,
        ):
            with pytest.raises(popdist_py.CollectiveMismatchError, match="name='r0'") as info:
                call(x, name=f"r{hvd.rank()}")
            assert isinstance(info.value, hvd.HorovodInternalError)
            assert issubclass(hvd.HorovodInternalError, RuntimeError)
        uneven = "called join.*same number of batches"
        with pytest.raises(
            (RuntimeError, popdist_py.CollectiveMismatchError), match="join"
        ) as info:
            hvd.join() if hvd.rank() == 0 else hvd.allreduce(x)
        if hvd.rank() == 0:
            info.match(uneven)


def check_objects():
    everyone = hvd.allgather_object({"rank": hvd.rank(), "text": "x" * hvd.rank()})
    assert everyone == [{"rank": i, "text": "x" * i} for i in ranks()]
    assert hvd.broadcast_object(hvd.rank(), root_rank=hvd.size() - 1) == hvd.size() - 1


def check_parameters():
    torch.manual_seed(hvd.rank())
    expected = model_of(0)
    for form in (lambda m: m.state_dict(), lambda m: m.named_parameters(),
                 lambda m: [*m.named_parameters()], lambda m: [*m.parameters()]):  # fmt: skip
        model = model_of(hvd.rank())
        hvd.broadcast_parameters(form(model), root_rank=0)
        assert all(map(torch.equal, model.parameters(), expected.parameters()))


def check_optimizer_state():
    for kind in (functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam):
        model = model_of(0)
        optimizer = kind(model.parameters(), lr=0.1 if hvd.rank() == 0 else 0.5)
        if hvd.rank() == 0:  # only rank 0 makes a step
            train(model, optimizer, *whole_batch())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        train(model, optimizer, *whole_batch())
        for other in hvd.allgather_object(model.state_dict()):
            assert all(torch.equal(other[name], x) for name, x in model.state_dict().items())
    model = model_of(0)
    hvd.broadcast_optimizer_state(
        torch.optim.SGD(model.parameters(), lr=0.1)
    )  # this optimizer has no state
    assert all(not p.grad.any() for p in model.parameters())
    table = nn.Embedding(4, 2, sparse=True)
    hvd.broadcast_optimizer_state(torch.optim.SparseAdam(table.parameters()))
    assert table.weight.grad.is_sparse
    if hvd.size() > 2:  # ranks 1 and 2 form a group, in which rank 2 has the index 1
        popdist_py.execute_on_instances([1, 2], sent_by_rank_1)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()))


def sent_by_rank_1():
    optimizer = torch.optim.SGD(model_of(0).parameters(), lr=hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 1


# --- DistributedOptimizer -------------------------------------------------------------------------


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def whole_batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return x, x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)


def own_share():
    rows = 12 // hvd.size()
    return tuple(x[hvd.rank() * rows :][:rows] for x in whole_batch())


def train(model, optimizer, x, y, steps=4, passes=1):
    loss = nn.MSELoss()
    for _ in range(steps):
        optimizer.zero_grad()
        for part, target in zip(x.chunk(passes), y.chunk(passes), strict=True):
            loss(model(part), target).backward()
        optimizer.step()


def trained_alone(kind, steps=4, **options):
    model = model_of(0)
    train(model, kind(model.parameters(), **options), *whole_batch(), steps=steps)
    return model


def assert_same_weights(model, other, compare=close):
    for name, x in other.state_dict().items():
        compare(model.state_dict()[name], x)


def check_optimizer_trains_as_on_the_whole_batch():
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01}),
    ):
        for more in ({}, {"gradient_predivide_factor": 2.0}, {"groups": 2}):
            model = model_of(0)
            optimizer = hvd.DistributedOptimizer(
                kind(model.parameters(), **options),
                named_parameters=model.named_parameters(), **more,
            )  # fmt: skip
            assert isinstance(optimizer, kind)
            assert type(optimizer).__name__ == kind.__name__
            train(model, optimizer, *own_share())
            assert_same_weights(model, trained_alone(kind, **options))
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)
    train(model, optimizer, *own_share())
    loose = functools.partial(torch.testing.assert_close, rtol=5e-3, atol=5e-3)
    assert_same_weights(model, trained_alone(torch.optim.SGD, lr=0.1), loose)


def check_optimizer_adds_up_passes():
    # Each pass uses half of the share. The sum of the two gradients is twice their mean, so half
    # of the learning rate gives the same step.
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
    train(model, optimizer, *own_share(), passes=2)
    assert_same_weights(model, trained_alone(torch.optim.SGD, lr=0.1))
    if hvd.size() > 1:
        for _ in range(2):
            model(own_share()[0]).sum().backward()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            model(own_share()[0]).sum().backward()
        with pytest.raises(AssertionError, match="prohibited"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.set_backward_passes_per_step(1)
        optimizer.zero_grad()
        model(own_share()[0]).sum().backward()
        optimizer.step()


def check_optimizer_gradients_can_be_clipped():
    model = model_of(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = own_share()
    nn.MSELoss()(model(x), y).backward()
    optimizer.synchronize()
    alone = model_of(0)
    nn.MSELoss()(alone(whole_batch()[0]), whole_batch()[1]).backward()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        close(ours.grad, expected.grad)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    clipped = [p.grad.clone() for p in model.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    for p, old, gradient in zip(model.parameters(), before, clipped, strict=True):
        close(p.detach(), old - 0.1 * gradient)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def check_optimizer_works_with_what_torch_has():
    model = model_of(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(inner, 1)  # StepLR replaces the ``step`` of the inner optimizer
    inner.state[model[0].weight]["momentum_buffer"] = torch.ones_like(model[0].weight)
    optimizer = hvd.DistributedOptimizer(inner)
    assert optimizer.state is inner.state
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append("pre"))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rate = optimizer.param_groups[0]["lr"]
    train(model, optimizer, *own_share(), steps=1)
    scheduler.step()
    assert steps == ["pre"]
    assert optimizer.param_groups[0]["lr"] == rate / 2
    assert_equal_everywhere(model)

    def closure():
        optimizer.zero_grad()
        loss = nn.MSELoss()(model(own_share()[0]), own_share()[1])
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_equal_everywhere(model)
    extra = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [extra]})
    (extra * hvd.rank()).sum().backward()
    optimizer.step()
    close(extra.grad, torch.full((2,), (hvd.size() - 1) / 2))


def assert_equal_everywhere(model):
    for other in hvd.allgather_object(model.state_dict()):
        for name, x in model.state_dict().items():
            close(other[name], x)


def check_optimizer_reduces_what_some_ranks_do_not_use():
    used = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.SGD([*used, frozen], lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer)
    # Rank 0 uses the first and the last parameter. Other ranks use the second and the first.
    mine = (used[0] * 2 + used[2]) if hvd.rank() == 0 else (used[1] * 3 + used[0] * 2)
    mine.sum().backward()
    optimizer.step()
    size = hvd.size()
    gradients = (2.0, 3.0 * (size - 1) / size, 1.0 / size)
    for parameter, gradient in zip(used, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.full((2,), 1.0 - gradient))
    assert frozen.grad is None


def check_optimizer_follows_what_is_frozen_later_and_no_longer():
    layers, alone = model_of(0), model_of(0)
    layers[0].weight.requires_grad_(False)
    alone[0].weight.requires_grad_(False)
    decaying = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(decaying(layers.parameters()), layers.named_parameters())
    optimizers = (
        (layers, optimizer, own_share()),
        (alone, decaying(alone.parameters()), whole_batch()),
    )
    for model, its, (x, y) in optimizers:
        train(model, its, x, y, steps=1)
        model[0].weight.requires_grad_(True)
        train(model, its, x, y, steps=2)
        its.zero_grad()
        model[0].weight.requires_grad_(False)
        train(model, its, x, y, steps=1)
    assert_same_weights(layers, alone)


def check_optimizer_takes_sparse_gradients():
    for as_dense in (False, True):
        table = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=as_dense)
        table(torch.tensor([0, min(hvd.rank(), 3)])).sum().backward()
        optimizer.step()
        expected = torch.zeros(4, 2)
        for i in ranks():
            expected[0] -= 1 / hvd.size()
            expected[min(i, 3)] -= 1 / hvd.size()
        torch.testing.assert_close(table.weight.detach(), expected)
        assert table.weight.grad.is_sparse
    # SparseAdam accepts only sparse gradients.
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=True)
    table(torch.tensor([0, min(hvd.rank(), 3)])).sum().backward()
    optimizer.step()
    assert table.weight.grad.sparse_dim() == 1


def check_optimizer_refusals():
    model = model_of(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    named = [*model.named_parameters()]
    for arguments, message in (
        ({"backward_passes_per_step": 0}, "must be > 0"),
        ({"backward_passes_per_step": 1.5}, "1.5.* an integer"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "not supported with op != Average"),
        ({"named_parameters": model.parameters()}, "sequence of tuples"),
        ({"named_parameters": named + named[:1]}, "Found duplicates: 0.weight"),
        ({"named_parameters": named[1:]}, "1 of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(inner, **arguments)
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.DistributedOptimizer(inner, op=hvd.Adasum)


def check_sync_batch_norm():
    whole = torch.randn(12, 4, 5, dtype=torch.float32, generator=torch.Generator().manual_seed(3))
    rows = 12 // hvd.size()
    own = whole[hvd.rank() * rows :][:rows].clone().requires_grad_()
    reference = whole.clone().requires_grad_()
    ours, torchs = hvd.SyncBatchNorm(4, momentum=None), nn.BatchNorm1d(4, momentum=None)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    for _ in range(2):
        y, expected = ours(own), torchs(reference)
        close(y, expected[hvd.rank() * rows :][:rows])
    (y**3).sum().backward()
    (expected**3).sum().backward()
    close(own.grad, reference.grad[hvd.rank() * rows :][:rows])
    close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), torchs.weight.grad)
    for name, x in torchs.state_dict().items():
        close(ours.state_dict()[name], x)
    close(ours.eval()(own), torchs.eval()(whole)[hvd.rank() * rows :][:rows])


def check_sync_batch_norm_of_float64():
    whole = whole_batch()[0]
    rows = 12 // hvd.size()
    ours, torchs = hvd.SyncBatchNorm(6).double(), nn.BatchNorm1d(6).double()
    close(ours(own_share()[0]), torchs(whole)[hvd.rank() * rows :][:rows])
    for name, x in torchs.state_dict().items():
        close(ours.state_dict()[name], x)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def make_all():
    warnings.simplefilter("error")
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.rank()
    hvd.init()
    popdist_py.init()
    for check in CHECKS:
        check()
        hvd.barrier()


if __name__ == "__main__":
    make_all()
    print(f"rank {hvd.rank()} of {hvd.size()}: {len(CHECKS)} checks")
