"""Smoke tests of the process group with a sum, a broadcast, a gather and DDP."""

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values


def _first_calls(rank):
    tensor = torch.full((5,), float(rank + 1))
    dist.all_reduce(tensor)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": rank})
    dist.barrier()
    return dist.get_backend(), tensor.tolist(), gathered


@pytest.mark.parametrize("backend", ["gloo", "popdist"])
def test_ranks_reduce_and_gather(backend):
    for name, reduced, gathered in values(run_ranks(2, _first_calls, backend=backend)):
        assert name == backend
        assert reduced == [3.0] * 5
        assert gathered == [{"rank": 0}, {"rank": 1}]


def _train(rank):
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(30, 7), gradient_as_bucket_view=True)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 30)).square().mean().backward()
    return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


def test_ddp_has_the_gradients_that_it_has_over_gloo():
    ours = values(run_ranks(2, _train))
    theirs = values(run_ranks(2, _train, backend="gloo"))
    assert ours[0] == ours[1]
    for mine, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(other))


def _average_integers(rank):
    tensor = torch.tensor([3 * rank + 2, -3 * rank - 2, 4])
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    output = torch.empty(1, dtype=torch.int32)
    dist.reduce_scatter_tensor(
        output, torch.tensor([2, 3], dtype=torch.int32) + rank, dist.ReduceOp.AVG
    )
    return tensor.tolist(), output.tolist()


def test_integers_are_averaged_toward_zero():
    assert values(run_ranks(2, _average_integers)) == [([3, -3, 4], [2]), ([3, -3, 4], [3])]


def _change_size(rank):
    tensor, output = torch.ones(4), torch.empty(8)
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(output, tensor)
    for each in (tensor, output):
        each.untyped_storage().resize_(0)  # as FSDP does
        each.untyped_storage().resize_(64)
    return True


def test_a_tensor_that_was_reduced_may_change_its_size():
    assert values(run_ranks(2, _change_size)) == [True, True]
