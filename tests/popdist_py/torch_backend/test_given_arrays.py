"""Collectives that fill small and large tensors, with and without reading peer memory."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values

from popdist_py.collectives.within_host.peer_memory import PeerMemory

# The sizes of a part need one slot, several slots, and direct reads of peer memory.
SIZES = [0, 1, 300, 400_003, 600_001]


def _numbers(rank, size, block=0):
    return torch.arange(size, dtype=torch.float32) * (rank + 1) + 7 * block + rank


def _fill_all(rank, sizes, can_read):
    works_with = PeerMemory.works_with if can_read else lambda *_: False
    with mock.patch.object(PeerMemory, "works_with", works_with):
        count = dist.get_world_size()
        for size in sizes:
            for root in (0, count - 1):
                _check_moves(rank, count, size, root)
                _check_reductions(rank, count, size, root)
            _check_uneven(rank, count, size)


def _check_moves(rank, count, size, root):
    own = _numbers(rank, size)
    everyone = [_numbers(other, size) for other in range(count)]
    found = [torch.zeros(size) for _ in range(count)]
    dist.all_gather(found, own)
    assert all(map(torch.equal, found, everyone))
    found = [torch.zeros(size) for _ in range(count)]
    dist.gather(own, found if rank == root else None, root)
    expected = everyone if rank == root else [torch.zeros(size)] * count
    assert all(map(torch.equal, found, expected))
    blocks = [_numbers(root, size, block) for block in range(count)]
    found = torch.zeros(size)
    dist.scatter(found, blocks if rank == root else None, root)
    assert torch.equal(found, blocks[rank])
    if size:
        whole = torch.zeros(count * size)
        whole[rank * size : (rank + 1) * size] = own
        dist.all_gather_into_tensor(whole, whole[rank * size : (rank + 1) * size])
        assert torch.equal(whole, torch.cat(everyone))


def _check_reductions(rank, count, size, root):
    own = _numbers(rank, size)
    total = sum(_numbers(other, size) for other in range(count))
    found = own.clone()
    dist.reduce(found, root)
    torch.testing.assert_close(found, total if rank == root else own)
    if not size:
        return
    blocks = torch.cat([_numbers(rank, size, block) for block in range(count)])
    before, found = blocks.clone(), torch.zeros(size)
    dist.reduce_scatter_tensor(found, blocks)
    expected = sum(_numbers(other, size, rank) for other in range(count))
    torch.testing.assert_close(found, expected)
    assert torch.equal(blocks, before)
    dist.reduce_scatter_tensor(blocks[rank * size : (rank + 1) * size], blocks)
    torch.testing.assert_close(blocks[rank * size : (rank + 1) * size], expected)


def _check_uneven(rank, count, size):
    """Rank r sends ``size * (r + 1) // (to + 1)`` numbers to the rank ``to``."""

    def length(sender, receiver):
        return size * (sender + 1) // (receiver + 1)

    inputs = [_numbers(rank, length(rank, to), to) for to in range(count)]
    outputs = [torch.zeros(length(source, rank)) for source in range(count)]
    dist.all_to_all(outputs, inputs)
    expected = [_numbers(source, length(source, rank), rank) for source in range(count)]
    assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize(
    ("count", "can_read"),
    [
        (2, True),
        pytest.param(1, True, marks=pytest.mark.sweep),
        pytest.param(3, False, marks=pytest.mark.sweep),
    ],
)
def test_given_tensors_are_filled(count, can_read):
    values(run_ranks(count, _fill_all, SIZES, can_read))


def _expect_more(rank, size):
    inputs = [torch.zeros(size), torch.zeros(size)]
    outputs = [torch.zeros(size), torch.zeros(size + (rank == 0))]
    dist.all_to_all(outputs, inputs)


@pytest.mark.parametrize("size", [3, 600_001])
def test_a_block_that_does_not_fit_is_named(size):
    for outcome in run_ranks(2, _expect_more, size):
        assert "CollectiveMismatchError" in outcome.kinds
        message = f"rank 1 sends {4 * size} bytes to rank 0, which expects {4 * size + 4} bytes"
        assert message in outcome.error
