"""The contract of a communicator, checked from inside a job; run by test_contract.py.

Every argument is a way of joining: variables, ``A=1,B=2`` or nothing.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
import torch
from jobs import ways

import popdist_py
from popdist_py.collectives.communicators.solo import SoloCommunicator

SIZES = [0, 1, 5, 1000, 40_000, 700_001]
FUNCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
DTYPES = [np.float32, np.float64, np.float16, np.int8, np.int32, np.int64, np.uint8, np.bool_]
Pair = namedtuple("Pair", "left right")


def of_instance(instance, size, dtype):
    return ((np.arange(size) + instance) % 3).astype(dtype)


def check_reductions():
    for size in SIZES:
        for dtype in DTYPES:
            everyone = [of_instance(i, size, dtype) for i in range(count)]
            for op, function in FUNCTIONS.items():
                expected = everyone[0].copy()
                for other in everyone[1:]:
                    expected = function(expected, other)
                x = everyone[me].copy()
                assert popdist_py.all_reduce(x, op) is x
                assert np.array_equal(x, expected), (size, dtype, op)
        for dtype in (np.float32, np.float64):
            x = of_instance(me, size, dtype)
            popdist_py.all_reduce(x, "mean")
            mean = np.mean([of_instance(i, size, dtype) for i in range(count)], axis=0)
            assert np.allclose(x, mean), (size, dtype)


def check_equal_bits():
    for dtype in (np.float16, np.float32):
        for size in (100, 300_000):
            x = np.random.default_rng(me).normal(size=size).astype(dtype)
            popdist_py.all_reduce(x)
            for other in popdist_py.all_gather(x):
                assert np.array_equal(x, other), (dtype, size)


def check_halves_are_added_in_float32():
    # Added in halves, 1 vanishes beside 2048 (float16) and 256 (bfloat16), every time.
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        x = torch.full((5,), large if me == 0 else 1.0, dtype=dtype)
        popdist_py.all_reduce(x)
        assert torch.equal(x, torch.full((5,), large + count - 1).to(dtype)), (x, dtype)


def check_windows():
    for size in (1, 5000, 700_001):
        x = comm.gradient_buffer(4 * size).view(np.float32)
        assert not x.any()
        for _ in range(2):
            x[:] = of_instance(me, size, np.float32)
            popdist_py.all_reduce(x)
            assert np.array_equal(x, sum(of_instance(i, size, np.float32) for i in range(count)))
        tail = x[size // 2 :]
        tail[:] = me
        popdist_py.all_reduce(torch.from_numpy(tail), "max")
        assert (tail == count - 1).all()
    # One instance's array lives in the window, the others' do not: still the same result.
    mixed = x if me == 0 else np.empty_like(x)
    mixed[:] = me + 1
    popdist_py.all_reduce(mixed)
    assert (mixed == count * (count + 1) / 2).all()


def check_host_memory():
    memory = comm.host_memory
    if memory is None:
        return
    common = memory.common_buffer(100).view(np.uint8)
    assert not common.any()
    comm.barrier()
    common[me] = me + 1
    comm.barrier()
    assert common[:count].tolist() == list(range(1, count + 1))
    for size in (1, 5000, 700_001):
        own = memory.own_slice(size)
        slices = sorted((part.start, part.stop) for part in comm.all_gather_object(own))
        assert slices[0][0] == 0
        assert slices[-1][1] == size
        assert all(a[1] == b[0] for a, b in pairwise(slices))
        x = comm.gradient_buffer(4 * size).view(np.float32)
        x[:] = of_instance(me, size, np.float32)
        memory.reduce_slice(x)
        expected = of_instance(me, size, np.float32)
        expected[own] = sum(of_instance(i, size, np.float32)[own] for i in range(count))
        comm.barrier()
        assert np.array_equal(x, expected), size
    with pytest.raises(ValueError, match=r"gradient_buffer\(\)"):
        memory.reduce_slice(np.zeros(5))


def check_tree():
    for rows in (1, 3, 4):
        everyone = np.random.default_rng(0).normal(size=(rows * count, 70_001)).astype(np.float32)
        leaves = comm.gradient_buffer(rows * 70_001 * 4).view(np.float32).reshape(rows, -1)
        leaves[:] = everyone[me * rows : (me + 1) * rows]
        comm.add_replicas(leaves)
        SoloCommunicator().add_replicas(everyone)
        assert np.array_equal(leaves[0], everyone[0]), rows


def check_moves():
    for size in SIZES:
        for root in {0, count - 1}:
            x = of_instance(me, size, np.int64)
            popdist_py.broadcast(x, root)
            assert np.array_equal(x, of_instance(root, size, np.int64))
        for index, row in enumerate(popdist_py.all_gather(of_instance(me, size, np.float32))):
            assert np.array_equal(row, of_instance(index, size, np.float32))
    halves = popdist_py.all_gather(torch.full((3,), float(me), dtype=torch.bfloat16))
    assert [half[0].item() for half in halves] == list(range(count))
    for scalar in (torch.tensor(me), torch.tensor(float(me), dtype=torch.bfloat16), np.array(me)):
        assert [(x.shape, int(x)) for x in popdist_py.all_gather(scalar)] == [
            (scalar.shape, i) for i in range(count)
        ]
    assert popdist_py.all_gather({"text": "x" * me}) == [{"text": "x" * i} for i in range(count)]
    big = popdist_py.all_gather("x" * (3_000_000 if me == 0 else 5))
    assert [len(text) for text in big] == [3_000_000] + [5] * (count - 1)
    assert comm.broadcast_object({"from": me}, count - 1) == {"from": count - 1}
    block = popdist_py.reduce_scatter(np.arange(count * 6.0).reshape(count * 2, 3) * (me + 1))
    whole = np.arange(count * 6.0).reshape(count * 2, 3) * (count * (count + 1) / 2)
    assert np.array_equal(block, whole[2 * me : 2 * me + 2])


def check_python_values():
    total = count * (count - 1) // 2
    given = {"b": me, "a": [float(me), True], "pair": Pair(np.float32(me), torch.tensor(me))}
    reduced = popdist_py.all_reduce(given)
    assert reduced == {"b": total, "a": [float(total), count], "pair": Pair(total, total)}
    assert list(reduced) == ["b", "a", "pair"]
    assert type(reduced["b"]) is int
    assert type(reduced["pair"].left) is np.float32
    strided = np.full((4, 6), me)[:, ::2]
    popdist_py.all_reduce(strided)
    assert (strided == total).all()
    transposed = torch.full((4, 6), float(me)).t()
    popdist_py.all_reduce(transposed)
    assert (transposed == total).all()
    parameter = torch.nn.Parameter(torch.full((3,), float(me)))
    popdist_py.all_reduce(parameter)
    assert (parameter == total).all()


def check_background():
    handles = [popdist_py.all_reduce(np.full(1000, me + n), async_op=True) for n in range(5)]
    direct = popdist_py.all_reduce(me)
    assert all(handle.is_completed() for handle in handles)
    for n, handle in enumerate(handles):
        assert (handle.wait() == direct + n * count).all()
    failing = popdist_py.all_reduce(np.full(3, "x"), async_op=True)
    try:
        failing.wait()
        raise AssertionError("text was added")
    except TypeError:
        pass


def check_groups():
    inside = popdist_py.execute_on_instances({0}, popdist_py.all_reduce, 5)
    assert inside == (5 if me == 0 else None)
    if count > 2:
        group = {0, count - 1}
        found = popdist_py.execute_on_instances(
            group, lambda: (popdist_py.all_gather(me), popdist_py.broadcast(me, count - 1))
        )
        assert found == (([0, count - 1], count - 1) if me in group else None)
    assert popdist_py.execute_on_instances(range(count + 3), popdist_py.all_reduce, 1) == count


checks = [value for name, value in list(globals().items()) if name.startswith("check_")]
for way, comm in ways(sys.argv[1:]):
    me, count = comm.instance_index, comm.num_instances
    for check in checks:
        check()
        popdist_py.synchronize()
    between_hosts = type(getattr(comm, "_slice_owners", None)).__name__
    print(f"[{way}] {type(comm).__name__} {len(checks)} checks, {between_hosts}")
