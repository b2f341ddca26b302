"""Calls with any shapes, strides, dtypes and operations have the values that torch computes.

All ranks of one job draw the same random examples, so each rank knows the tensors of all ranks.
"""

import functools
import random

import torch
import torch.distributed as dist
from support.ranks import run_ranks, values

_REDUCED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
_MOVED = (*_REDUCED, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn)
_OPS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
_LAYOUTS = ("dense", "strided", "turned")
_EXAMPLES = 40


def _examples():
    """Yield random generators that draw the same values on all ranks.

    Hypothesis would draw different values on each rank, because it also tries constants from the
    modules that a process has imported.
    """
    for number in range(_EXAMPLES):
        yield random.Random(number)


def _shape(dice):
    if dice.random() < 0.5:
        return tuple(dice.randint(0, 5) for _ in range(dice.randint(0, 4)))
    return (dice.randint(2000, 70_000),)


def _tensor(seed, rank, shape, dtype, layout):
    """Return small numbers, whose sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    if layout == "strided":
        tensor = torch.randint(1, 3, (*shape, 2), generator=generator).to(dtype)[..., 1]
    else:
        tensor = torch.randint(1, 3, shape, generator=generator).to(dtype)
    return tensor.t() if layout == "turned" and tensor.dim() == 2 else tensor


def _check(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    bits = torch.uint8 if found.dtype.itemsize == 1 else found.dtype
    assert torch.equal(found.view(bits), expected.contiguous().view(bits))


def _reduce_anything(rank):
    size = dist.get_world_size()
    for seed, dice in enumerate(_examples()):
        shape, dtype, layout = _shape(dice), dice.choice(_REDUCED), dice.choice(_LAYOUTS)
        op, async_op = dice.choice(list(_OPS)), dice.choice((False, True))
        rows = [_tensor(seed, each, shape, dtype, layout) for each in range(size)]
        expected = functools.reduce(_OPS[op], rows)
        tensor = _tensor(seed, rank, shape, dtype, layout)
        work = dist.all_reduce(tensor, op, async_op=async_op)
        if async_op:
            work.wait()
        _check(tensor, expected)
        if shape:
            whole = torch.stack([rows[rank]] * size)
            output = torch.empty_like(rows[rank])
            dist.reduce_scatter_single(output, whole, op)
            _check(output, expected)


def _move_anything(rank):
    size = dist.get_world_size()
    for seed, dice in enumerate(_examples()):
        shape, dtype, layout = _shape(dice), dice.choice(_MOVED), dice.choice(_LAYOUTS)
        root = dice.randrange(size)
        rows = [_tensor(seed, each, shape, dtype, layout) for each in range(size)]
        tensor = _tensor(seed, rank, shape, dtype, layout)
        gathered = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(gathered, tensor)
        dist.broadcast(tensor, root)
        _check(tensor, rows[root])
        for found, row in zip(gathered, rows, strict=True):
            _check(found, row)


def test_any_tensor_is_reduced():
    values(run_ranks(2, _reduce_anything))


def test_any_tensor_is_moved():
    values(run_ranks(3, _move_anything))
